"""What the lowerings of all schedules share: messages, waits, and where on a rank the pieces lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from weft.core.problem import ITEM_BYTES, Problem, Switch
from weft.core.schedule import Attend, Exchange, Piece, Schedule
from weft.schedule.places import cover
from weft.schedule.program import Copy, Fill, Post, Program, Segment, Shape, Slot, Step, Target, Wait

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


Form = tuple[int, str, Shape, int]
"""Bytes, dtype, shape and unit of a slot."""


class Pieces:
    """Numbers of pieces: equal ones have equal numbers, on all ranks of a schedule.

    They are kept by identity: the same piece goes around a ring, and even its hash would be slow.
    """

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.forms: dict[int, Form] = {}
        """What all slots of a piece have in common, by its number."""
        self.disjoint: set[frozenset[int]] = set()
        """Pieces that have no parts in common, by number: the ranks of a ring have the same, in another order."""
        self._numbers: dict[tuple[object, ...], int] = {}
        self._messages: dict[int, tuple[int, ...]] = {}
        self._alive: list[object] = []

    def number(self, piece: Piece) -> int:
        number = self.known.get(id(piece))
        if number is None:
            key = (piece.tensor, piece.heads.runs, piece.tokens.runs)
            number = self.known[id(piece)] = self._numbers.setdefault(key, len(self._numbers))
            self._alive.append(piece)  # or its identity could become another's
        return number

    def numbers(self, message: list[Piece]) -> tuple[int, ...]:
        """Those of a message, which are asked for at both its ends."""
        numbers = self._messages.get(id(message))
        if numbers is None:
            numbers = self._messages[id(message)] = tuple([self.number(piece) for piece in message])
            self._alive.append(message)
        return numbers


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
        collective = len(messages) == every * (every - 1) > 0 and _is_bulk(op, schedule.problem)
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


def _is_bulk(exchange: Exchange, problem: Problem | Switch) -> bool:
    """Whether one all_to_all can do an exchange between all ranks."""
    gathers = isinstance(problem, Switch) and problem.dims[1] is None  # all would send the same to each
    # Parts of one buffer lie without gaps, so they must be of one size of item.
    mixed = len({transfer.piece.is_sum for transfer in exchange.transfers}) > 1
    return not gathers and not mixed


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

    def own_piece(self, op: Messages) -> Piece | None:
        """What of an exchange between all ranks stays at home."""
        del op
        return None

    def cut(self, piece: Piece) -> Slot | None:
        """A part of the input, if it lies there in one stretch."""
        del piece
        return None

    def landing(self, piece: Piece) -> Slot | None:
        """Where a piece may be received in place."""
        del piece
        return None

    # Slots.

    def slot(self, name: str, memory: str, piece: Piece, dtype: str = "", rows: int = -1) -> Slot:
        """A slot of its own for a piece; `rows` counts padding too."""
        if dtype or rows >= 0:
            rows = rows if rows >= 0 else piece.tokens.size
            size, dtype, shape, unit = self._form(piece, dtype or self.dtype_of(piece), rows)
        else:
            number = self.pieces.number(piece)
            form = self.pieces.forms.get(number)
            if form is None:
                form = self._form(piece, self.dtype_of(piece), piece.tokens.size)
                self.pieces.forms[number] = form
            size, dtype, shape, unit = form
        return Slot(name, memory, size, dtype, piece, shape, None, 0, None, unit)

    def dtype_of(self, piece: Piece) -> str:
        return self.wide if piece.is_sum else self.narrow

    def _form(self, piece: Piece, dtype: str, rows: int) -> Form:
        planes = 2 if piece.tensor.endswith("kv") else 1
        unit = planes * self.schedule.problem.row_elements * ITEM_BYTES[dtype]
        return unit * piece.heads.size * rows, dtype, self.shape(piece, rows), unit

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
            if not exchange.awaited:  # all that it brought is here: what it sent was read, or soon will be
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
        post, near = exchange.post, self.target.near
        for peer, slot in post.sends:
            if peer not in near:
                self.steps.append(Wait(post.op, post.label, peer, slot, True))  # noqa: FBT003 - by far the fastest
        del self.posted[post.op]

    # Exchanges.

    def exchange(self, index: int, op: Messages) -> None:
        if op.collective and self.target.collective:
            self.bulk(index, op)
            return
        sends = self.lie(op)
        self.settle()
        if len(sends) < len(op.sends):
            packed = {peer: pieces for peer, pieces in op.sends.items() if peer not in sends}
            sends |= self.stage(index, packed)
        receives = {peer: self.receive(index, peer, pieces) for peer, pieces in op.receives.items()}
        if len(receives) > 1 and all([self.is_copied(pieces) for pieces in op.receives.values()]):
            _lay_side_by_side(f"in {index}", [receives[peer][0] for peer in sorted(receives)])
        self.post(index, op, sends, receives)

    def bulk(self, index: int, op: Messages) -> None:
        """Lower an exchange of all ranks to one collective: each end is one buffer, with a part for each rank.

        Where the input or the result is such a buffer itself, what stays at home goes through it too.
        """
        self.settle()
        own = self.own_piece(op)
        sends = self._in_order(op.sends, own, self.cut)
        landed = self._in_order(op.receives, own, self.landing)
        mine = {self.rank: [own]} if own is not None and (sends or landed) else {}
        if sends is None:
            sends = self.stage(index, op.sends | mine, align=1)
        if landed is None:
            coming = sorted((op.receives | mine).items(), key=itemgetter(0))
            receives = {peer: self.receive(index, peer, pieces, land=False) for peer, pieces in coming}
            _lay_side_by_side(f"in {index}", [message for message, _ in receives.values()], align=1)
        else:
            receives = {peer: (slot, [slot]) for peer, slot in landed.items()}
        whole = op._replace(sends=dict.fromkeys(sorted(sends), []), receives=op.receives | mine)
        self.post(index, whole, sends, receives, collective=True)

    def _in_order(
        self, messages: dict[int, list[Piece]], own: Piece | None, place: Callable[[Piece], Slot | None]
    ) -> dict[int, Slot] | None:
        """Messages that lie in a tensor of the caller in the order of ranks, and are all of it."""
        everything = messages | ({self.rank: [own]} if own is not None else {})
        slots: dict[int, Slot] = {}
        at = 0
        for peer in sorted(everything):
            slot = place(everything[peer][0]) if len(everything[peer]) == 1 else None
            if slot is None or slot.parent is None or slot.offset != at:
                return None
            slots[peer] = slot
            at += slot.num_bytes
        whole = next(iter(slots.values())).root
        return slots if at == whole.num_bytes else None

    def settle(self) -> None:
        """Use up what has come and free what has gone, before another exchange needs its buffers."""
        self.consume()
        for exchange in list(self.posted.values()) if self.posted else ():
            receives = exchange.post.receives
            if not receives:
                if exchange.number + 1 < self.posts:  # it brought nothing to wait for
                    self.release(exchange)
            elif exchange.awaited < len(receives):  # some of it is here: the rest is not worth a buffer more
                for _, message in receives:
                    self.wait_for(message)

    def post(
        self,
        index: int,
        op: Messages,
        sends: dict[int, Slot],
        receives: dict[int, tuple[Slot, list[Slot]]],
        *,
        collective: bool = False,
    ) -> None:
        label = op.label or "exchange"
        going = tuple([(peer, sends[peer]) for peer in op.sends])
        coming = tuple([(peer, message) for peer, (message, _) in receives.items()])
        post = Post(index, label, going, coming, True, collective)  # noqa: FBT003 - by far the fastest
        self.steps.append(post)
        self.posted[index] = _Posted(post, self.posts)
        self.posts += 1
        # Only now: what an exchange brings cannot go on in the same exchange.
        for peer, (message, slots) in receives.items():
            pieces = op.receives[peer]
            self.unwaited[message] = index, label, peer
            numbers = self.pieces.numbers(pieces)
            self.whole.setdefault(numbers, message)
            for number, slot, piece in zip(numbers, slots, pieces, strict=True):
                self.exact.setdefault(number, slot)
                tensor = piece.tensor
                self.arrived[tensor].append(slot)
                if tensor == "kv" and label != "scatter":
                    self.brought.append((piece, label))
                    self.labels[number] = label

    def lie(self, op: Messages) -> dict[int, Slot]:
        """Messages that are sent as they lie: equal to one that came, or to an operand."""
        sends: dict[int, Slot] = {}
        for peer, pieces in op.sends.items():
            numbers = self.pieces.numbers(pieces)
            slot = self.whole.get(numbers)
            if slot is None and len(pieces) == 1:
                slot = self.lying(pieces[0], numbers[0])
            if slot is not None:
                self.wait_at(slot)
                sends[peer] = slot
        return sends

    def receive(
        self, index: int, peer: int, pieces: list[Piece], *, land: bool = True
    ) -> tuple[Slot, list[Slot]]:
        near = peer in self.target.near
        if land and len(pieces) == 1 and not near and (slot := self.landing(pieces[0])) is not None:
            return slot, [slot]
        return self.message(f"in {index} from {peer}", "peer" if near else self.buffer_memory, pieces)

    def stage(self, index: int, packed: dict[int, list[Piece]], *, align: int = 0) -> dict[int, Slot]:
        """Write messages side by side, so that equal parts of a tensor leave it in one copy."""
        messages: dict[int, Slot] = {}
        segments: list[Segment] = []
        for peer, pieces in packed.items():
            messages[peer], slots = self.message(f"out {index} to {peer}", self.buffer_memory, pieces)
            for slot, piece in zip(slots, pieces, strict=True):
                segments += self.collect(index, slot, self.find(piece, slot))
        _lay_side_by_side(f"out {index}", [messages[peer] for peer in sorted(messages)], align=align)
        if segments:
            self.steps.append(Copy(index, tuple(segments)))
        return messages

    def find(self, piece: Piece, target: Slot) -> list[Segment]:
        exact = self.exact.get(self.pieces.number(piece))
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


def _lay_side_by_side(name: str, messages: list[Slot], *, align: int = 0) -> None:
    """Put messages into one buffer; without `align` only if they are alike, so that one copy reaches all."""
    first = messages[0]
    alike = all([m.num_bytes == first.num_bytes and m.memory == first.memory for m in messages])
    free = first.memory != "peer" and all([m.parent is None for m in messages])
    if not align and (len(messages) < 2 or not alike or not free):
        return
    at, buffer = 0, Slot(name, first.memory, 0)
    for message in messages:
        message.parent, message.offset = buffer, at
        at += -(-message.num_bytes // (align or ALIGN)) * (align or ALIGN)
    buffer.num_bytes = at
