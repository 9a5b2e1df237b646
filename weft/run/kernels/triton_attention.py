"""Launch the Triton kernels of block-sparse attention.

Triton is imported when a `TritonAttention` is made. Without a GPU it runs, slowly, if TRITON_INTERPRET=1 was
set before triton was first imported, as tests do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import InputError, MissingError
from weft.core.install import install_command
from weft.run.kernels import Accumulator, Sums, aligned, packed
from weft.run.kernels.choice import arch_of
from weft.run.kernels.tiles import Blocks, Tiles
from weft.run.kernels.triton_configs import BLOCKS, HEAD_DIMS, TARGET_OF, TMA_TARGETS, Config, configs, padded
from weft.run.kernels.tuning import TunedConfigs, TuningKey, length_class

# The preparation of gradients is bound by memory; one tile size serves all.
_ROWS = 32
_DENSE_BLOCK = max(BLOCKS)


class TritonAttention:
    """Flash attention over block lists: 16-bit operands (float32 if interpreted), float32 results.

    `interpreted_as` is the target whose configurations the interpreter uses.
    """

    name = "triton"
    grouped = True

    def __init__(self, *, interpreted_as: str = "sm_90") -> None:
        try:
            self._forward = import_module("weft.run.kernels.triton_forward")
            self._backward = import_module("weft.run.kernels.triton_backward")
        except ImportError as error:
            raise MissingError(
                f"backend='triton' needs triton: {error}.", hint=f"Add it with: {install_command('gpu')}"
            ) from error
        self._interpreted = _is_interpreted()
        self._interpreted_as = interpreted_as
        self.tuned: TunedConfigs = {}
        """The table that all ranks have measured together."""
        self.density = 1
        """The density class of a sparse mask."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, into: Accumulator | None = None
    ) -> Sums:
        self._check(q, k, v)
        tma = self.target(q.device) in TMA_TARGETS
        shape = self._shape(q, k, tiles)
        if into is None:
            out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        else:
            out, lse, fresh = into
            _check_sums(out, lse, q.dtype if fresh else torch.float32)
        merges = into is not None and not into.fresh
        if not q.numel():
            return out, lse
        if not k.shape[2]:
            return (out, lse) if merges else (out.zero_(), lse.fill_(-torch.inf))
        config = self._config("forward", shape, q, k)
        q, k, v = (_addressable(x) if tma else packed(x) for x in (q, k, v))
        blocks = self._blocks(tiles, q.device)
        # Descriptors have strides; strides that are not read must not specialize the kernel.
        unit, strides = _strides(*([] if tma else [q, k, v]), out)
        strides = *([(0, 0, 0)] * 3 if tma else []), *strides, lse.stride()
        sizes = (scale, q.shape[1], q.shape[2], k.shape[2])
        even = k.shape[2] % shape["BLOCK_K"] == 0
        constants = {**shape, "UNIT": unit, "EVEN": even, "ADD": merges, "TMA": tma}
        heights = (config.bq, config.bk, config.bk)
        operands = [
            _descriptor(x, rows, shape["DPAD"]) if tma else x
            for x, rows in zip((q, k, v), heights, strict=True)
        ]
        arguments = (*operands, out, lse, blocks.starts, blocks.kv, blocks.order, *strides, *sizes)
        grid = _grid(q, config.bq, tiles.block_q, sparse=tiles.sparse)
        with on_device(q.device):
            self._forward.forward[grid](*arguments, **constants, **config.keywords("forward"))
        return out, lse

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._check(q, k, v)
        q, k, v = (packed(x) for x in (q, k, v))
        by_head = (q.shape[0], q.shape[1], *k.shape[2:])
        dq, dk, dv = (
            torch.empty(shape, dtype=torch.float32, device=q.device) for shape in (q.shape, by_head, by_head)
        )
        if not q.numel() or not k.numel():
            return dq.zero_(), dk[:, : k.shape[1]].zero_(), dv[:, : k.shape[1]].zero_()
        grad, delta, peak = self._prepare(packed(grad), q, *done)
        shape = self._shape(q, k, tiles)
        blocks = self._blocks(tiles, q.device)
        inputs = (q, k, v, grad, delta, peak)
        sizes = (scale, q.shape[1], q.shape[2], k.shape[2])
        unit, strides = _strides(q, k, v, grad, dq, dk, dv)
        shape["UNIT"] = unit
        constants = {**shape, "EVEN": k.shape[2] % shape["BLOCK_K"] == 0}
        lists = blocks.starts, blocks.kv, blocks.order
        arguments = (*inputs, dq, *lists, *strides[:5], *sizes)
        config = self._config("grad_queries", shape, q, k)
        grid = _grid(q, config.bq, tiles.block_q, sparse=tiles.sparse)
        with on_device(q.device):
            self._backward.grad_queries[grid](*arguments, **constants, **config.keywords("grad_queries"))
        turned = blocks.inverted if tiles.sparse else blocks
        constants = {**shape, "EVEN": q.shape[2] % shape["BLOCK_Q"] == 0}
        lists = turned.starts, turned.kv, turned.order
        arguments = (*inputs, dk, dv, *lists, *strides[:4], *strides[5:], *sizes)
        config = self._config("grad_keys", shape, q, k)
        grid = _grid(dk, config.bk, tiles.block_k, sparse=tiles.sparse)
        with on_device(q.device):
            self._backward.grad_keys[grid](*arguments, **constants, **config.keywords("grad_keys"))
        if shape["GROUP"] > 1:
            dk, dv = (x.unflatten(1, (-1, shape["GROUP"])).sum(2) for x in (dk, dv))
        return dq, dk, dv

    def _prepare(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (grad in the dtype of q, rowsum(grad · out), lse in units of log 2)."""
        out = packed(out)
        delta = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        peak = torch.empty_like(delta)
        same = grad.dtype == q.dtype
        narrow = grad if same else torch.empty(grad.shape, dtype=q.dtype, device=q.device)
        batch, heads, rows, head_dim = q.shape
        unit, (of_grad, of_out, of_narrow) = _strides(grad, out, narrow)
        strides = of_grad, of_out, lse.stride(), of_narrow
        arguments = (grad, out, lse, delta, peak, narrow, *strides, heads, rows)
        grid = -(-rows // _ROWS), batch * heads
        with on_device(q.device):
            self._backward.prepare[grid](
                *arguments, UNIT=unit, D=head_dim, DPAD=padded(head_dim), NARROW=not same, ROWS=_ROWS
            )
        return narrow, delta, peak

    def _config(self, kernel: str, shape: dict[str, int], q: Tensor, k: Tensor) -> Config:
        """Return the configuration of a launch: the tuned one, or the default."""
        kind = self.target(q.device), kernel, shape["DPAD"], shape["BLOCK_Q"], shape["BLOCK_K"]
        first = configs(*kind)[0]
        if not self.tuned:
            return first
        dtype, density = str(q.dtype).removeprefix("torch."), 0 if shape["DENSE"] else self.density
        lengths = length_class(q.shape[2]), length_class(k.shape[2])
        return self.tuned.get(TuningKey(*kind, dtype, shape["GROUP"], density, *lengths), first)

    def target(self, device: torch.device) -> str:
        """Return the target whose configurations launches on a device use."""
        return self._interpreted_as if self._interpreted else target_of(device)

    def _blocks(self, tiles: Tiles, device: torch.device) -> Blocks:
        if tiles.sparse:
            return tiles.lists(device)

        def nothing() -> Blocks:
            return Blocks(0, 0, 0, *torch.zeros(2, 1, dtype=torch.int32, device=device))

        return tiles.cached(("no list", device), nothing)

    def _shape(self, q: Tensor, k: Tensor, tiles: Tiles) -> dict[str, int]:
        dense = not tiles.sparse
        sizes = (_DENSE_BLOCK, _DENSE_BLOCK) if dense else (tiles.block_q, tiles.block_k)
        if any(size % min(BLOCKS) for size in sizes):
            raise InputError(
                f"backend='triton' takes blocks in multiples of {min(BLOCKS)}, got {sizes[0]} by {sizes[1]}.",
                hint="backend='exact' takes any.",
            )
        if (q.shape[2], k.shape[2]) != (tiles.q_len, tiles.kv_len):
            raise InputError(
                f"{q.shape[2]} queries and {k.shape[2]} keys do not fit "
                f"tiles of {tiles.q_len} by {tiles.kv_len}."
            )
        group = q.shape[1] // k.shape[1]
        blocks = {"BLOCK_Q": sizes[0], "BLOCK_K": sizes[1]}
        return {"D": q.shape[3], "DPAD": padded(q.shape[3]), **blocks, "DENSE": dense, "GROUP": group}

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if q.device.type == "cpu" and not self._interpreted:
            raise InputError(
                "Tensors of backend='triton' must be on a GPU, got the CPU.",
                hint="Use backend='exact', or for tests set TRITON_INTERPRET=1 before importing triton.",
            )
        if q.shape[-1] > max(HEAD_DIMS):
            raise InputError(f"backend='triton' has head dims up to {max(HEAD_DIMS)}, not {q.shape[-1]}.")
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        supported = (torch.float32, torch.float16) if self._interpreted else (torch.bfloat16, torch.float16)
        if q.dtype not in supported or not q.dtype == k.dtype == v.dtype:
            raise InputError(
                f"backend='triton' does not take {q.dtype}, {k.dtype} and {v.dtype}.",
                hint=f"They must be all {supported[0]} or all {supported[1]}; backend='exact' takes any.",
            )


@cache
def target_of(device: torch.device) -> str:
    """Return the target of a device."""
    arch = arch_of(device)
    if arch not in TARGET_OF:
        raise InputError(f"backend='triton' serves {', '.join(TARGET_OF)}, not {arch}.")
    return TARGET_OF[arch]


def _is_interpreted() -> bool:
    from triton import knobs

    return knobs.runtime.interpret


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device current: Triton launches on the current one, not on that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _addressable(x: Tensor) -> Tensor:
    """Return x or a copy that a tensor-memory descriptor can describe: rows at multiples of 16 bytes."""
    if rest := -x.shape[-1] % (16 // x.element_size()):
        return F.pad(x, (0, rest))
    # How the hardware treats a stride of 0 is not documented.
    return aligned(x.contiguous() if 0 in x.stride() else x)


def _descriptor(x: Tensor, rows: int, width: int) -> Any:
    """Return the descriptor by which the copy unit reads [1, 1, rows, width] tiles of x."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    # The stride of a dim of size one is unused and may be anything, but must be valid.
    strides = [stride if size > 1 else 8 for size, stride in zip(x.shape[:3], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width])


def _grid(x: Tensor, rows: int, block: int, *, sparse: bool) -> tuple[int, ...]:
    """Return a grid with a program for each `rows` rows of a head; in one dim, as the lists, if sparse."""
    heads = x.shape[0] * x.shape[1]
    if sparse:
        return (heads * -(-x.shape[2] // block) * (block // rows),)
    return -(-x.shape[2] // rows), heads


def _strides(*tensors: Tensor) -> tuple[int, list[tuple[int, ...]]]:
    """Return (unit, strides in it): 8 if it divides all strides, so that the compiler knows rows are aligned.

    Triton itself detects multiples of 16 only: rows of 72 numbers would be read one by one. The stride of a
    dim of size one is unused.
    """
    pairs = [zip(x.stride()[:3], x.shape[:3], strict=True) for x in tensors]
    strides = [tuple(stride if size > 1 else 0 for stride, size in each) for each in pairs]
    unit = 1 if any(stride % 8 for each in strides for stride in each) else 8
    return unit, [tuple(stride // unit for stride in each) for each in strides]


def _check_sums(out: Tensor, lse: Tensor, also: torch.dtype) -> None:
    if out.dtype not in (torch.float32, also) or lse.dtype != torch.float32 or out.stride(-1) != 1:
        raise InputError(
            f"Sums of backend='triton' must be float32 with contiguous rows, got {out.dtype}, {lse.dtype}."
        )
