"""Extents: the bytes that steps access, which accesses conflict, and what is written of a slot."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from weft.core.indices import joined
from weft.core.schedule import Piece
from weft.program.slots import Slot
from weft.program.steps import Attention, Copy, Gradient, Step, accesses

SlotPiece = tuple[Slot, Piece | None]
"""A piece of a slot; None is all of it, padding included."""


def pieces_accessed(step: Step) -> tuple[list[SlotPiece], list[SlotPiece]]:
    """Return the pieces that a step of the compute stream reads and those that it writes."""
    if isinstance(step, Copy):
        sources: list[SlotPiece] = [(segment.source, segment.piece) for segment in step.segments]
        targets: list[SlotPiece] = [(segment.target, segment.piece) for segment in step.segments]
        return (sources + targets if step.add else sources), targets
    pieces: dict[Slot, Piece] = {}
    if isinstance(step, Attention):
        pieces = dict.fromkeys((step.q, step.out, step.lse), step.q_piece) | {step.kv: step.kv_piece}
    elif isinstance(step, Gradient):
        pieces = dict.fromkeys((step.q, step.out, step.lse, step.grad, step.dq), step.q_piece)
        pieces |= {step.kv: step.kv_piece, step.dkv: step.kv_piece}
    reads, writes = accesses(step)
    return [(slot, pieces.get(slot)) for slot in reads], [(slot, pieces.get(slot)) for slot in writes]


class Extent(NamedTuple):
    """The bytes of a slot that is one tensor, or one message, and a piece of it."""

    block: object
    start: int
    stop: int
    slot: Slot
    piece: Piece | None

    @staticmethod
    def of(slot: Slot, block: object, start: int) -> Extent:
        """Return the extent of a slot whose root begins at `start`; a slot in a tensor is a piece of it."""
        whole = slot
        while whole.parent is not None and whole.parent.piece is not None:
            whole = whole.parent
        start += whole.start
        return Extent(block, start, start + whole.num_bytes, whole, None if whole is slot else slot.piece)


class Access(NamedTuple):
    """A read or write of an extent by the step at `at`; a message may do it until its Wait."""

    at: int
    extent: Extent
    writes: bool

    def conflicts(self, other: Access) -> bool:
        a, b = self.extent, other.extent
        if not (self.writes or other.writes) or max(a.start, b.start) >= min(a.stop, b.stop):
            return False
        return not (a.slot is b.slot and a.piece and b.piece and not a.piece.meets(b.piece))


class Content:
    """What is written of one root: whole slots, and pieces of slots."""

    def __init__(self) -> None:
        self._whole: set[Slot] = set()
        self._pieces: defaultdict[Slot, list[Piece]] = defaultdict(list)
        self._parts: defaultdict[Slot, dict[Slot, None]] = defaultdict(dict)
        """Slots by their parent."""
        self._writers: dict[Slot, int] = {}
        self._readers: defaultdict[Slot, list[tuple[Piece | None, int]]] = defaultdict(list)

    def add(self, slot: Slot, piece: Piece | None) -> None:
        if slot in self._whole:
            return
        if piece is None or (_is_all(piece, slot) and not _is_padded(slot)):
            self._whole.add(slot)
        else:
            self._pieces[slot].append(piece)
        while slot.parent is not None:
            self._parts[slot.parent][slot] = None
            slot = slot.parent

    def has(self, slot: Slot, piece: Piece | None) -> bool:
        each: Slot | None = slot
        while each is not None:
            if each in self._whole:
                return True
            each = each.parent
        if slot.piece is None:
            written = [(s.offset, s.offset + s.num_bytes) for s in self._parts[slot] if self.has(s, None)]
            return joined(written) == [(0, slot.num_bytes)]
        if (piece is None and _is_padded(slot)) or (piece or slot.piece).without(self._pieces[slot]):
            return False
        if piece is None or _is_all(piece, slot):  # so that the next check is short
            self._pieces[slot] = [slot.piece]
        return True

    def note_reader(self, at: int, slot: Slot, piece: Piece | None) -> None:
        readers = self._readers[slot]
        if not readers or readers[-1][0] is not piece:
            readers.append((piece, at))

    def note_writer(self, at: int, slot: Slot) -> None:
        self._writers[slot] = at

    def out_of_order(self, slot: Slot, piece: Piece | None, *, is_fill: bool) -> int | None:
        """Return a step that is too early for a write: it read the piece, or a Fill erases what it wrote."""
        if is_fill and slot in self._writers:
            return self._writers[slot]
        each: Slot | None = slot
        while each is not None:
            for read, at in self._readers.get(each, ()):
                if not (each is slot and read and piece and not read.meets(piece)):
                    return at
            each = each.parent
        return None


def _is_all(piece: Piece, slot: Slot) -> bool:
    own = slot.piece
    return own is piece or (own is not None and own.is_like(piece))


def _is_padded(slot: Slot) -> bool:
    cells = slot.piece.cells if slot.piece else 0
    return bool(slot.unit) and slot.num_bytes > cells * slot.unit
