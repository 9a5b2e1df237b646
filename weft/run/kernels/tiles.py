"""Tiles: the part of a mask that one Attend computes, indexed by the blocks of its operands."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.core.indices import Indices
from weft.core.mask import BlockMask, BoolArray, HeadRuns
from weft.core.schedule import Attend, Piece

Places = tuple[Tensor, ...]
"""The indices in the whole mask of an Attend's heads, q blocks and kv blocks, on a device."""
_HOST = torch.device("cpu")
TILES_PER_CHUNK = 1 << 24
"""Tiles converted to a list at a time on a GPU: each takes 16 bytes of intermediate results."""
HOST_TILES_PER_CHUNK = 1 << 18
"""Tiles converted at a time on the host, where they should fit into a cache."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Active kv blocks of every (head, q block), ascending, as int32 tensors in CSR format.

    Row (head, i) has kv[starts[head · q_blocks + i] : starts[head · q_blocks + i + 1]]. `kv` may be longer
    than the last row: a list that is made on a device is allocated for the largest possible count.
    """

    heads: int
    q_blocks: int
    kv_blocks: int
    starts: Tensor
    kv: Tensor

    @staticmethod
    def of(active: BoolArray | Tensor, room: int | None = None) -> Blocks:
        """Convert booleans [heads, q blocks, kv blocks] on their device, without waiting for it.

        `room` is the length of `kv`. By default it is the number of active tiles on the host, where that
        is known, and the number of all tiles on any other device.
        """
        if isinstance(active, np.ndarray):
            return _host_blocks(active)
        tiles = active
        heads, q_blocks, kv_blocks = tiles.shape
        if room is None:
            room = int(tiles.sum()) if tiles.device == _HOST else tiles.numel()
        starts = torch.zeros(heads * q_blocks + 1, dtype=torch.int32, device=tiles.device)
        torch.cumsum(tiles.sum(-1).flatten(), 0, dtype=torch.int32, out=starts[1:])
        columns = torch.arange(kv_blocks, dtype=torch.int32, device=tiles.device)
        kv = torch.zeros(room + 1, dtype=torch.int32, device=tiles.device)
        firsts = starts[:-1].view(heads, q_blocks, 1)
        at_once = max(1, TILES_PER_CHUNK // max(1, q_blocks * kv_blocks))
        for some in (slice(head, head + at_once) for head in range(0, heads, at_once)):
            chunk = tiles[some]
            # Every active tile has a target of its own; all others are written behind the end, and dropped.
            targets = torch.where(chunk, firsts[some] + chunk.cumsum(-1) - 1, room)
            kv.scatter_(0, targets.reshape(-1), columns.expand_as(chunk).reshape(-1))
        return Blocks(heads, q_blocks, kv_blocks, starts, kv[:room])

    @cached_property
    def active(self) -> Tensor:
        """The tiles as booleans [heads, q blocks, kv blocks], on the device of the list."""
        rows, count = self.heads * self.q_blocks, self.heads * self.q_blocks * self.kv_blocks
        if self.kv.device == _HOST:
            starts, tiles = self.starts.numpy(), np.zeros(count, dtype=np.bool_)
            first = np.repeat(np.arange(rows) * self.kv_blocks, np.diff(starts))
            tiles[first + self.kv.numpy()[: starts[-1]]] = True
            return torch.from_numpy(tiles.reshape(self.heads, self.q_blocks, self.kv_blocks))
        at = torch.arange(self.kv.shape[0], dtype=torch.int32, device=self.kv.device)
        row = torch.searchsorted(self.starts[1:], at, right=True)
        # Entries of `kv` behind the last row are written behind the end, and dropped.
        targets = torch.where(row < rows, row * self.kv_blocks + self.kv, count)
        tiles = torch.zeros(count + 1, dtype=torch.bool, device=self.kv.device)
        tiles.scatter_(0, targets, torch.ones_like(targets, dtype=torch.bool))
        return tiles[:count].view(self.heads, self.q_blocks, self.kv_blocks)

    @cached_property
    def inverted(self) -> Blocks:
        """The transposed list: the q blocks that read each kv block.

        With it, kernels add up the gradients of keys without atomic operations.
        """
        by_kv = self.active.mT
        return Blocks.of(by_kv.numpy() if by_kv.device == _HOST else by_kv, room=self.kv.shape[0])

    @cached_property
    def order(self) -> Tensor:
        """Rows head · q_blocks + i by their number of blocks, descending and stable, as int32."""
        return self.starts.diff().argsort(descending=True, stable=True).int()

    def to(self, device: torch.device) -> Blocks:
        if self.starts.device == device:
            return self
        return Blocks(self.heads, self.q_blocks, self.kv_blocks, self.starts.to(device), self.kv.to(device))


def _host_blocks(active: BoolArray) -> Blocks:
    """Convert tiles on the host by numpy, which is faster: attention waits for the lists of a new mask."""
    heads, q_blocks, kv_blocks = active.shape
    flat = active.reshape(-1, kv_blocks)
    starts = np.zeros(len(flat) + 1, dtype=np.int32)
    # Allocated by torch: NumPy requests huge pages, which take longer where the system has none ready.
    listed = torch.empty(int(np.count_nonzero(flat)), dtype=torch.int32)
    kv = listed.numpy()
    # A chunk of rows at a time stays in a cache: fresh memory for all of them would cost more.
    at_once = max(1, HOST_TILES_PER_CHUNK // max(1, kv_blocks))
    for first in range(0, len(flat), at_once):
        chunk = flat[first : first + at_once]
        columns, rows = np.flatnonzero(chunk), np.arange(len(chunk) + 1) * kv_blocks
        ends = np.searchsorted(columns, rows)
        columns -= np.repeat(rows[:-1], np.diff(ends))
        begin = starts[first]
        kv[begin : begin + len(columns)] = columns
        starts[first : first + len(chunk) + 1] = begin + ends
    return Blocks(heads, q_blocks, kv_blocks, torch.from_numpy(starts), listed)


@dataclass(frozen=True, eq=False)
class Tiles:
    """The active tiles [heads, q blocks, kv blocks] of one Attend.

    Its operands consist of whole blocks, of which only the last may be ragged. Active tiles are in `active`
    or, if they are known only on a device, in `listed`; both are None if every tile is active.
    """

    active: BoolArray | None
    block_q: int
    block_k: int
    q_len: int
    kv_len: int
    runs: HeadRuns = ()
    """Runs of heads, as `BlockMask.head_runs` returns them."""
    listed: Blocks | None = None
    """Tiles that were selected on a device, instead of `active`."""
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(mask: BlockMask, op: Attend) -> Tiles:
        """Select the tiles of an Attend from a mask on the host; those of a dense mask are one tile."""
        q_len, kv_len = op.q.tokens.size, op.kv.tokens.size
        if mask.is_dense:
            return Tiles(None, q_len, kv_len, q_len, kv_len)
        rows, cols = op.q.tokens.blocks(mask.block_q), op.kv.tokens.blocks(mask.block_k)
        active = torch.empty((op.q.heads.size, rows.size, cols.size), dtype=torch.bool).numpy()
        for tiles, head in zip(active, op.q.heads, strict=True):  # allocated by torch, as in `_host_blocks`
            tiles[:] = mask.select(Indices.span(head, head + 1), rows, cols)[0]
        if active.all():
            return Tiles(None, mask.block_q, mask.block_k, q_len, kv_len)
        runs = mask.head_runs(op.q.heads)
        return Tiles(active, mask.block_q, mask.block_k, q_len, kv_len, runs)

    @cached_property
    def by_heads(self) -> tuple[tuple[int, int, Tiles], ...]:
        """(first, end, tiles) of groups of heads that a GPU computes by different kernels.

        If there is one group it has all heads, and its `first` and `end` are not used.
        """
        if len(self.runs) < 2 or self.active is None:
            return ((0, 0, self),)
        sizes = self.block_q, self.block_k, self.q_len, self.kv_len
        return tuple((a, b, Tiles(None if full else self.active[a:b], *sizes)) for a, b, full in self.runs)

    @property
    def sparse(self) -> bool:
        return self.active is not None or self.listed is not None

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for a key, such as lists on a device."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def lists(self, device: torch.device) -> Blocks:
        """Return the lists of blocks on a device."""
        assert self.sparse, "every tile is active: there is no list of blocks"
        return self.cached(("lists", device), lambda: self._lists(device))

    def _lists(self, device: torch.device) -> Blocks:
        if self.listed is not None:
            return self.listed.to(device)
        assert self.active is not None
        return Blocks.of(self.active).to(device)

    @cached_property
    def host(self) -> BoolArray:
        """The active tiles in host memory; waits for tiles that were selected on a device."""
        if self.active is not None:
            return self.active
        assert self.listed is not None, "every tile is active: there is no array of tiles"
        return self.listed.active.cpu().numpy()

    @cached_property
    def token_mask(self) -> Tensor | None:
        """Booleans [heads, query rows, key rows], as large as the scores; only for the reference kernel."""
        if not self.sparse:
            return None
        full = self.host.repeat(self.block_q, axis=1).repeat(self.block_k, axis=2)
        return torch.from_numpy(np.ascontiguousarray(full[:, : self.q_len, : self.kv_len]))


class TileSet:
    """The tiles of one mask for each Attend of a schedule, made at first use."""

    def __init__(self, mask: BlockMask, places: dict[int, Places] | None = None) -> None:
        """`places`, by id of the Attend, does not depend on the mask: the masks of one executor share it."""
        self.mask = mask
        self.places: dict[int, Places] = {} if places is None else places
        self._by_op: dict[int, tuple[Attend, Tiles]] = {}
        self._by_pieces: dict[tuple[Piece, Piece], Tiles] = {}

    def of(self, op: Attend) -> Tiles:
        cached = self._by_op.get(id(op))
        if cached is None:
            # Forward and backward attend the same pieces, and share the cache of their tiles.
            key = op.q, op.kv
            if key not in self._by_pieces:
                tiles = self.mask.on_device
                self._by_pieces[key] = Tiles.of(self.mask, op) if tiles is None else self._select(op, tiles)
            cached = self._by_op[id(op)] = op, self._by_pieces[key]  # keeps op alive, and so its id unique
        return cached[1]

    def _select(self, op: Attend, tiles: Tensor) -> Tiles:
        """Select the tiles of an Attend on the device of the mask, without waiting for it."""
        mask = self.mask
        if id(op) not in self.places:
            rows, cols = op.q.tokens.blocks(mask.block_q), op.kv.tokens.blocks(mask.block_k)
            arrays = (op.q.heads.array, rows.array, cols.array)
            self.places[id(op)] = tuple(torch.from_numpy(each).to(tiles.device) for each in arrays)
        for dim, at in enumerate(self.places[id(op)]):
            tiles = tiles.index_select(dim, at)
        sizes = mask.block_q, mask.block_k, op.q.tokens.size, op.kv.tokens.size
        return Tiles(None, *sizes, listed=Blocks.of(tiles))
