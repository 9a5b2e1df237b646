"""Rules: what each GPU backend can compute, as functions of plain values.

Nothing here imports torch or a package.
Every rule answers with the reason for a refusal, and with "" where the backend serves. Rules of the two
packages were read from their sources and compared with what they compile (tests/cuda).
"""

from __future__ import annotations

from dataclasses import dataclass

HALF = ("bfloat16", "float16")
FLASH_DIMS, CUDNN_DIMS = 256, 128
NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx942", "gfx950")
ARCHITECTURES = (*NVIDIA, *AMD)


@dataclass(frozen=True)
class Work:
    """What a backend is asked to compute: one kind of tiles of one call, in one direction."""

    sparse: bool
    backward: bool
    head_dim: int
    dtype: str = "bfloat16"
    block_q: int = 0
    block_k: int = 0
    """Tokens of a block of the mask, where it is sparse."""
    group: int = 1
    """Most query heads that read one key/value head without a copy of it."""
    positive: bool = True
    """Whether the scale is above 0: fused kernels find the largest score before they scale it."""

    def __str__(self) -> str:
        blocks = f" in blocks of {self.block_q} by {self.block_k} tokens" if self.sparse else ""
        tiles = f"{'sparse' if self.sparse else 'dense'} tiles{blocks}"
        return (
            f"{'backward' if self.backward else 'forward'} of {tiles}, head dim {self.head_dim}, {self.dtype}"
        )


def flash(work: Work, arch: str) -> str:
    """Torch's flash attention: FlashAttention-2 on NVIDIA, AOTriton on AMD, or what a user activated."""
    if work.sparse:
        return "it computes dense tiles; backend='gather' gathers the rows of sparse ones for it."
    return _half(work, arch) or _at_most(work, FLASH_DIMS)


def cudnn(work: Work, arch: str) -> str:
    """Torch's call of cuDNN's fused attention."""
    if work.sparse:
        return "it computes dense tiles."
    if arch not in NVIDIA:
        return f"it needs an NVIDIA GPU, not {arch}."
    return _half(work, arch) or _at_most(work, CUDNN_DIMS) or _in_eights(work)


def gather(work: Work, arch: str) -> str:
    """Flash attention over gathered rows."""
    if not work.sparse:
        return "it computes sparse tiles; backend='flash' computes dense ones."
    return _half(work, arch) or _at_most(work, FLASH_DIMS)


def triton(work: Work, arch: str) -> str:
    """Weft's own kernels."""
    from weft.run.kernels.triton_configs import BLOCKS, HEAD_DIMS

    if why := _half(work, arch):
        return why
    if why := _at_most(work, max(HEAD_DIMS)):
        return why
    if work.sparse and (work.block_q % min(BLOCKS) or work.block_k % min(BLOCKS)):
        return f"its blocks are multiples of {min(BLOCKS)} tokens, not {work.block_q} by {work.block_k}."
    return ""


def exact(work: Work, arch: str) -> str:
    """Torch's attention in float32."""
    del work, arch
    return ""


def _half(work: Work, arch: str) -> str:
    if work.dtype not in HALF:
        return f"it computes {' and '.join(HALF)}, not {work.dtype}."
    if arch not in ARCHITECTURES:
        return f"it needs one of {', '.join(ARCHITECTURES)}, not {arch}."
    return ""


def _at_most(work: Work, limit: int) -> str:
    return f"its head dims end at {limit}, not {work.head_dim}." if work.head_dim > limit else ""


def _in_eights(work: Work) -> str:
    return f"its head dims are multiples of 8, not {work.head_dim}." if work.head_dim % 8 else ""
