"""Lowering: what every way to write a program shares: its slots, its waits, and where pieces have arrived."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence

from weft.core.problem import ITEM_BYTES
from weft.core.schedule import Attend, Piece, Schedule
from weft.program.pieces import Form, Messages, Part, Pieces
from weft.program.slots import Slot
from weft.program.steps import Post, Program, Step, Target, Wait

ALIGN = 256
"""Bytes: slots begin where any kernel may read them."""


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
        self.posted: dict[int, Post] = {}
        """Exchanges whose sends no step has waited for, by operation: their buffers are still in use."""
        self.awaited: dict[int, int] = {}
        """How many messages of each of them no step has waited for."""
        self.last = -1
        """The last exchange that was posted."""
        self.brought: list[tuple[Piece, str]] = []
        self.labels: dict[int, str] = {}
        """Exchanges after the scatter that brought keys and values: in order, and by a piece's number."""

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
        for post in list(self.posted.values()):
            self.release(post)
        return self.program

    @abstractmethod
    def begin(self, attends: list[Attend], parts: Sequence[Part]) -> None:
        """Look at all that is to come."""

    @abstractmethod
    def attend(self, index: int, op: Attend) -> None: ...

    @abstractmethod
    def exchange(self, index: int, op: Messages) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """Put the results together in the caller's layout."""

    def consume(self) -> None:
        """Use up what has arrived, before the next exchange is posted."""
        return

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
            self.awaited[op] -= 1
            if not self.awaited[op]:  # all that it brought is here: what it sent was read, or soon will be
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
