"""SampledCheck: in the first forward, recompute some rows of every attention from all keys, and compare.

One head of each attention and a few queries of each rank: keys of that head are gathered, the rows are
computed in float64 by one matrix product, and must be those that the sharded attention gave.
"""

from __future__ import annotations

import math
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import CommError
from weft.core.indices import IntArray
from weft.core.layout import Layout
from weft.core.mask import BlockMask, BoolArray
from weft.run.world import World
from weft.sparse.pooling import gather_rows

ROWS = 8
"""Of each rank in each attention."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative to the largest output."""
ERROR_UNITS = 1_000_000_000_000
"""Per 1: ranks exchange errors as integers."""


class SampledCheck:
    """Checks each attention once."""

    def __init__(self) -> None:
        self.errors: dict[str, float] = {}
        self.allowed = 0.0
        self.seconds = 0.0

    @torch.no_grad()
    def check(
        self,
        name: str,
        qkv: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        scale: float | None,
        mask: BlockMask | None,
        layout: Layout,
        world: World,
    ) -> None:  # fmt: skip
        """Raise on every rank if a row of any of them is wrong."""
        if name in self.errors:
            return
        start = perf_counter()
        q, k, v = qkv
        head = len(self.errors) % q.shape[1]
        order = layout.order(world.comm.rank)
        rows = np.unique(np.linspace(0, len(order) - 1, ROWS).astype(int)) if len(order) else np.zeros(0, int)
        kv = torch.stack([k, v])[:, :, head * k.shape[1] // q.shape[1]]
        kv = gather_rows(kv, layout, world, np.arange(layout.size))
        keep = None if mask is None else torch.from_numpy(_keys_of(mask, head, order[rows])).to(q.device)
        error = min(_error(q[:, head, rows], kv, out[:, head, rows], scale, keep), 1e6)
        errors = [
            count / ERROR_UNITS for (count,) in world.comm.all_gather_ints([round(error * ERROR_UNITS)])
        ]
        self.allowed = TOLERANCE[q.dtype]
        self.seconds += perf_counter() - start
        if max(errors) > self.allowed:
            raise CommError(
                f"{name}: rows of rank {int(np.argmax(errors))} differ by {max(errors):.1e} from the "
                f"same rows computed from all keys; {self.allowed:.0e} is allowed.",
                hint="Please report it with the model's class; plan='gather' or another plan may be right.",
            )
        self.errors[name] = max(errors)  # not where it raised: then the next forward checks it again

    def __str__(self) -> str:
        return (
            f"{len(self.errors)} attentions checked on sampled rows against all keys: they differ by up "
            f"to {max(self.errors.values(), default=0.0):.1e}, {self.allowed:.0e} is allowed"
            f" ({self.seconds:.2f} s)"
        )


def _keys_of(mask: BlockMask, head: int, rows: IntArray) -> BoolArray:
    """Return [rows, keys]: the keys that some queries attend to."""
    tiles = mask.patterns[mask.pattern_of[head]][rows // mask.block_q]
    return np.repeat(tiles, mask.block_k, axis=1)[:, : mask.kv_len]


def _error(q: Tensor, kv: Tensor, out: Tensor, scale: float | None, keep: Tensor | None) -> float:
    """Return the largest difference, relative to the largest value."""
    if not q.shape[1]:
        return 0.0
    k, v = kv.double()
    scores = q.double() @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    expected = scores.softmax(-1).nan_to_num() @ v
    error = (out.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return math.inf if error.isnan() else float(error)
