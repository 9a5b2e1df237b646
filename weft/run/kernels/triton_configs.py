"""Tile sizes, warps and stages of the Triton kernels by target: the first is the default, all are tuned over.

Nothing here imports triton. Every entry is compiled in tests/run/test_triton_compile.py, without spills.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
TARGET_OF = {
    **{target: target for target in TARGETS},
    "sm_86": "sm_86", "sm_89": "sm_86", "sm_120": "sm_86", "gfx950": "gfx942",
}  # fmt: skip
"""The entry of the table that an architecture takes. sm_86 has sm_80's entries that fit its shared memory."""
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
    found = _TABLE["sm_80" if target == "sm_86" else target, kernel, head_dim]
    if target == "sm_86":
        found = tuple(c for c in found if (kernel, head_dim, c) not in _ABOVE_99_KIB)
    return tuple(c for c in found if block_q % c.bq == 0 and block_k % c.bk == 0)


def _of(*rows: tuple[int, int, int, int]) -> tuple[Config, ...]:
    return tuple(Config(*row) for row in rows)


# BQ, BK, warps, stages. What is not here was tried and spills, or was not tried: 128x128 nearly everywhere,
# 128 rows of 128 numbers on 4 warps, both sums of grad_keys at 64x64 on 4 warps, most second stages on AMD.
_TABLE = {
    ("sm_80", "forward", 64): _of((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2)),
    ("sm_80", "forward", 128): _of((128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 8, 2)),
    ("sm_80", "grad_queries", 64): _of((128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 8, 3)),
    ("sm_80", "grad_queries", 128): _of((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2)),
    ("sm_80", "grad_keys", 64): _of((64, 128, 8, 3), (64, 64, 8, 3), (64, 64, 8, 2)),
    ("sm_80", "grad_keys", 128): _of((64, 64, 8, 3), (64, 64, 8, 2), (32, 64, 4, 2)),
    ("sm_90", "forward", 64): _of((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3)),
    ("sm_90", "forward", 128): _of((128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
    ("sm_90", "grad_queries", 64): _of((128, 64, 8, 3), (64, 64, 4, 2)),
    ("sm_90", "grad_queries", 128): _of((128, 64, 8, 2), (64, 64, 4, 2)),
    ("sm_90", "grad_keys", 64): _of((64, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 3)),
    ("sm_90", "grad_keys", 128): _of((64, 64, 8, 3), (64, 64, 8, 2), (32, 64, 4, 2)),
    ("sm_100", "forward", 64): _of((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)),
    ("sm_100", "forward", 128): _of((128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
    ("sm_100", "grad_queries", 64): _of((128, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 2)),
    ("sm_100", "grad_queries", 128): _of((128, 64, 8, 2), (64, 64, 4, 2)),
    ("sm_100", "grad_keys", 64): _of((64, 128, 8, 3), (64, 64, 8, 3), (64, 64, 4, 3)),
    ("sm_100", "grad_keys", 128): _of((64, 128, 8, 2), (64, 64, 8, 3), (32, 64, 4, 3)),
    ("gfx942", "forward", 64): _of((128, 64, 8, 2), (128, 64, 4, 1), (64, 64, 4, 1)),
    ("gfx942", "forward", 128): _of((128, 64, 8, 2), (128, 64, 8, 1), (64, 64, 4, 1)),
    ("gfx942", "grad_queries", 64): _of((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 1)),
    ("gfx942", "grad_queries", 128): _of((128, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 1)),
    ("gfx942", "grad_keys", 64): _of((32, 64, 4, 2), (32, 64, 4, 1)),
    ("gfx942", "grad_keys", 128): _of((32, 64, 4, 2), (32, 64, 4, 1)),
}

_ABOVE_99_KIB = {("grad_keys", 128, Config(64, 64, 8, 3))}
"""Entries of sm_80 that need more shared memory than sm_86, sm_89 and sm_120 have."""
