"""Fused copies: execute each Copy of a program by one kernel launch on a GPU.

The table of its boxes is copied to the device at the first run; later launches get only the addresses of
tensors that change from call to call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from weft.core.errors import InputError
from weft.core.schedule import Piece
from weft.program.pieces import overlap
from weft.program.slots import Positions, Slot
from weft.program.steps import CopySegment
from weft.run.boxes import WIDEST, End, StridedCopy, box_table, runs_of
from weft.run.copies import ATTENTION, Copier, Launch, SegmentMoves, Slots
from weft.run.streams import is_capturing

NUM_WARPS = 4
MAX_TABLES = 16
"""Tables of one Copy, for tensors of different strides, dtypes or alignments."""
_FLAT = ("workspace", "window", "peer")
"""Kinds of memory in which all slots of one root are contiguous."""

_log = logging.getLogger(__name__)


class PreparedLaunch(NamedTuple):
    """A kernel and the constant arguments of its launches."""

    kernel: Any
    boxes: Tensor
    tiles: Tensor
    constants: dict[str, Any]


class SlotAddress(NamedTuple):
    """The address of one tensor of a slot: in fixed memory, or relative to a tensor of the frame."""

    slot: Slot
    plane: int
    base: int
    """Index of the base, from 1 on; 0 in fixed memory."""
    distance: int | None
    """Bytes from the base; None if the base is the tensor itself."""


class FusedCopier(Copier):
    """Convert the segments of a Copy to one launch; `copies.Copier` converts them to several."""

    def launches(self, segments: Sequence[CopySegment], *, add: bool) -> list[Launch]:
        groups = [list(segments)]
        if add and _overlap(segments):  # sums have an order
            groups = [[segment] for segment in segments]
        return [
            FusedCopy(self, [(s.source, s.target, *self.moves.of(s).ends) for s in group], add=add)
            for group in groups
        ]

    def cast(self, source: Slot, target: Slot) -> Launch:
        rows = slice(0, source.shape[1 + self.axes.rows])
        heads = slice(0, source.shape[1 + self.axes.heads]) if self.axes.heads is not None else slice(0, 0)
        return FusedCopy(self, [(source, target, (heads, rows), (heads, rows))], add=False)


class FusedCopy:
    """A launch that copies, or adds, all segments of a Copy."""

    def __init__(
        self, copier: FusedCopier, parts: list[tuple[Slot, Slot, Positions, Positions]], *, add: bool
    ) -> None:
        self.copier, self.add = copier, add
        self._bases: dict[tuple[Slot, int], int] = {}
        self._roots: dict[Slot, Slot] = {}
        """A slot of each contiguous root."""
        self._parts = [
            (self._place(source, plane), self._place(target, plane), at, to)
            for source, target, at, to in parts
            for plane in range(source.shape[0])
        ]
        self._tables: dict[tuple[object, ...], PreparedLaunch] = {}

    def _place(self, slot: Slot, plane: int) -> SlotAddress:
        if slot in self.copier.fixed:
            return SlotAddress(slot, plane, 0, None)
        if slot.memory not in _FLAT:
            return SlotAddress(slot, plane, self._base(slot, plane), None)
        first = self._roots.setdefault(slot.root, slot)
        distance = slot.start - first.start + plane * (slot.num_bytes // slot.shape[0])
        return SlotAddress(slot, plane, self._base(first, 0), distance)

    def _base(self, slot: Slot, plane: int) -> int:
        return self._bases.setdefault((slot, plane), len(self._bases) + 1)

    def __call__(self, slots: Slots) -> None:
        bases = [slots[slot][plane] for slot, plane in self._bases]
        addresses = tuple([_address(x) for x in bases])
        key = (*[(x.dtype, x.stride(), at % WIDEST) for x, at in zip(bases, addresses, strict=True)],)
        table = self._tables.get(key)
        if table is None:
            table = self._new_table(key, bases, addresses)
        launch(table, addresses)

    def _new_table(
        self, key: tuple[object, ...], bases: list[Tensor], addresses: tuple[int, ...]
    ) -> PreparedLaunch:
        if is_capturing(self.copier.device):
            raise InputError(
                "A captured call has tensors of new strides, dtypes or alignments.",
                hint="Run it once with such tensors before the capture.",
            )
        if len(self._tables) >= MAX_TABLES:
            self._tables.clear()
        self._tables[key] = self._table(bases, addresses)
        return self._tables[key]

    def _table(self, bases: list[Tensor], addresses: tuple[int, ...]) -> PreparedLaunch:
        kinds: dict[tuple[torch.dtype, torch.dtype], int] = {}
        parts: list[StridedCopy] = []
        for source, target, at, to in self._parts:
            shape, dtype, read = self._end(source, bases, addresses)
            _, into, write = self._end(target, bases, addresses)
            axes = self.copier.axes
            runs = {dim: runs_of(a, b) for dim, a, b in zip(axes, at, to, strict=True) if dim is not None}
            parts.append(StridedCopy(kinds.setdefault((dtype, into), len(kinds)), read, write, shape, runs))
        table = box_table(parts, add=self.add)
        pairs = tuple([_triton_pair(*pair, add=self.add) for pair in kinds])
        constants = {"PAIRS": pairs, "VEC": table.vector, "ROWS": table.rows, "COLS": table.columns}
        tensors = (torch.from_numpy(x) for x in (table.table, table.tiles))  # pyright: ignore[reportUnknownMemberType]
        boxes, tiles = (x.to(self.copier.device) for x in tensors)
        kernel = import_module("weft.run.kernels.triton_copy").copy_boxes
        return PreparedLaunch(kernel, boxes, tiles, constants | {"ADD": self.add, "num_warps": NUM_WARPS})

    def _end(
        self, place: SlotAddress, bases: list[Tensor], addresses: tuple[int, ...]
    ) -> tuple[tuple[int, ...], torch.dtype, End]:
        slot, plane, base, distance = place
        if distance is not None:
            dtype = getattr(torch, slot.dtype)
            strides = torch.empty(slot.shape[1:], device="meta").stride()
            offset, align = distance // dtype.itemsize, addresses[base - 1]
            return slot.shape[1:], dtype, End(base, offset, strides, dtype.itemsize, _alignment(align))
        x = bases[base - 1] if base else self.copier.fixed[slot][plane]
        item = x.dtype.itemsize
        at = 0 if base else _address(x) // item
        alignment = _alignment(addresses[base - 1]) if base else WIDEST
        return tuple(x.shape), x.dtype, End(base, at, x.stride(), item, alignment)


def launch(table: PreparedLaunch, addresses: tuple[int, ...]) -> None:
    kernel, boxes, tiles, constants = table
    if isinstance(boxes, FakeTensor) or not tiles.numel():
        return
    with torch.cuda.device(boxes.device) if boxes.is_cuda else nullcontext():
        kernel[(tiles.numel(),)](boxes, tiles, addresses, **constants)


_SAMPLE = 1, 2, 3, 24
"""Shape of the test copy."""


def serves(device: torch.device) -> bool:
    """Whether Triton is installed, and its copy kernel works on the device."""
    return find_spec("triton") is not None and (_is_fake(device) or _is_right(device))


def _is_fake(device: torch.device) -> bool:
    return isinstance(torch.empty(0, device=device), FakeTensor)


@cache
def _is_right(device: torch.device) -> bool:
    """Whether a small cast compiles, runs and is right; Triton needs a C compiler, which images may lack."""
    source, target = (Slot(name, "input", 0, shape=(1, *_SAMPLE)) for name in ("source", "target"))
    x = torch.arange(prod(_SAMPLE), dtype=torch.float32, device=device).view(_SAMPLE)
    y = torch.zeros_like(x, dtype=torch.bfloat16)
    try:
        FusedCopier(ATTENTION, device, {}, SegmentMoves()).cast(source, target)({source: (x,), target: (y,)})
        right = torch.equal(y.float(), x)
        reason = "its result is wrong"
    except Exception as error:
        right, reason = False, str(error)
    if not right:
        _log.warning("Copies are not fused on %s, which takes more launches: %s", device, reason)
    return right


def _overlap(segments: Sequence[CopySegment]) -> bool:
    """Whether any two segments write to the same elements of a slot."""
    by_target: dict[Slot, list[Piece]] = {}
    for segment in segments:
        by_target.setdefault(segment.target, []).append(segment.piece)
    return any(overlap(pieces) for pieces in by_target.values())


def _address(x: Tensor) -> int:
    return 0 if isinstance(x, FakeTensor) else x.data_ptr()


def _alignment(address: int) -> int:
    return gcd(address, WIDEST)


def _triton_pair(source: torch.dtype, target: torch.dtype, *, add: bool) -> tuple[Any, Any]:
    """Return the dtypes that the kernel reads and writes: plain bits if nothing is computed."""
    tl = import_module("triton.language")
    if source == target and not add:
        bits = getattr(tl, f"int{8 * source.itemsize}")
        return bits, bits
    return getattr(tl, str(source)[6:]), getattr(tl, str(target)[6:])
