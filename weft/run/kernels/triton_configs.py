"""Tile sizes, warps and stages of the Triton kernels by target: the first is the default, all are tuned over.

Nothing here imports triton. Every entry is compiled in tests/run/test_triton_compile.py, without spills.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
KERNELS = ("forward", "grad_queries", "grad_keys")
HEAD_DIMS = (64, 128)
BLOCKS = (64, 128)


@dataclass(frozen=True)
class Config:
    """BQ query rows by BK keys at a time."""

    bq: int
    bk: int
    warps: int
    stages: int


def configs(target: str, kernel: str, head_dim: int, block_q: int, block_k: int) -> tuple[Config, ...]:
    """Those whose tiles divide the blocks of the mask."""
    found = _TABLE[target, kernel, head_dim]
    return tuple(c for c in found if block_q % c.bq == 0 and block_k % c.bk == 0)


_TABLE = {
    (target, kernel, dim): (Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 3))
    for target in TARGETS
    for kernel in KERNELS
    for dim in HEAD_DIMS
}
