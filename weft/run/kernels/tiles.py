"""Tiles: the part of a mask that one Attend computes, in the rows and columns of its operands."""

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
"""Heads, q blocks and kv blocks of an attend, on a device."""
_HOST = torch.device("cpu")
TILES_AT_ONCE = 1 << 24
"""For which places in a list are found at once: each takes 16 bytes for that long."""
PLACES_AT_ONCE = 1 << 18
"""The same on the host, where what they take should stay in a cache."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """The compact list of active kv blocks of every (head, q block), ascending, as int32 tensors.

    Row (head, i) has kv[starts[head · q_blocks + i] : starts[head · q_blocks + i + 1]]. What `kv` has behind
    its last row means nothing: a list that is made on a device has room for all that it might have to hold.
    """

    heads: int
    q_blocks: int
    kv_blocks: int
    starts: Tensor
    kv: Tensor

    @staticmethod
    def of(active: BoolArray | Tensor, room: int | None = None) -> Blocks:
        """From booleans [heads, q blocks, kv blocks], on their device and without a look at their values.

        `room` is for how many tiles `kv` is made; by default for as many as there are on the host, and for
        all that there could be on a device.
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
        at_once = max(1, TILES_AT_ONCE // max(1, q_blocks * kv_blocks))
        for some in (slice(head, head + at_once) for head in range(0, heads, at_once)):
            part = tiles[some]
            # Every active tile has its place; all others share one behind the end.
            places = torch.where(part, firsts[some] + part.cumsum(-1) - 1, room)
            kv.scatter_(0, places.reshape(-1), columns.expand_as(part).reshape(-1))
        return Blocks(heads, q_blocks, kv_blocks, starts, kv[:room])

    @cached_property
    def active(self) -> Tensor:
        """The same as booleans [heads, q blocks, kv blocks], on the device of the list."""
        rows, nowhere = self.heads * self.q_blocks, self.heads * self.q_blocks * self.kv_blocks
        if self.kv.device == _HOST:
            starts, tiles = self.starts.numpy(), np.zeros(nowhere, dtype=np.bool_)
            first = np.repeat(np.arange(rows) * self.kv_blocks, np.diff(starts))
            tiles[first + self.kv.numpy()[: starts[-1]]] = True
            return torch.from_numpy(tiles.reshape(self.heads, self.q_blocks, self.kv_blocks))
        at = torch.arange(self.kv.shape[0], dtype=torch.int32, device=self.kv.device)
        row = torch.searchsorted(self.starts[1:], at, right=True)
        places = torch.where(row < rows, row * self.kv_blocks + self.kv, nowhere)
        tiles = torch.zeros(nowhere + 1, dtype=torch.bool, device=self.kv.device)
        tiles.scatter_(0, places, torch.ones_like(places, dtype=torch.bool))
        return tiles[:nowhere].view(self.heads, self.q_blocks, self.kv_blocks)

    @cached_property
    def inverted(self) -> Blocks:
        """By kv block: the q blocks that read it. Gradients of keys need no atomic additions with it."""
        turned = self.active.mT
        return Blocks.of(turned.numpy() if turned.device == _HOST else turned, room=self.kv.shape[0])

    @cached_property
    def order(self) -> Tensor:
        """Rows head · q_blocks + i by their number of blocks, descending and stable, as int32."""
        return self.starts.diff().argsort(descending=True, stable=True).int()

    def to(self, device: torch.device) -> Blocks:
        if self.starts.device == device:
            return self
        return Blocks(self.heads, self.q_blocks, self.kv_blocks, self.starts.to(device), self.kv.to(device))


def _host_blocks(active: BoolArray) -> Blocks:
    """Of tiles on the host, by numpy: masks that change wait for it."""
    heads, q_blocks, kv_blocks = active.shape
    flat = active.reshape(-1, kv_blocks)
    starts = np.zeros(len(flat) + 1, dtype=np.int32)
    # Torch's memory: NumPy asks for huge pages, and a system that has to make them first takes longer.
    listed = torch.empty(int(np.count_nonzero(flat)), dtype=torch.int32)
    kv = listed.numpy()
    # Some rows at a time, whose places stay in a cache: fresh memory for all of them would cost more.
    at_once = max(1, PLACES_AT_ONCE // max(1, kv_blocks))
    for first in range(0, len(flat), at_once):
        some = flat[first : first + at_once]
        places, rows = np.flatnonzero(some), np.arange(len(some) + 1) * kv_blocks
        ends = np.searchsorted(places, rows)
        places -= np.repeat(rows[:-1], np.diff(ends))
        begin = starts[first]
        kv[begin : begin + len(places)] = places
        starts[first : first + len(some) + 1] = begin + ends
    return Blocks(heads, q_blocks, kv_blocks, torch.from_numpy(starts), listed)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Active [heads, q blocks, kv blocks] of operands made of whole blocks; only the last may be ragged.

    Where every tile is active and the operands are one dense rectangle, `active` and `listed` are None.
    """

    active: BoolArray | None
    block_q: int
    block_k: int
    q_len: int
    kv_len: int
    runs: HeadRuns = ()
    """Heads of which the mask leaves nothing out, and others."""
    listed: Blocks | None = None
    """In place of `active`: tiles that were chosen on a device and are known there only."""
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(mask: BlockMask, op: Attend) -> Tiles:
        q_len, kv_len = op.q.tokens.size, op.kv.tokens.size
        if mask.is_dense:
            return Tiles(None, q_len, kv_len, q_len, kv_len)
        rows, cols = op.q.tokens.blocks(mask.block_q), op.kv.tokens.blocks(mask.block_k)
        active = torch.empty((op.q.heads.size, rows.size, cols.size), dtype=torch.bool).numpy()
        for tiles, head in zip(active, op.q.heads, strict=True):  # as `_host_blocks`, in torch's memory
            tiles[:] = mask.select(Indices.span(head, head + 1), rows, cols)[0]
        if active.all():
            return Tiles(None, mask.block_q, mask.block_k, q_len, kv_len)
        runs = mask.head_runs(op.q.heads)
        return Tiles(active, mask.block_q, mask.block_k, q_len, kv_len, runs)

    @cached_property
    def by_heads(self) -> tuple[tuple[int, int, Tiles], ...]:
        """Parts of the heads, (first, end, tiles), for which a GPU has different kernels; one or more."""
        if len(self.runs) < 2 or self.active is None:
            return ((0, 0, self),)
        sizes = self.block_q, self.block_k, self.q_len, self.kv_len
        return tuple((a, b, Tiles(None if full else self.active[a:b], *sizes)) for a, b, full in self.runs)

    @property
    def sparse(self) -> bool:
        return self.active is not None or self.listed is not None

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What was made of these tiles under a key, such as lists on a device: a schedule runs many times."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def lists(self, device: torch.device) -> Blocks:
        """The lists of blocks on a device."""
        assert self.sparse, "a dense rectangle has no list of blocks"
        return self.cached(("lists", device), lambda: self._lists(device))

    def _lists(self, device: torch.device) -> Blocks:
        if self.listed is not None:
            return self.listed.to(device)
        assert self.active is not None
        return Blocks.of(self.active).to(device)

    def mask(self, device: torch.device) -> Tensor:
        """The active tiles as booleans on a device."""
        return self.cached(("mask", device), lambda: self.lists(device).active)

    @cached_property
    def host(self) -> BoolArray:
        """The active tiles in host memory. Tiles that were chosen on a device are waited for and copied."""
        if self.active is not None:
            return self.active
        assert self.listed is not None, "a dense rectangle has no tiles"
        return self.listed.active.cpu().numpy()

    @cached_property
    def token_mask(self) -> Tensor | None:
        """[heads, query rows, key rows]; only for the reference, it is as large as the scores."""
        if not self.sparse:
            return None
        full = self.host.repeat(self.block_q, axis=1).repeat(self.block_k, axis=2)
        return torch.from_numpy(np.ascontiguousarray(full[:, : self.q_len, : self.kv_len]))


class TileSet:
    """The tiles of one mask, by the attends that compute them; each is made when it is first asked for."""

    def __init__(self, mask: BlockMask, places: dict[int, Places] | None = None) -> None:
        """`places` is shared by the masks of one executor: where the blocks of its attends are."""
        self.mask = mask
        self.places: dict[int, Places] = {} if places is None else places
        self._by_op: dict[int, tuple[Attend, Tiles]] = {}
        self._by_pieces: dict[tuple[Piece, Piece], Tiles] = {}

    def of(self, op: Attend) -> Tiles:
        known = self._by_op.get(id(op))
        if known is None:
            # Forward and backward attend the same pieces, and share what was made of their tiles.
            key = op.q, op.kv
            if key not in self._by_pieces:
                tiles = self.mask.on_device
                found = Tiles.of(self.mask, op) if tiles is None else self._there(op, tiles)
                self._by_pieces[key] = found
            known = self._by_op[id(op)] = op, self._by_pieces[key]  # with the op: its id stays its own
        return known[1]

    def _there(self, op: Attend, tiles: Tensor) -> Tiles:
        """Of a mask that was made on a device: its lists are made there, and nothing is waited for."""
        mask = self.mask
        if id(op) not in self.places:
            rows, cols = op.q.tokens.blocks(mask.block_q), op.kv.tokens.blocks(mask.block_k)
            arrays = (op.q.heads.array, rows.array, cols.array)
            self.places[id(op)] = tuple(torch.from_numpy(each).to(tiles.device) for each in arrays)
        for dim, at in enumerate(self.places[id(op)]):
            tiles = tiles.index_select(dim, at)
        sizes = mask.block_q, mask.block_k, op.q.tokens.size, op.kv.tokens.size
        return Tiles(None, *sizes, listed=Blocks.of(tiles))
