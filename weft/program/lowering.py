"""Lowering: one rank's program while it is written: its slots, its waits, and where pieces have arrived."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from weft.core.problem import ITEM_BYTES
from weft.program.slots import Slot
from weft.program.steps import Fill, Program, Wait

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weft.core.schedule import Attend, Piece, Schedule
    from weft.program.pieces import Message, Pieces, SlotForm
    from weft.program.steps import CopySegment, Post, Step, Target

    RankOp = tuple[int, "Attend | Messages"]
    """An operation of the schedule, by its index, as far as one rank takes part in it."""

ALIGN = 256
"""Bytes: slots begin where any kernel may read them."""


class Messages(NamedTuple):
    """One rank's share of an exchange: pieces by peer, in the order in which both ends pack them."""

    label: str
    sends: dict[int, Message]
    receives: dict[int, Message]
    collective: bool
    tensors: frozenset[str]
    """Of which there are pieces between any two ranks."""


class Lowering(ABC):
    """The program of one rank and what its directions (forward, backward, redistribution) answer about it.

    Calls go one way: `lower` and `exchanges` call the methods of a direction, which call those below.
    """

    def __init__(self, schedule: Schedule, rank: int, target: Target, pieces: Pieces) -> None:
        self.schedule, self.rank, self.target, self.pieces = schedule, rank, target, pieces
        problem = schedule.problem
        self.row_elements, self.narrow = problem.row_elements, problem.dtype
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
        self.posted: dict[int, Post] = {}
        """Exchanges whose sends no step has waited for, by operation: their buffers are still in use."""
        self.awaited: dict[int, int] = {}
        """How many messages of each of them no step has waited for."""
        self.last = -1
        """The last exchange that was posted."""
        self.brought: list[tuple[Piece, str]] = []
        self.labels: dict[int, str] = {}
        """Exchanges after the scatter that brought keys and values: in order, and by a piece's number."""

    @abstractmethod
    def begin(self, attends: list[Attend], ops: Sequence[RankOp]) -> None:
        """Read all operations ahead."""

    @abstractmethod
    def attend(self, index: int, op: Attend) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """Put the results together in the caller's layout."""

    def consume(self) -> None:
        """Use up what has arrived, before the next exchange is posted."""
        return

    @abstractmethod
    def sources(self, piece: Piece) -> Iterable[Slot]:
        """Slots that may hold some of a piece that is to be sent, those at home first."""

    def lying(self, piece: Piece, number: int) -> Slot | None:
        """A slot that is this very piece in one stretch of memory, to be sent as it lies."""
        del piece, number
        return None

    def is_copied(self, pieces: list[Piece]) -> bool:
        """Whether all of a message is copied out, so that nothing is read in place."""
        del pieces
        return True

    def own_piece(self, op: Messages) -> Piece | None:
        """The piece of an exchange between all ranks that stays on this rank."""
        del op
        return None

    def cut(self, piece: Piece) -> Slot | None:
        """The slot of a piece of the input, if it is contiguous there."""
        del piece
        return None

    def landing(self, piece: Piece) -> Slot | None:
        """The slot in the result that a piece may be received into."""
        del piece
        return None

    # Slots.

    def slot(self, name: str, memory: str, piece: Piece, dtype: str = "", rows: int = -1) -> Slot:
        """A slot of its own for a piece; `rows` counts padding too."""
        if dtype or rows >= 0:
            form = self._form(piece, dtype or self._dtype_of(piece), rows if rows >= 0 else piece.tokens.size)
        else:
            number = self.pieces.number(piece)
            form = self.pieces.forms.get(number)
            if form is None:
                form = self.pieces.forms[number] = self._form(piece, self._dtype_of(piece), piece.tokens.size)
        size, dtype, shape, unit = form
        return Slot(name, memory, size, dtype, piece, shape, None, 0, None, unit)

    def _dtype_of(self, piece: Piece) -> str:
        return self.wide if piece.is_sum else self.narrow

    def _form(self, piece: Piece, dtype: str, rows: int) -> SlotForm:
        shape = self.schedule.problem.local_shape(piece.tensor, piece.heads.size, rows)
        unit = shape[0] * self.row_elements * ITEM_BYTES[dtype]
        return unit * piece.heads.size * rows, dtype, shape, unit

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

    def fills(self, target: Slot, segments: Sequence[CopySegment]) -> bool:
        """Whether segments that do not overlap cover a slot, padding included."""
        cells = sum(segment.piece.cells for segment in segments)
        return cells * target.unit == target.num_bytes

    def collect(self, index: int, target: Slot, segments: list[CopySegment]) -> list[CopySegment]:
        """Wait for the sources of a slot; fill it first where they leave something out."""
        for segment in segments:
            self.wait_at(segment.source)
        if not self.fills(target, segments):
            self.steps.append(Fill(index, target))
        return segments

    # Waits.

    def wait_for(self, message: Slot) -> None:
        if pending := self.unwaited.pop(message, None):
            op, label, peer = pending
            self.steps.append(Wait(op, label, peer, message))
            self.awaited[op] -= 1
            if not self.awaited[op]:  # all of it arrived, so peers have read (or will soon read) what it sent
                self.release(self.posted[op])

    def wait_at(self, slot: Slot | None) -> None:
        """Wait for the message that a slot lies in, if it lies in one."""
        unwaited = self.unwaited
        while slot is not None and unwaited:
            if slot in unwaited:
                self.wait_for(slot)
                return
            slot = slot.parent

    def release(self, post: Post) -> None:
        """Wait until the buffers of an exchange may be written again."""
        for peer, slot in post.sends:
            if peer not in self.target.near:
                self.steps.append(Wait(post.op, post.label, peer, slot, True))  # noqa: FBT003 - by far the fastest
        del self.posted[post.op], self.awaited[post.op]

    def wait_for_all(self) -> None:
        """End the program: no message and no buffer of an exchange is in use after it."""
        for message in list(self.unwaited):
            self.wait_for(message)
        for post in list(self.posted.values()):
            self.release(post)
