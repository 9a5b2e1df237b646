"""Measure the speed of a device's kernels on dense and sparse tiles, forward and backward.

Times are the shortest of many short calls: disturbances make a call longer, never shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.run.kernels import AttentionKernel, Sums, choose
from weft.run.kernels.choice import ParityCheck
from weft.run.kernels.rules import KernelSpec
from weft.run.kernels.tiles import Tiles
from weft.run.measure.stopwatch import device_seconds
from weft.simulate.costs import BACKWARD_FLOPS_RATIO

RESOLUTION = 0.05
"""Share of a tile's time; smaller differences of two long times are noise."""


@dataclass(frozen=True)
class TimingSizes:
    """Sizes of the timed attention: enough to fill a device, and blocks that all kernels take."""

    heads: int
    tokens: int
    repeats: int
    block: int = 64
    few: int = 1
    """Tiles in each row of blocks of one sparse call; `some` of the other."""
    some: int = 8

    @staticmethod
    def of(device: torch.device, *, quick: bool = False) -> TimingSizes:
        if device.type == "cuda":
            return TimingSizes(heads=16, tokens=8192, repeats=12 if quick else 30, some=16)
        return (
            TimingSizes(heads=2, tokens=512, repeats=2, some=4) if quick else TimingSizes(1, 1024, repeats=20)
        )

    @property
    def rows(self) -> int:
        return self.heads * self.tokens // self.block

    @property
    def tiles(self) -> int:
        return self.rows * self.tokens // self.block


class Speeds:
    """The kernels for one dtype and head dim. With `check`, all ranks construct it together."""

    def __init__(
        self,
        backend: str,
        dtype: str,
        head_dim: int,
        device: torch.device,
        sizes: TimingSizes,
        check: ParityCheck | None,
    ) -> None:
        self.device, self.sizes, self.head_dim = device, sizes, head_dim
        block = sizes.block
        dense = KernelSpec(sparse=False, backward=False, head_dim=head_dim, dtype=dtype)
        sparse = replace(dense, sparse=True, block_q=block, block_k=block)
        self.kernel = choose(backend, dtype, str(device), dense, check).name
        self.selected: AttentionKernel = choose(backend, dtype, str(device), sparse, check)
        self.sparse_kernel = self.selected.name.rpartition("sparse ")[2]
        shape = (1, sizes.heads, sizes.tokens, head_dim)
        draw = [torch.randn(shape, device=device) for _ in range(4)]
        self._q, self._k, self._v, self._grad = (x.to(getattr(torch, dtype)) for x in draw)

    def dense_times(self) -> dict[str, float]:
        """Return the seconds of one tile alone (call), of all tiles, and of their backward."""
        size, block = self.sizes.tokens, self.sizes.block
        some = partial(Tensor.narrow, dim=2, start=0, length=block)
        one = [some(x[:, :1]) for x in (self._q, self._k, self._v)]
        attend = partial(self.selected.attend, *one, Tiles(None, block, block, block, block), self._scale)
        dense = Tiles(None, size, size, size, size)
        times = {"call": self._seconds(attend, 5 * self.sizes.repeats), "dense": self._forward(dense)}
        return times | {"dense backward": self._backward(dense)}

    def sparse_times(self) -> dict[str, float]:
        """Return the seconds of a few tiles in each row, of some more, and of their backward."""
        few, some = (self._sparse(count) for count in (self.sizes.few, self.sizes.some))
        backward = self._backward(some)
        return {"few": self._forward(few, 4), "some": self._forward(some, 2), "some backward": backward}

    def torch_flops(self) -> float:
        """Return the FLOP/s of torch's own attention over all tiles."""
        call = partial(F.scaled_dot_product_attention, self._q, self._k, self._v)
        return self.flops(self.sizes.tiles) / self._seconds(call, self.sizes.repeats)

    def fields(self, times: Mapping[str, float]) -> dict[str, float | str]:
        """Convert times to fields of a Topology."""
        derive = self._separate_kernels if self.device.type == "cuda" else self._one_kernel
        return derive(times)

    def _one_kernel(self, times: Mapping[str, float]) -> dict[str, float | str]:
        """Fit a kernel that computes rows of tiles in turn, with a cost per row and per tile."""
        sizes, call = self.sizes, times["call"]
        tile = (times["dense"] - times["few"]) / (sizes.tiles - sizes.few * sizes.rows)
        sparse = (times["some"] - times["few"]) / ((sizes.some - sizes.few) * sizes.rows)
        extra = sparse - tile if sparse > (1 + RESOLUTION) * tile else 0.0
        row = max(0.0, (times["few"] - call) / sizes.rows - sizes.few * (tile + extra))
        row = round(row / (RESOLUTION * tile)) * RESOLUTION * tile
        around = call + sizes.rows * row
        back = (times["dense backward"] - around) / sizes.tiles
        sparse_back = (times["some backward"] - around) / (sizes.some * sizes.rows) - extra
        back = _same(back, BACKWARD_FLOPS_RATIO * tile)
        work = BACKWARD_FLOPS_RATIO * self.flops(1)
        return {
            "flops": self.flops(1) / tile,
            "backward_flops": work / back,
            "sparse_backward_flops": work / _same(sparse_back, back),
            "call_seconds": call,
            "tile_seconds": extra,
            "row_seconds": row,
        }

    def _separate_kernels(self, times: Mapping[str, float]) -> dict[str, float | str]:
        """Fit the kernels of a GPU for dense and for sparse tiles, which compute all rows at once."""
        tiles, call = self.sizes.tiles, times["call"]
        counts = {"dense": tiles, "some": self.sizes.some * self.sizes.rows}
        names = {"flops": "dense", "sparse_flops": "some"}
        names |= {"backward_flops": "dense backward", "sparse_backward_flops": "some backward"}
        fields: dict[str, float | str] = {"call_seconds": call, "kernel": f"{self.kernel}, measured"}
        for name, key in names.items():
            work = self.flops(counts[key.split()[0]]) * (BACKWARD_FLOPS_RATIO if "backward" in key else 1)
            fields[name] = work / max(times[key] - call, times[key] / 2)
        return fields | {"sparse_kernel": f"{self.sparse_kernel}, measured"}

    @property
    def _scale(self) -> float:
        return self.head_dim**-0.5

    def flops(self, tiles: int) -> float:
        """Return the FLOPs of a forward over `tiles` tiles."""
        return 4 * self.head_dim * self.sizes.block**2 * tiles

    def _sparse(self, count: int) -> Tiles:
        """Return random tiles, `count` in each row of blocks."""
        sizes = self.sizes
        blocks = sizes.tokens // sizes.block
        order = np.random.default_rng(0).random((sizes.heads, blocks, blocks)).argsort(-1)
        return Tiles(order < count, sizes.block, sizes.block, sizes.tokens, sizes.tokens)

    def _forward(self, tiles: Tiles, times: int = 1) -> float:
        attend = partial(self.selected.attend, self._q, self._k, self._v, tiles, self._scale)
        return self._seconds(attend, times * self.sizes.repeats)

    def _backward(self, tiles: Tiles) -> float:
        done: Sums = self.selected.attend(self._q, self._k, self._v, tiles, self._scale)
        operands = (self._grad, self._q, self._k, self._v, done, tiles, self._scale)
        return self._seconds(partial(self.selected.attend_backward, *operands), self.sizes.repeats)

    def _seconds(self, call: Callable[[], object], repeats: int) -> float:
        with torch.no_grad():
            return min(device_seconds(call, self.device, repeats))


def _same(value: float, other: float) -> float:
    """Return `other` if both are equal within the resolution."""
    return other if abs(value / other - 1) < RESOLUTION else value
