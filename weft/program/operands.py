"""Operands: where the queries, keys and values that attentions read lie on a rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.core.indices import Indices
from weft.core.problem import ITEM_BYTES, Problem
from weft.core.schedule import Attend, Piece
from weft.program.lowering import Lowering, Messages
from weft.program.pieces import cover, hulls
from weft.program.slots import Slot
from weft.program.steps import Copy, CopySegment, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.program.lowering import RankOp


@dataclass(eq=False, slots=True)
class Operand:
    """Queries, or keys and values, that attentions read from one slot."""

    name: str
    hull: Piece
    number: int
    readers: int = 0
    partial: bool = False
    """Whether some attention does not read all of it."""
    is_home: bool = False
    """Whether these queries are all of the caller's tensor, in its order and without padding."""
    slot: Slot | None = None
    is_view: bool = False
    """Whether all of it lies elsewhere already: nothing is copied into its slot."""
    sums: tuple[Slot, ...] = ()
    """What attentions write for it: output and log-sum-exp, or its gradient."""
    written: int = 0
    copied: list[Piece] = field(init=False)
    """Pieces that have been copied into a slot of its own, which few operands have."""
    complete: set[int] = field(init=False)
    """Numbers of pieces that are complete in this slot."""


class AttentionLowering(Lowering):
    """Base of both directions of an attention."""

    kept: frozenset[str] = frozenset()
    """Tensors of which the forward saved what it received."""

    def begin(self, attends: list[Attend], ops: Sequence[RankOp]) -> None:
        assert isinstance(self.schedule.problem, Problem)
        self.problem = self.schedule.problem
        self.operand_of: dict[int, Operand] = {}
        self.operands: dict[str, list[Operand]] = {}
        queries = self._operands("q", [op.q for op in attends])
        keys = self._operands("kv", [op.kv for op in attends])
        self.reads = zip(queries, keys, strict=True)
        """The operands of all attentions, in order."""
        self.sent = {
            self.pieces.number(pieces[0])
            for _, op in ops
            if self.target.near and isinstance(op, Messages)  # without a window it makes no difference
            for pieces in op.sends.values()
            if len(pieces) == 1
        }
        self.home = {tensor: self.home_slot(tensor, "input") for tensor in ("q", "kv")}
        for q in self.operands["q"]:
            q.is_home = self._is_home(q.hull)

    def _operands(self, tensor: str, pieces: list[Piece]) -> list[Operand]:
        """The operand that each piece belongs to."""
        numbers = [self.pieces.number(piece) for piece in pieces]
        distinct = dict(zip(numbers, pieces, strict=True))
        joined, key = distinct, frozenset(distinct)
        if len(key) > 1 and key not in self.pieces.disjoint:
            joined = {self.pieces.number(hull): hull for hull in hulls(list(distinct.values()))}
            if len(joined) == len(distinct):
                self.pieces.disjoint.add(key)
        operands = {n: Operand(f"{tensor}{i}", joined[n], n) for i, n in enumerate(joined)}
        for number, piece in distinct.items():
            operand = operands.get(number)
            if operand is None:
                operand = next(each for each in operands.values() if each.hull.covers(piece))
                operand.partial = True
            self.operand_of[number] = operand
        self.operands[tensor] = list(operands.values())
        reads = [self.operand_of[number] for number in numbers]
        for operand in reads:
            operand.readers += 1
        return reads

    def home_slot(self, tensor: str, memory: str) -> Slot:
        """The caller's own tensor, in the caller's row order."""
        layout = self.problem.home(tensor)
        heads = self.problem.kv_heads if tensor.endswith("kv") else self.problem.heads
        piece = Piece(tensor, Indices.span(0, heads), layout.held(self.rank))
        slot = self.slot(f"home {tensor}", memory, piece, self.narrow, layout.rows(self.rank))
        if layout.shards[self.rank] != piece.tokens.runs:
            slot.order = layout.order(self.rank)
        self.program.slots[slot.name] = slot
        return slot

    def _is_home(self, piece: Piece) -> bool:
        """Whether a piece is all that the rank has of a query tensor, row by row, without padding."""
        home = self.home["q"]
        own = home.piece
        assert own is not None
        return own.is_like(piece) and home.order is None and home.shape[3] == own.tokens.size

    def lse(self, q: Operand, memory: str) -> Slot:
        shape = (1, self.problem.batch, q.hull.heads.size, q.hull.tokens.size, 1)
        size = self.problem.batch * q.hull.heads.size * q.hull.tokens.size * ITEM_BYTES[self.wide]
        return Slot(f"lse of {q.name}", memory, size, self.wide, q.hull, shape)

    def sources(self, piece: Piece) -> list[Slot]:
        return [self.home[piece.tensor], *self.arrived[piece.tensor]]

    def lying(self, piece: Piece, number: int) -> Slot | None:
        operand = self.operand_of.get(number)
        if operand is None or operand.number != number:
            return None
        slot = self.ready(operand, piece)
        return slot if slot.memory == self.buffer_memory and not operand.is_view else None

    def is_copied(self, pieces: list[Piece]) -> bool:
        numbers = [self.pieces.number(piece) for piece in pieces]
        return not any(n in self.operand_of and self.operand_of[n].number == n for n in numbers)

    def ready(self, operand: Operand, wanted: Piece) -> Slot:
        """The slot of an operand, with everything in it that a piece of the operand needs."""
        if operand.slot is None:
            self._place(operand)
        slot = operand.slot
        assert slot is not None
        if operand.is_view:
            if self.unwaited:
                self.wait_at(slot)
        elif operand.partial or not operand.copied:
            self._complete(operand, slot, wanted)
        return slot

    def _place(self, operand: Operand) -> None:
        """Decide whether an operand is used where it lies, or has a buffer to be put together in."""
        hull, saved = operand.hull, operand.hull.tensor in self.target.save
        if at_home := self.view(operand.name, self.home[hull.tensor], hull):
            operand.slot, operand.is_view = at_home, True
            return
        if hull.tensor in self.kept:
            operand.slot, operand.is_view = self.slot(operand.name, "saved", hull), True
            self.program.slots[operand.name] = operand.slot
            return
        exact = self.exact.get(operand.number)
        if exact is not None and not saved:
            operand.slot, operand.is_view = exact, True
        elif exact is not None and exact.parent is None and exact.memory == "workspace":
            exact.memory = "saved"  # received into memory that outlives the call
            operand.slot, operand.is_view = exact, True
        elif not saved and (slot := self._part_of_arrival(operand)):
            operand.slot, operand.is_view = slot, True
        else:
            memory = self.buffer_memory if operand.number in self.sent else "workspace"
            operand.slot = self.slot(operand.name, "saved" if saved else memory, hull)
            operand.copied, operand.complete = [], set()
        if saved:
            assert operand.slot is not None
            self.program.saved[operand.name] = operand.slot

    def _part_of_arrival(self, operand: Operand) -> Slot | None:
        covering = (s for s in self.arrived[operand.hull.tensor] if s.piece and s.piece.covers(operand.hull))
        source = next(covering, None)
        return self.view(operand.name, source, operand.hull) if source is not None else None

    def view(self, name: str, source: Slot, piece: Piece) -> Slot | None:
        """A piece where it lies, if it lies there in one stride."""
        own = source.piece
        assert own is not None
        if not own.covers(piece) or not source.in_one_stride(piece):
            return None
        if self.unwaited:
            self.wait_at(source)
        if own.is_like(piece) and source.shape[3] == own.tokens.size:
            return source
        slot = self.slot(name, source.memory, piece, source.dtype)
        slot.parent = source
        self.steps.append(View(-1, source, slot))
        return slot

    def _complete(self, operand: Operand, slot: Slot, wanted: Piece) -> None:
        number = self.pieces.number(wanted)
        if number in operand.complete:
            return
        missing = wanted.without(operand.copied) if operand.copied else [wanted]
        segments = [segment for piece in missing for segment in self._find(piece, slot)]
        if segments or not missing:
            operand.complete.add(number)
        if segments:
            operand.copied += missing
            for segment in segments:
                self.wait_at(segment.source)
            self._copy(segments)

    def _find(self, piece: Piece, target: Slot) -> list[CopySegment]:
        arrived = self.exact.get(self.pieces.number(piece))
        places = [self.home[piece.tensor], *self.arrived[piece.tensor]] if arrived is None else (arrived,)
        return cover(piece, places, target)

    def _copy(self, segments: list[CopySegment]) -> None:
        """Unpack together with what was unpacked just before: an exchange brings queries, keys and values."""
        last = self.steps[-1] if self.steps else None
        if isinstance(last, Copy) and last.op == -1 and not last.add:
            written = {segment.target.root for segment in last.segments}
            if not any(segment.source.root in written for segment in segments):
                self.steps.pop()
                segments = [*last.segments, *segments]
        self.steps.append(Copy(-1, tuple(segments)))

    def put(self, target: Slot, segments: list[CopySegment], index: int = -1) -> None:
        """Put a slot together from segments that do not overlap."""
        self.collect(index, target, segments)
        if copied := [segment for segment in segments if segment.source.parent is not target]:
            self.steps.append(Copy(index, tuple(copied)))

    def brought_by(self, operand: Operand, kv: Piece) -> str:
        """The exchange after the scatter that delivered some keys and values; `hop 0` if they were local."""
        label = self.labels.get(self.pieces.number(kv) if operand.partial else operand.number)
        if label is None:
            # Search backwards: in a ring, the keys in use arrived last.
            label = next((label for piece, label in reversed(self.brought) if piece.meets(kv)), "hop 0")
        return label
