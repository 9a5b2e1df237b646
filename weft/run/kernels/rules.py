"""Rules of GPU backends: functions that return why a backend cannot compute a `KernelSpec`, or "".

Nothing here imports torch or a package. The rules of the two packages hold for the versions that the extras
`fa4` and `cudnn` pin, and are no stricter: `make test-cuda` compares each with what the package accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from weft.core.schedule import Schedule
    from weft.run.kernels.tiles import Tiles

HALF = ("bfloat16", "float16")
FLASH_DIMS, CUDNN_DIMS = 256, 128
NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx942", "gfx950")
ARCHITECTURES = (*NVIDIA, *AMD)


@dataclass(frozen=True)
class KernelSpec:
    """One kind of tiles of one call, in one direction, as a backend has to compute it."""

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

    @staticmethod
    def of(schedule: Schedule, scale: float | None = None) -> KernelSpec:
        """Return the forward of a schedule's attention; the same on all ranks."""
        problem, mask = schedule.attention
        return KernelSpec(
            sparse=not mask.is_dense,
            backward=False,
            head_dim=problem.head_dim,
            dtype=problem.dtype,
            block_q=mask.block_q,
            block_k=mask.block_k,
            group=problem.heads // problem.kv_heads,
            positive=scale is None or scale > 0,
        )

    @staticmethod
    def of_operands(
        q: Tensor, k: Tensor, tiles: Tiles, scale: float, *, backward: bool = False
    ) -> KernelSpec:
        blocks = (tiles.block_q, tiles.block_k) if tiles.sparse else (0, 0)
        dtype, group = str(q.dtype).removeprefix("torch."), q.shape[1] // k.shape[1]
        return KernelSpec(tiles.sparse, backward, q.shape[3], dtype, *blocks, group, scale > 0)

    def __str__(self) -> str:
        blocks = f" in blocks of {self.block_q} by {self.block_k} tokens" if self.sparse else ""
        tiles = f"{'sparse' if self.sparse else 'dense'} tiles{blocks}"
        return (
            f"{'backward' if self.backward else 'forward'} of {tiles}, head dim {self.head_dim}, {self.dtype}"
        )


def flash(spec: KernelSpec, arch: str) -> str:
    """Torch's flash attention: FlashAttention-2 on NVIDIA, AOTriton on AMD, or what a user activated."""
    if spec.sparse:
        return "it computes dense tiles; backend='gather' gathers the rows of sparse ones for it."
    return _half(spec, arch) or _at_most(spec, FLASH_DIMS)


def cudnn(spec: KernelSpec, arch: str) -> str:
    """Torch's call of cuDNN's fused attention."""
    if spec.sparse:
        return "it computes dense tiles."
    if arch not in NVIDIA:
        return f"it needs an NVIDIA GPU, not {arch}."
    if why := _half(spec, arch) or _at_most(spec, CUDNN_DIMS):
        return why
    return f"its head dims are multiples of 8, not {spec.head_dim}." if spec.head_dim % 8 else ""


def gather(spec: KernelSpec, arch: str) -> str:
    """Flash attention over gathered rows."""
    if not spec.sparse:
        return "it computes sparse tiles; backend='flash' computes dense ones."
    return _half(spec, arch) or _at_most(spec, FLASH_DIMS)


def triton(spec: KernelSpec, arch: str) -> str:
    """Weft's own kernels."""
    from weft.run.kernels.triton_configs import BLOCKS, HEAD_DIMS

    if why := _half(spec, arch):
        return why
    if why := _at_most(spec, max(HEAD_DIMS)):
        return why
    if spec.sparse and (spec.block_q % min(BLOCKS) or spec.block_k % min(BLOCKS)):
        return f"its blocks are multiples of {min(BLOCKS)} tokens, not {spec.block_q} by {spec.block_k}."
    return ""


def fa4(spec: KernelSpec, arch: str) -> str:
    """Return why flash-attn-4 cannot serve; "" if it can."""
    if arch not in ("sm_90", "sm_100"):
        return f"its kernels for sm_90 and sm_100 are taken; on {arch} it has none that torch has not."
    if spec.dtype not in HALF:
        return f"it computes {' and '.join(HALF)}, not {spec.dtype}."
    dims = "up to 256" if arch == "sm_90" else "up to 128"
    fits = spec.head_dim <= (256 if arch == "sm_90" else 128)
    if arch == "sm_100" and not (spec.sparse and spec.backward):
        dims, fits = "up to 128, or 256", fits or spec.head_dim == 256
    if spec.head_dim % 8 or not fits:
        return f"its head dims for this are multiples of 8 {dims} on {arch}, not {spec.head_dim}."
    return _fa4_blocks(spec, arch) if spec.sparse else ""


def _fa4_blocks(spec: KernelSpec, arch: str) -> str:
    """A q block is cut into tiles of `rows`; a kv block must be one tile, or several on sm_100."""
    q, kv, dim = spec.block_q, spec.block_k, spec.head_dim
    if arch == "sm_100":
        rows = 128 if spec.backward or dim == 256 else 256
        fits, columns = kv % 128 == 0, "multiples of 128"
    elif spec.backward:
        rows = 128 if dim <= 64 else 64
        tile = 128 if dim <= 128 else 96 if dim <= 192 else 64
        fits, columns = kv == tile, str(tile)
    else:
        rows = 64
        tile = 128 if dim <= 128 else 112 if dim <= 192 else 80
        fits, columns = kv <= tile and kv % 16 == 0, f"multiples of 16 up to {tile}"
    if fits and q % rows == 0:
        return ""
    direction = "backward" if spec.backward else "forward"
    return f"its {direction} on {arch} takes multiples of {rows} queries by {columns} keys, not {q} by {kv}."


def cudnn_sparse(spec: KernelSpec, arch: str) -> str:
    """Return why cudnn.block_sparse_attention cannot serve; "" if it can."""
    if not spec.sparse:
        return "it computes sparse tiles; backend='cudnn' computes dense ones."
    block = spec.block_q
    if spec.block_k != block or block not in (64, 128):
        return f"its blocks are 64 by 64 or 128 by 128, not {spec.block_q} by {spec.block_k}."
    direction = "backward" if spec.backward else "forward"
    if (arch, direction, block) not in CUDNN_KERNELS:
        return f"it has no {direction} for {arch}."
    dims, dtypes, grouped = CUDNN_KERNELS[arch, direction, block]
    if spec.head_dim not in dims:
        return f"its {direction} on {arch} has head dims {dims} for blocks of {block}, not {spec.head_dim}."
    if spec.dtype not in dtypes:
        return f"its {direction} on {arch} computes {' and '.join(dtypes)}, not {spec.dtype}."
    if spec.group > 1 and not grouped:
        return f"each key/value head serves {spec.group} query heads; its {direction} on {arch} takes 1."
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


def _half(spec: KernelSpec, arch: str) -> str:
    if spec.dtype not in HALF:
        return f"it computes {' and '.join(HALF)}, not {spec.dtype}."
    if arch not in ARCHITECTURES:
        return f"it needs one of {', '.join(ARCHITECTURES)}, not {arch}."
    return ""


def _at_most(spec: KernelSpec, limit: int) -> str:
    return f"its head dims end at {limit}, not {spec.head_dim}." if spec.head_dim > limit else ""
