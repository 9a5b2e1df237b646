"""Rules of the two optional packages: see `weft.run.kernels.rules`.

They hold for the versions that the extras `fa4` and `cudnn` pin, and are no stricter than those: `make
test-cuda` compares each of them with what the package itself accepts.
"""

from __future__ import annotations

from weft.run.kernels.rules import HALF, Work


def fa4(work: Work, arch: str) -> str:
    """Return why flash-attn-4 cannot serve; "" if it can."""
    if arch not in ("sm_90", "sm_100"):
        return f"its kernels for sm_90 and sm_100 are taken; on {arch} it has none that torch has not."
    if work.dtype not in HALF:
        return f"it computes {' and '.join(HALF)}, not {work.dtype}."
    dims = "up to 256" if arch == "sm_90" else "up to 128"
    fits = work.head_dim <= (256 if arch == "sm_90" else 128)
    if arch == "sm_100" and not (work.sparse and work.backward):
        dims, fits = "up to 128, or 256", fits or work.head_dim == 256
    if work.head_dim % 8 or not fits:
        return f"its head dims for this are multiples of 8 {dims} on {arch}, not {work.head_dim}."
    return _fa4_blocks(work, arch) if work.sparse else ""


def _fa4_blocks(work: Work, arch: str) -> str:
    """A q block is cut into tiles of `rows`; a kv block must be one tile, or several on sm_100."""
    q, kv, dim = work.block_q, work.block_k, work.head_dim
    if arch == "sm_100":
        rows = 128 if work.backward or dim == 256 else 256
        fits, columns = kv % 128 == 0, "multiples of 128"
    elif work.backward:
        rows = 128 if dim <= 64 else 64
        tile = 128 if dim <= 128 else 96 if dim <= 192 else 64
        fits, columns = kv == tile, str(tile)
    else:
        rows = 64
        tile = 128 if dim <= 128 else 112 if dim <= 192 else 80
        fits, columns = kv <= tile and kv % 16 == 0, f"multiples of 16 up to {tile}"
    if fits and q % rows == 0:
        return ""
    direction = "backward" if work.backward else "forward"
    return f"its {direction} on {arch} takes multiples of {rows} queries by {columns} keys, not {q} by {kv}."


def cudnn_sparse(work: Work, arch: str) -> str:
    """Return why cudnn.block_sparse_attention cannot serve; "" if it can."""
    if not work.sparse:
        return "it computes sparse tiles; backend='cudnn' computes dense ones."
    block = work.block_q
    if work.block_k != block or block not in (64, 128):
        return f"its blocks are 64 by 64 or 128 by 128, not {work.block_q} by {work.block_k}."
    direction = "backward" if work.backward else "forward"
    if (arch, direction, block) not in CUDNN_KERNELS:
        return f"it has no {direction} for {arch}."
    dims, dtypes, grouped = CUDNN_KERNELS[arch, direction, block]
    if work.head_dim not in dims:
        return f"its {direction} on {arch} has head dims {dims} for blocks of {block}, not {work.head_dim}."
    if work.dtype not in dtypes:
        return f"its {direction} on {arch} computes {' and '.join(dtypes)}, not {work.dtype}."
    if work.group > 1 and not grouped:
        return f"each key/value head serves {work.group} query heads; its {direction} on {arch} takes 1."
    return ""


_BF16 = ("bfloat16",)

CUDNN_KERNELS: dict[tuple[str, str, int], tuple[tuple[int, ...], tuple[str, ...], bool]] = {
    ("sm_90", "forward", 64): ((64, 96, 128), HALF, True),
    ("sm_90", "forward", 128): ((64, 96, 128), HALF, True),
    ("sm_90", "backward", 64): ((128,), _BF16, False),
    ("sm_90", "backward", 128): ((128,), _BF16, False),
    ("sm_100", "forward", 64): ((128,), _BF16, False),
    ("sm_100", "forward", 128): ((64, 96, 128), HALF, True),
    ("sm_100", "backward", 64): ((128,), _BF16, False),
    ("sm_100", "backward", 128): ((64, 128), _BF16, False),
    ("sm_120", "forward", 64): ((128,), HALF, True),
    ("sm_120", "forward", 128): ((128,), HALF, True),
}
"""By (architecture, direction, block): head dims, dtypes, and whether query heads may share keys."""
