"""Compiler: decide where the pieces of one rank lie, and turn operations into flat calls.

An operand of an attention is used in place wherever it can be: as a view of the caller's tensor
(ring, hop 0), as a view of the message that brought it (ring, later hops), and only where it comes
from several places is it put together in a buffer (Ulysses).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from weft.core.schedule import Attend, Exchange, Piece, Schedule, Transfer
from weft.run.kernels.tiles import Tiles
from weft.run.places import Part, Place, cover, hulls, is_slice
from weft.run.program import Program, Region
from weft.run.steps import Cast, Copy, Fill, New, Post, View, Wait


class Compiler:
    """What both directions share: arrivals, operands, messages. One instance compiles one program."""

    def __init__(self, schedule: Schedule, rank: int, tag: int) -> None:
        self.schedule, self.rank, self.tag = schedule, rank, tag
        self.problem, self.mask = schedule.attention
        self.way = "backward " if schedule.backward else ""
        self.narrow = getattr(torch, self.problem.dtype)
        self.wide = torch.float64 if self.problem.dtype == "float64" else torch.float32
        self.program = Program()
        self.arrivals: list[tuple[int, int, Place]] = []
        """(op, peer, place) of every piece that is sent to this rank."""
        self.messages: dict[tuple[int, int], list[Piece]] = {}
        self.waited: set[tuple[int, int]] = set()
        self.ready: set[int] = set()
        """Parts that have been copied, by id: operands may be put together piece by piece."""
        mine = [op for _, op in schedule.attends() if op.rank == rank]
        self.operands = {
            tensor: [
                Place(f"{tensor}{i}", hull)
                for i, hull in enumerate(hulls([getattr(op, tensor) for op in mine]))
            ]
            for tensor in ("q", "kv")
        }
        for op, exchange in enumerate(schedule.ops):
            if isinstance(exchange, Exchange):
                self._lay_out_arrivals(op, exchange)
        self.parts: dict[str, list[Part]] = {}
        self.views: dict[str, View] = {}

    def _lay_out_arrivals(self, op: int, exchange: Exchange) -> None:
        for peer, pieces in by_peer(exchange.transfers, to=self.rank).items():
            name = f"{self.way}in {op} from {peer}"
            slots = self.lay_out(name, pieces)
            self.program.incoming[op, peer] = name
            self.messages[op, peer] = pieces
            self.arrivals += [
                (op, peer, Place(slot, piece)) for slot, piece in zip(slots, pieces, strict=True)
            ]

    def lay_out(self, name: str, pieces: list[Piece]) -> list[str]:
        """Give pieces regions in one flat buffer; the widest dtype first, so that all are aligned."""
        at, found = 0, {}
        for i in sorted(range(len(pieces)), key=lambda i: -self.dtype(pieces[i]).itemsize):
            found[i] = f"{name} #{i}"
            region = Region(name, at, self.shape(pieces[i]), self.dtype(pieces[i]))
            self.program.regions[found[i]] = region
            at += region.num_bytes
        self.program.sizes[name] = at
        return [found[i] for i in range(len(pieces))]

    def dtype(self, piece: Piece) -> torch.dtype:
        return self.wide if piece.is_sum else self.narrow

    def shape(self, piece: Piece) -> tuple[int, ...]:
        planes = 2 if piece.tensor.endswith("kv") else 1
        sizes = (piece.heads.size, piece.tokens.size, self.problem.head_dim)
        return planes, self.problem.batch, *sizes

    def home(self, tensor: str) -> Place:
        """The caller's own tensor, in the caller's row order."""
        layout = self.problem.home(tensor)
        heads = (
            self.problem.kv_heads_of(self.problem.all_heads)
            if tensor.endswith("kv")
            else self.problem.all_heads
        )
        return Place(f"home {tensor}", Piece(tensor, heads, layout.held(self.rank)), layout.order(self.rank))

    def places(self, tensor: str, before: int | None = None) -> list[Place]:
        """Where pieces of a tensor can be found: at home, or in messages of earlier operations."""
        here = [self.home(tensor)]
        return here + [
            p for op, _, p in self.arrivals if p.piece.tensor == tensor and (before is None or op < before)
        ]

    def wait_for(self, op: int, peer: int) -> None:
        """Wait for a message once, before its first use."""
        if (op, peer) not in self.waited:
            self.waited.add((op, peer))
            self.program.steps.append(Wait(op, peer))

    def wait_at(self, place: Place) -> None:
        """Wait for the message that a place lies in, if it lies in one."""
        for op, peer, arrival in self.arrivals:
            if arrival.slot == place.slot:
                self.wait_for(op, peer)

    def copy(self, part: Part, target: Place, *, add: bool = False) -> None:
        self.wait_at(part.place)
        source = part.place.index(_as(part.piece, part.place.piece.tensor))
        into = target.index(_as(part.piece, target.piece.tensor))
        self.program.steps.append(Copy(part.place.slot, source, target.slot, into, add))

    def collect(self, target: Place, parts: list[Part], *, padded: bool = False) -> None:
        """Put a slot together: copies where parts tile it, zero and add where they overlap or miss some."""
        tiled = tiles(target.piece, parts)
        if padded or not tiled:
            self.program.steps.append(Fill(target.slot))
        for part in parts:
            self.copy(part, target, add=not tiled)

    def operand(self, wanted: Piece) -> Place:
        """The operand slot a piece belongs to, with everything the piece needs in it."""
        place = next(p for p in self.operands[wanted.tensor] if p.piece.covers(wanted))
        if place.slot not in self.parts:
            self.place_operand(place)
        for part in self.parts[place.slot]:
            if id(part) not in self.ready and part.piece & wanted:
                self.ready.add(id(part))
                self.copy(part, place)
        return place

    def place_operand(self, place: Place) -> None:
        """Decide whether an operand is a view or a buffer, and what has to be copied into it."""
        parts = cover(place.piece, self.places(place.piece.tensor))
        self.parts[place.slot] = [] if self.as_view(place, parts) else parts
        if place.slot not in self.views:
            self.new_buffer(place, self.narrow)

    def as_view(self, place: Place, parts: list[Part]) -> bool:
        """Use a piece where it lies, if it lies in one place and in one stride."""
        if len(parts) != 1 or (parts[0].piece.heads, parts[0].piece.tokens) != (
            place.piece.heads,
            place.piece.tokens,
        ):
            return False
        source = parts[0].place
        index = source.index(parts[0].piece)
        if not is_slice(index):
            return False
        self.wait_at(source)
        self.views[place.slot] = View(source.slot, index, place.slot)
        self.program.steps.append(self.views[place.slot])
        return True

    def new_buffer(self, place: Place, dtype: torch.dtype) -> None:
        name = f"buffer {place.slot}"
        region = Region(name, 0, self.shape(place.piece), dtype)
        self.program.regions[place.slot] = region
        self.program.sizes[name] = region.num_bytes

    def post(self, op: int, exchange: Exchange, sources: dict[str, list[Place]]) -> None:
        """Pack one message for each peer and start the exchange."""
        outgoing = by_peer(exchange.transfers, src=self.rank)
        for peer, pieces in outgoing.items():
            passed_on = self._same_message(op, pieces)
            if passed_on:
                self.wait_for(*passed_on)
                self.program.outgoing[op, peer] = self.program.incoming[passed_on]
                continue
            name = f"{self.way}out {op} to {peer}"
            self.program.outgoing[op, peer] = name
            for slot, piece in zip(self.lay_out(name, pieces), pieces, strict=True):
                places = sources.get(piece.tensor) or self.places(piece.tensor, before=op)
                self.collect(Place(slot, piece), cover(piece, places))
        receives = tuple(peer for at, peer in self.messages if at == op)
        if outgoing or receives:
            label = f"op {op} ({exchange.label or 'exchange'})"
            self.program.steps.append(Post(op, tuple(outgoing), receives, label, self.tag))

    def _same_message(self, op: int, pieces: list[Piece]) -> tuple[int, int] | None:
        """An earlier message with exactly these pieces goes on as it came, without a copy."""
        return next((key for key, had in self.messages.items() if key[0] < op and had == pieces), None)

    def calculation(self, op: Attend) -> dict[str, Any]:
        """The fields of a Calculation."""
        q, kv = self.operand(op.q), self.operand(op.kv)
        share = self.problem.heads // self.problem.kv_heads
        kv_of = np.searchsorted(op.kv.heads.array, op.q.heads.array // share)
        same = np.array_equal(kv_of, np.arange(op.kv.heads.size)) and share == 1
        others = [a.q for _, a in self.schedule.attends() if a.rank == self.rank and a.q & q.piece]
        return {
            "q": q.slot,
            "q_index": q.index(op.q),
            "kv": kv.slot,
            "kv_index": kv.index(op.kv),
            "out": f"out of {q.slot}",
            "lse": f"lse of {q.slot}",
            "tiles": Tiles.of(self.mask, op),
            "kv_of": None if same else torch.from_numpy(kv_of),
            "whole": all(piece == q.piece for piece in others),
            "sum_dtype": self.wide,
        }

    def finish(self, tensor: str, parts: list[Part]) -> None:
        """Put a result together in the caller's layout, in the caller's dtype."""
        target = self.home(tensor)
        rows = self.problem.home(tensor).rows(self.rank)
        padded = rows > target.piece.tokens.size
        if len(parts) == 1 and not padded and self._is_result(parts[0].place, target):
            self.program.steps.append(Cast(parts[0].place.slot, target.slot, self.narrow))
            self.program.direct[target.slot] = parts[0].place.slot
            return
        planes, batch, heads, _, head_dim = self.shape(target.piece)
        dtype = self.narrow if tiles(target.piece, parts) else self.wide
        self.program.steps.append(New(target.slot, (planes, batch, heads, rows, head_dim), dtype))
        self.collect(target, parts, padded=padded)
        self.program.steps.append(Cast(target.slot, target.slot, self.narrow))

    def sum_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every output and log-sum-exp slot."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for place in self.operands["q"]:
            _, *shape = self.shape(place.piece)
            found[f"out of {place.slot}"] = (tuple(shape), self.wide)
            found[f"lse of {place.slot}"] = ((*shape[:-1], 1), self.wide)
        return found

    def _is_result(self, source: Place, target: Place) -> bool:
        """Whether a computed slot is the result row by row; a buffer is not, the next run writes it again."""
        same = (source.piece.heads, source.piece.tokens) == (target.piece.heads, target.piece.tokens)
        return same and source.slot not in self.program.regions and is_slice(target.index(target.piece))

    def sums(self, tensor: str, of: str, slot: str) -> list[Place]:
        """Places of what is computed for each operand: outputs, or gradients."""
        return [Place(slot.format(p.slot), _as(p.piece, tensor)) for p in self.operands[of]]


def by_peer(
    transfers: tuple[Transfer, ...], *, src: int | None = None, to: int | None = None
) -> dict[int, list[Piece]]:
    """Pieces by the other end, in list order: both ends pack alike."""
    found: dict[int, list[Piece]] = {}
    for transfer in transfers:
        if transfer.src == src:
            found.setdefault(transfer.dst, []).append(transfer.piece)
        if transfer.dst == to:
            found.setdefault(transfer.src, []).append(transfer.piece)
    return found


def _as(piece: Piece, tensor: str) -> Piece:
    return piece if piece.tensor == tensor else Piece(tensor, piece.heads, piece.tokens)


def tiles(whole: Piece, parts: list[Part]) -> bool:
    """Whether parts fill a piece without overlapping."""
    pieces = [_as(part.piece, "") for part in parts]
    size = sum(piece.heads.size * piece.tokens.size for piece in pieces)
    overlap = any(a & b for i, a in enumerate(pieces) for b in pieces[:i])
    return size == whole.heads.size * whole.tokens.size and not overlap
