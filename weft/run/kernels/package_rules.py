"""Rules of the two optional packages: see `weft.run.kernels.rules`."""

from __future__ import annotations

from weft.run.kernels.rules import HALF, Work


def fa4(work: Work, arch: str) -> str:
    """Return why flash-attn-4 cannot serve; "" if it can."""
    if arch not in ("sm_90", "sm_100"):
        return f"it needs sm_90 or sm_100, not {arch}."
    if work.dtype not in HALF:
        return f"it computes {' and '.join(HALF)}, not {work.dtype}."
    limit = 256 if arch == "sm_90" else 128
    if work.head_dim % 8 or work.head_dim > limit:
        return f"its head dims are multiples of 8 up to {limit} on {arch}, not {work.head_dim}."
    return _fa4_blocks(work, arch) if work.sparse else ""


def _fa4_blocks(work: Work, arch: str) -> str:
    q, kv = work.block_q, work.block_k
    if arch == "sm_100":
        fits = q % 256 == 0 and kv % 128 == 0
        return "" if fits else f"its blocks on sm_100 are multiples of 256 by 128, not {q} by {kv}."
    if work.backward:
        rows = 128 if work.head_dim <= 64 else 64
        fits = q % rows == 0 and kv == 128
        return "" if fits else f"its blocks in the backward on sm_90 are {rows}·n by 128, not {q} by {kv}."
    fits = q % 64 == 0 and kv in (64, 128)
    return "" if fits else f"its blocks on sm_90 are 64·n by 64 or 128, not {q} by {kv}."


def cudnn_sparse(work: Work, arch: str) -> str:
    """Return why cudnn.block_sparse_attention cannot serve; "" if it can."""
    if not work.sparse:
        return "it computes sparse tiles; backend='cudnn' computes dense ones."
    if arch not in ("sm_90", "sm_100"):
        return f"it needs sm_90 or sm_100, not {arch}."
    block = work.block_q
    if work.block_k != block or block not in (64, 128):
        return f"its blocks are 64 by 64 or 128 by 128, not {work.block_q} by {work.block_k}."
    dims, dtypes, grouped = _cudnn_table(work.backward, arch, block)
    if work.head_dim not in dims:
        return f"its head dims for this are {dims}, not {work.head_dim}."
    if work.dtype not in dtypes:
        return f"it computes {' and '.join(dtypes)} for this, not {work.dtype}."
    if work.group > 1 and not grouped:
        return f"each key/value head serves {work.group} query heads; it takes 1 for this."
    return ""


def _cudnn_table(backward: bool, arch: str, block: int) -> tuple[tuple[int, ...], tuple[str, ...], bool]:
    """(head dims, dtypes, whether heads may share keys) of one kernel of the package."""
    if not backward and (arch, block) != ("sm_100", 64):
        return (64, 96, 128), HALF, True
    if backward and (arch, block) == ("sm_100", 128):
        return (64, 128), ("bfloat16",), False
    return (128,), ("bfloat16",), False
