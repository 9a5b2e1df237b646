"""What the lowerings of all schedules share: messages, waits, and where on a rank the pieces lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from weft.core.problem import ITEM_BYTES
from weft.core.schedule import Attend, Exchange, Piece, Schedule
from weft.schedule.places import cover
from weft.schedule.program import Copy, Fill, Post, Program, Segment, Slot, Step, Target, Wait

ALIGN = 256
"""Bytes: slots begin where any kernel may read them."""


class Messages(NamedTuple):
    """One rank's part of an exchange: pieces by peer, in the order in which both ends pack them."""

    label: str
    sends: dict[int, list[Piece]]
    receives: dict[int, list[Piece]]
    collective: bool


Part = tuple[int, Attend | Messages]
"""An operation of the schedule, by its index, as far as one rank takes part in it."""


class Facts(NamedTuple):
    """What is asked of a piece again and again; equal pieces have equal numbers."""

    number: int
    elements: int
    is_sum: bool


class Pieces:
    """Facts of pieces by identity: the same one goes around a ring, and even its hash would be slow."""

    def __init__(self, schedule: Schedule) -> None:
        self.problem = schedule.problem
        self._known: dict[int, Facts] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._alive: list[Piece] = []

    def __call__(self, piece: Piece) -> Facts:
        facts = self._known.get(id(piece))
        if facts is None:
            key = (piece.tensor, piece.heads.runs, piece.tokens.runs)
            number = self._numbers.setdefault(key, len(self._numbers))
            facts = self._known[id(piece)] = Facts(number, piece.elements(self.problem), piece.is_sum)
            self._alive.append(piece)  # or its identity could become another's
        return facts


def parts_of(schedule: Schedule, ranks: Iterable[int]) -> dict[int, list[Part]]:
    """Each rank's part of every operation, in one pass over the schedule."""
    parts: dict[int, list[Part]] = {rank: [] for rank in ranks}
    every = schedule.problem.ranks
    for index, op in enumerate(schedule.ops):
        if isinstance(op, Attend):
            if op.rank in parts:
                parts[op.rank].append((index, op))
            continue
        mine: dict[int, Messages] = {}
        messages = op.messages
        collective = is_bulk(op, every)
        for (src, dst), pieces in messages.items():
            if src in parts:
                if src not in mine:
                    mine[src] = Messages(op.label, {}, {}, collective)
                mine[src].sends[dst] = pieces
            if dst in parts:
                if dst not in mine:
                    mine[dst] = Messages(op.label, {}, {}, collective)
                mine[dst].receives[src] = pieces
        for rank, part in mine.items():
            parts[rank].append((index, part))
    return parts


def is_bulk(exchange: Exchange, ranks: int) -> bool:
    """Whether every rank sends to every other, so that one all_to_all can do it."""
    return ranks > 1 and len(exchange.messages) == ranks * (ranks - 1)


class _Posted:
    """An exchange whose buffers are still in use."""

    __slots__ = ("awaited", "number", "post")

    def __init__(self, post: Post, number: int) -> None:
        self.post, self.number, self.awaited = post, number, len(post.receives)


class Lowering(ABC):
    """Writes the program of one rank."""

    def __init__(self, schedule: Schedule, rank: int, target: Target, pieces: Pieces) -> None:
        self.schedule, self.rank, self.target, self.pieces = schedule, rank, target, pieces
        problem = schedule.problem
        self.narrow = problem.dtype
        self.wide = "float64" if problem.dtype == "float64" else "float32"
        self.program = Program(rank, problem, target)
        self.steps: list[Step] = self.program.steps
        self.buffer_memory = "window" if target.near else "workspace"
        self.arrived: defaultdict[str, list[Slot]] = defaultdict(list)
        self.exact: dict[int, Slot] = {}
        """Arrived pieces by number."""
        self.whole: dict[tuple[int, ...], Slot] = {}
        """Arrived messages by the numbers of their pieces: an equal one is sent as it lies."""
        self.unwaited: dict[Slot, tuple[int, str, int]] = {}
        """Messages that no step has waited for, as (op, label, peer)."""
        self.posted: dict[int, _Posted] = {}
        """Exchanges whose sends no step has waited for, by operation."""
        self.posts = 0
        self.brought: list[tuple[Piece, str]] = []
        self.labels: dict[int, str] = {}
        """Exchanges after the scatter that brought keys and values: in order, and by the number of a piece."""

    def write(self, parts: Sequence[Part]) -> Program:
        self.begin([op for _, op in parts if isinstance(op, Attend)], parts)
        for index, op in parts:
            if isinstance(op, Attend):
                self.attend(index, op)
            else:
                self.exchange(index, op)
        self.finish()
        for message in list(self.unwaited):
            self.wait_for(message)
        for exchange in list(self.posted.values()):
            self.release(exchange)
        return self.program

    @abstractmethod
    def begin(self, attends: list[Attend], parts: Sequence[Part]) -> None:
        """Look at all that is to come."""

    @abstractmethod
    def attend(self, index: int, op: Attend) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """Put the results together in the caller's layout."""

    def consume(self) -> None:
        """Use up what has arrived, before the next exchange is posted."""

    def sources(self, piece: Piece) -> Iterable[Slot]:
        """Slots that may have parts of a piece that is to be sent, those at home first."""
        raise NotImplementedError

    def lying(self, piece: Piece, number: int) -> Slot | None:
        """A slot that is this very piece in one stretch of memory, to be sent as it lies."""
        del piece, number
        return None

    def is_copied(self, pieces: list[Piece]) -> bool:
        """Whether nothing of a message is used where it lies."""
        del pieces
        return True

    def landing(self, piece: Piece) -> Slot | None:
        """Where a piece may be received in place."""
        del piece
        return None

    # Slots.

    def dtype_of(self, facts: Facts) -> str:
        return self.wide if facts.is_sum else self.narrow

    def slot(self, name: str, memory: str, piece: Piece, dtype: str = "", rows: int = -1) -> Slot:
        """A slot of its own for a piece; `rows` counts padding too."""
        facts = self.pieces(piece)
        dtype = dtype or self.dtype_of(facts)
        cells = piece.heads.size * piece.tokens.size
        size = facts.elements * ITEM_BYTES[dtype]
        unit = size // cells if cells else 0
        shape = self.shape(piece, rows if rows >= 0 else piece.tokens.size)
        if rows >= 0:
            size = unit * piece.heads.size * rows
        return Slot(name, memory, size, dtype, piece, shape, unit=unit)

    @abstractmethod
    def shape(self, piece: Piece, rows: int) -> tuple[int, ...]: ...

    def message(self, name: str, memory: str, pieces: list[Piece]) -> tuple[Slot, list[Slot]]:
        """One message, and a slot in it for each piece; the widest dtype first, so that all are aligned."""
        if len(pieces) == 1:
            slot = self.slot(name, memory, pieces[0])
            return slot, [slot]
        slots = [self.slot(f"{name} #{i}", memory, piece) for i, piece in enumerate(pieces)]
        at = 0
        whole = Slot(name, memory, sum(slot.num_bytes for slot in slots))
        for slot in sorted(slots, key=lambda slot: -ITEM_BYTES[slot.dtype]):
            slot.parent, slot.offset = whole, at
            at += slot.num_bytes
        return whole, slots

    # Waits.

    def wait_for(self, message: Slot) -> None:
        if pending := self.unwaited.pop(message, None):
            op, label, peer = pending
            self.steps.append(Wait(op, label, peer, message))
            exchange = self.posted[op]
            exchange.awaited -= 1
            if (
                not exchange.awaited
            ):  # all that it brought is here, so what it sent has been read, or soon will be
                self.release(exchange)

    def wait_at(self, slot: Slot | None) -> None:
        """Wait for the message that a slot lies in, if it lies in one."""
        unwaited = self.unwaited
        while slot is not None and unwaited:
            if slot in unwaited:
                self.wait_for(slot)
                return
            slot = slot.parent

    def release(self, exchange: _Posted) -> None:
        """Wait until the buffers of an exchange may be written again."""
        op, label, sends, *_ = exchange.post
        for peer, slot in sends:
            if peer not in self.target.near:
                self.steps.append(Wait(op, label, peer, slot, sent=True))
        del self.posted[op]

    # Exchanges.

    def exchange(self, index: int, op: Messages) -> None:
        sends = self.lie(op)
        self.consume()
        for exchange in list(self.posted.values()):
            receives = exchange.post.receives
            if not receives and exchange.number + 1 < self.posts:  # it brought nothing to wait for
                self.release(exchange)
            elif exchange.awaited < len(
                receives
            ):  # some of it is here, so the rest is not worth a buffer more
                for _, message in receives:
                    self.wait_for(message)
        packed = {peer: pieces for peer, pieces in op.sends.items() if peer not in sends}
        if packed:
            sends |= self.stage(index, packed)
        receives: list[tuple[int, Slot]] = []
        arrivals: list[tuple[list[Piece], list[Slot]]] = []
        for peer, pieces in op.receives.items():
            message, slots = self.receive(index, peer, pieces)
            receives.append((peer, message))
            arrivals.append((pieces, slots))
        if len(receives) > 1 and all(self.is_copied(pieces) for pieces in op.receives.values()):
            _lay_side_by_side(f"in {index}", [slot for _, slot in sorted(receives, key=itemgetter(0))])
        label = op.label or "exchange"
        post = Post(index, label, tuple([(peer, sends[peer]) for peer in op.sends]), tuple(receives))
        self.steps.append(post)
        self.posted[index] = _Posted(post, self.posts)
        self.posts += 1
        # Only now: what an exchange brings cannot go on in the same exchange.
        for (peer, message), (pieces, slots) in zip(receives, arrivals, strict=True):
            self.unwaited[message] = index, label, peer
            numbers = tuple([self.pieces(piece).number for piece in pieces])
            self.whole.setdefault(numbers, message)
            for number, slot, piece in zip(numbers, slots, pieces, strict=True):
                self.exact.setdefault(number, slot)
                self.arrived[piece.tensor].append(slot)
                if piece.tensor == "kv" and label != "scatter":
                    self.brought.append((piece, label))
                    self.labels[number] = label

    def lie(self, op: Messages) -> dict[int, Slot]:
        """Messages that are sent as they lie: equal to one that came, or to an operand."""
        sends: dict[int, Slot] = {}
        for peer, pieces in op.sends.items():
            numbers = tuple([self.pieces(piece).number for piece in pieces])
            slot = self.whole.get(numbers)
            if slot is None and len(pieces) == 1:
                slot = self.lying(pieces[0], numbers[0])
            if slot is not None:
                self.wait_at(slot)
                sends[peer] = slot
        return sends

    def receive(self, index: int, peer: int, pieces: list[Piece]) -> tuple[Slot, list[Slot]]:
        near = peer in self.target.near
        if len(pieces) == 1 and not near and (slot := self.landing(pieces[0])) is not None:
            return slot, [slot]
        return self.message(f"in {index} from {peer}", "peer" if near else self.buffer_memory, pieces)

    def stage(self, index: int, packed: dict[int, list[Piece]]) -> dict[int, Slot]:
        """Write messages side by side, so that equal parts of a tensor leave it in one copy."""
        messages: dict[int, Slot] = {}
        segments: list[Segment] = []
        for peer, pieces in packed.items():
            messages[peer], slots = self.message(f"out {index} to {peer}", self.buffer_memory, pieces)
            for slot, piece in zip(slots, pieces, strict=True):
                segments += self.collect(index, slot, self.find(piece, slot))
        _lay_side_by_side(f"out {index}", [messages[peer] for peer in sorted(messages)])
        if segments:
            self.steps.append(Copy(index, tuple(segments)))
        return messages

    def find(self, piece: Piece, target: Slot) -> list[Segment]:
        exact = self.exact.get(self.pieces(piece).number)
        return (
            [Segment(exact, target, piece)]
            if exact is not None
            else cover(piece, self.sources(piece), target)
        )

    def collect(self, index: int, target: Slot, segments: list[Segment]) -> list[Segment]:
        """Wait for the parts of a slot; fill it first where they leave something out."""
        piece = target.piece
        assert piece is not None
        for segment in segments:
            self.wait_at(segment.source)
        cells = sum(segment.piece.heads.size * segment.piece.tokens.size for segment in segments)
        if cells < piece.heads.size * piece.tokens.size:
            self.steps.append(Fill(index, target))
        return segments


def _lay_side_by_side(name: str, messages: list[Slot]) -> None:
    """Put messages of equal size into one buffer, in which one strided copy reaches all of them."""
    first = messages[0]
    size = -(-first.num_bytes // ALIGN) * ALIGN
    if len(messages) < 2 or any(
        (m.num_bytes, m.memory, m.parent) != (first.num_bytes, first.memory, None) for m in messages
    ):
        return
    if first.memory == "peer":
        return
    buffer = Slot(name, first.memory, size * len(messages))
    for number, message in enumerate(messages):
        message.parent, message.offset = buffer, number * size
