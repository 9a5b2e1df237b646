"""Table of tile sizes, warps and stages of the Triton kernels by target; the first entry is the default.

Tuning measures all of them. Nothing here imports triton. tests/run/test_triton_compile.py compiles every
entry, without spills.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
TARGET_OF = {
    **{target: target for target in TARGETS},
    "sm_86": "sm_86", "sm_89": "sm_86", "sm_120": "sm_120", "gfx950": "gfx942",
}  # fmt: skip
"""Target by architecture."""
SMALL_TARGETS = ("sm_86", "sm_120")
"""Targets that take those entries of sm_80 that fit: a program has 99 KiB of shared memory."""
TMA_TARGETS = ("sm_90", "sm_100", "sm_120")
"""Targets whose forward reads its operands by tensor-memory descriptors."""
KERNELS = ("forward", "grad_queries", "grad_keys")
HEAD_DIMS = (32, 64, 128, 256)
"""Widths that rows are padded to inside the kernels."""
BLOCKS = (16, 32, 64, 128)
MAX_CHOICES = 4
"""Configurations that tuning may measure for one kind of call."""


@dataclass(frozen=True)
class Config:
    """BQ query rows by BK keys at a time."""

    bq: int
    bk: int
    warps: int
    stages: int
    early: bool = False
    """Whether the forward issues the next product of queries and keys before the exponentials of this one."""
    specialize: bool = False
    """Whether loads, products and exponentials of the forward have warps of their own."""

    def keywords(self, kernel: str) -> dict[str, int]:
        """Return the keyword arguments of a launch."""
        sizes = {"BQ": self.bq, "BK": self.bk, "num_warps": self.warps, "num_stages": self.stages}
        return sizes | ({"EARLY": self.early, "SPECIALIZE": self.specialize} if kernel == "forward" else {})


def padded(head_dim: int) -> int:
    """Return the width that kernels compute with: the next of `HEAD_DIMS`."""
    return next(size for size in HEAD_DIMS if size >= head_dim)


@cache
def configs(target: str, kernel: str, head_dim: int, block_q: int, block_k: int) -> tuple[Config, ...]:
    """Return those for a padded head dim whose tiles divide the blocks of the mask, at most `MAX_CHOICES`."""
    table = _TABLE["sm_80" if target in SMALL_TARGETS else target, kernel, head_dim]
    if target in SMALL_TARGETS:
        table = [c for c in table if (kernel, head_dim, c) not in _NOT_ON_SMALL]
    return tuple([c for c in table if block_q % c.bq == 0 and block_k % c.bk == 0][:MAX_CHOICES])


_Row = tuple[int, int, int, int] | tuple[int, int, int, int, str]
"""BQ, BK, warps, stages, and the flag of `Config` that is set, if any."""

# For masks in blocks of fewer than 64 rows or keys.
_SMALL: list[_Row] = [(32, 64, 4, 2), (32, 32, 4, 2), (16, 64, 4, 2), (64, 16, 4, 2), (16, 16, 4, 2)]
_SMALL_AMD: list[_Row] = [(32, 64, 4, 1), (32, 32, 4, 1), (16, 64, 4, 1), (64, 16, 4, 1), (16, 16, 4, 1)]
# For masks whose blocks have few rows or few keys only.
_OBLONG, _OBLONG_8 = ((16, 64, 4, 2), (64, 16, 4, 2)), ((16, 64, 8, 2), (64, 16, 8, 2))
_OBLONG_AMD = (16, 64, 4, 1), (64, 16, 4, 1)

# What is not here was tried and spills, or was not tried: 128 rows of 128 numbers on 4 warps, both sums of
# grad_keys at 64x64 on 4 warps, most second stages on AMD, early products where the assembler does not
# interleave them with the exponentials (head dims up to 32), specialized warps at 256.
# fmt: off
_ROWS: dict[str, dict[str, dict[int, list[_Row]]]] = {
    "sm_80": {
        "forward": {
            32: [(128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 32, 4, 3), *_SMALL],
            64: [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 32, 4, 3), *_SMALL],
            128: [(128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), *_SMALL],
            256: [(64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), *_SMALL],
        },
        "grad_queries": {
            32: [(128, 64, 4, 3), (64, 64, 4, 3), (32, 32, 2, 2), *_OBLONG, (16, 16, 2, 2)],
            64: [(128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 8, 3), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            128: [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            256: [(64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2), *_OBLONG_8, (16, 16, 4, 2)],
        },
        "grad_keys": {
            32: [(64, 128, 8, 3), (64, 64, 4, 3), (32, 32, 2, 2), *_OBLONG, (16, 16, 2, 2)],
            64: [(64, 128, 8, 3), (64, 64, 8, 3), (64, 64, 8, 2), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            128: [(64, 64, 8, 3), (64, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            256: [(64, 64, 8, 1), (16, 64, 8, 2), (32, 32, 8, 2), (64, 16, 8, 2), (16, 16, 4, 2)],
        },
    },
    "sm_90": {
        "forward": {
            32: [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3), *_SMALL],
            64: [(128, 128, 8, 2, "early"), (128, 64, 8, 3, "early"), (128, 64, 8, 3), (128, 128, 8, 2),
                 (64, 64, 4, 3, "early"), (64, 64, 4, 3), (64, 32, 4, 3), *_SMALL],
            128: [(128, 64, 8, 3, "early"), (128, 128, 8, 2, "early"), (128, 128, 8, 2), (128, 64, 8, 3),
                  (64, 64, 4, 3, "early"), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), *_SMALL],
            256: [(128, 32, 8, 3, "early"), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2),
                  (64, 32, 4, 2, "early"), *_SMALL],
        },
        "grad_queries": {
            32: [(128, 64, 8, 3), (64, 64, 4, 3), (32, 32, 2, 2), *_OBLONG, (16, 16, 2, 2)],
            64: [(128, 64, 8, 3), (64, 64, 4, 2), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            128: [(128, 64, 8, 2), (64, 64, 4, 2), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            256: [(64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2), *_OBLONG_8,
                  (16, 16, 4, 2)],
        },
        "grad_keys": {
            32: [(64, 128, 8, 3), (64, 64, 4, 3), (32, 32, 2, 2), *_OBLONG, (16, 16, 2, 2)],
            64: [(64, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 3), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            128: [(64, 64, 8, 3), (64, 64, 8, 2), (32, 64, 4, 2), (32, 32, 8, 2), *_OBLONG, (16, 16, 2, 2)],
            256: [(32, 64, 8, 2), (16, 64, 8, 2), (32, 32, 8, 2), (64, 16, 8, 2), (16, 16, 4, 2)],
        },
    },
    "sm_100": {
        "forward": {
            32: [(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2, "specialize"),
                 (128, 64, 4, 3, "specialize"), (32, 64, 4, 2), (64, 64, 4, 3, "specialize"),
                 (32, 32, 4, 2), (16, 64, 4, 2), (64, 16, 4, 2), (16, 16, 4, 2)],
            64: [(128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2, "specialize"),
                 (128, 64, 8, 3, "specialize"), (64, 64, 4, 3), (64, 64, 4, 3, "specialize"), *_SMALL],
            128: [(128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3, "specialize"),
                  (128, 64, 8, 2, "specialize"), (64, 64, 4, 3), (64, 64, 4, 3, "specialize"),
                  (64, 64, 4, 2), (64, 32, 4, 3), *_SMALL],
            256: [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), *_SMALL],
        },
        "grad_queries": {
            32: [(128, 64, 8, 3), (64, 64, 4, 3), (32, 32, 4, 2), *_OBLONG, (16, 16, 4, 2)],
            64: [(128, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 2), (32, 32, 4, 2), (16, 64, 4, 2),
                 (64, 32, 4, 2), (16, 16, 2, 2)],
            128: [(128, 64, 8, 2), (64, 64, 4, 2), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            256: [(64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2), (16, 64, 8, 1),
                  (64, 16, 8, 2), (16, 16, 4, 2)],
        },
        "grad_keys": {
            32: [(64, 128, 8, 3), (64, 64, 4, 3), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            64: [(64, 128, 8, 3), (64, 64, 8, 3), (64, 64, 4, 3), (32, 32, 4, 2), (16, 64, 8, 2),
                 (64, 16, 4, 2), (16, 16, 2, 2)],
            128: [(64, 128, 8, 2), (64, 64, 8, 3), (32, 64, 4, 3), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            256: [(32, 64, 8, 2), (64, 64, 8, 1), (32, 32, 8, 2), *_OBLONG_8, (16, 16, 4, 2)],
        },
    },
    "gfx942": {
        "forward": {
            32: [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 2), *_SMALL_AMD],
            64: [(128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1), (64, 32, 4, 2), *_SMALL_AMD],
            128: [(128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), *_SMALL_AMD],
            256: [(128, 32, 8, 1), (64, 64, 4, 1), (64, 32, 8, 2), (64, 32, 4, 1), *_SMALL_AMD],
        },
        "grad_queries": {
            32: [(64, 64, 4, 2), (128, 64, 4, 1), (32, 32, 2, 2), *_OBLONG, (16, 16, 2, 2)],
            64: [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 1), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            128: [(128, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 1), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            256: [(64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 2), (32, 32, 4, 1), *_OBLONG_AMD,
                  (16, 16, 4, 1)],
        },
        "grad_keys": {
            32: [(32, 64, 4, 2), (32, 32, 2, 2), *_OBLONG, (16, 16, 2, 2)],
            64: [(32, 64, 4, 2), (32, 64, 4, 1), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            128: [(32, 64, 4, 1), (32, 32, 4, 2), *_OBLONG, (16, 16, 2, 2)],
            256: [(16, 64, 8, 2), (32, 64, 4, 1), (32, 32, 4, 1), *_OBLONG_AMD, (16, 16, 4, 1)],
        },
    },
}
"""By target, kernel and padded head dim."""
# fmt: on
_TABLE = {
    (target, kernel, dim): [Config(*r[:4], early="early" in r, specialize="specialize" in r) for r in rows]
    for target, kernels in _ROWS.items()
    for kernel, dims in kernels.items()
    for dim, rows in dims.items()
}

_NOT_ON_SMALL = {
    ("forward", 256, Config(64, 64, 8, 2)),
    ("forward", 256, Config(128, 32, 8, 2)),
    ("grad_keys", 128, Config(64, 64, 8, 3)),
    ("grad_keys", 256, Config(64, 64, 8, 1)),
    ("grad_queries", 32, Config(128, 64, 4, 3)),
    ("grad_queries", 128, Config(128, 64, 8, 2)),
    ("grad_queries", 256, Config(64, 64, 8, 2)),
    ("grad_queries", 256, Config(64, 32, 8, 2)),
}
"""Entries of sm_80 that need more shared memory than `SMALL_TARGETS` have, or spill there."""
