"""SampledCheck: in the first forward, recompute some rows of every attention from all keys, and compare.

Each attention is checked on one head and a few query rows of each rank. The keys and values of that head are
gathered, the rows are computed in float64 without sharding, and the sharded attention must agree with them.
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
"""Query rows that each rank checks in each attention."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest error that is allowed, relative to the largest expected value."""
ERROR_UNITS = 1_000_000_000_000
"""An error of 1.0 is sent as this integer: the ranks exchange integers only."""


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
        """Raise on every rank if a sampled row of any rank is wrong.

        `qkv` and `out` are [B, H, S, D], with all heads and this rank's tokens of `layout`. Each name is
        checked once; later calls return without a check.
        """
        if name in self.errors:
            return
        start = perf_counter()
        q, k, v = qkv
        head = len(self.errors) % q.shape[1]  # the next head for each attention
        order = layout.order(world.comm.rank)  # positions of this rank's rows in the whole sequence
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
                hint="Report it with the model's class. Another plan may work, such as plan='gather'.",
            )
        self.errors[name] = max(errors)  # only if it did not raise: else the next forward checks it again

    def __str__(self) -> str:
        return (
            f"{len(self.errors)} attentions checked on sampled rows against all keys: they differ by up "
            f"to {max(self.errors.values(), default=0.0):.1e}, {self.allowed:.0e} is allowed"
            f" ({self.seconds:.2f} s)"
        )


def _keys_of(mask: BlockMask, head: int, rows: IntArray) -> BoolArray:
    """Return booleans [rows, keys]: the keys that each of these rows of the whole sequence attends to."""
    tiles = mask.patterns[mask.pattern_of[head]][rows // mask.block_q]
    return np.repeat(tiles, mask.block_k, axis=1)[:, : mask.kv_len]


def _error(q: Tensor, kv: Tensor, out: Tensor, scale: float | None, keep: Tensor | None) -> float:
    """Return the largest difference from dense attention, relative to the largest expected value."""
    if not q.shape[1]:
        return 0.0
    k, v = kv.double()
    scores = q.double() @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    expected = scores.softmax(-1).nan_to_num() @ v  # a row without keys is NaN, and must be 0
    error = (out.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return math.inf if error.isnan() else float(error)
