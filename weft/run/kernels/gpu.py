"""The Triton kernels behind the signature of all kernels: block-sparse attention on GPUs.

Nothing imports triton before a `Gpu` is made. On a machine without a GPU it runs where TRITON_INTERPRET=1
was set before triton was first imported, slowly, which is how it is tested.
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
from weft.run.kernels import Sums, packed
from weft.run.kernels.machine import arch_of
from weft.run.kernels.tiles import Blocks, Tiles
from weft.run.kernels.triton_configs import BLOCKS, HEAD_DIMS, TARGET_OF, Config, configs
from weft.run.merge import merged

# What prepares the gradient only streams; one shape serves all.
_ROWS = 32
_DENSE_BLOCK = max(BLOCKS)


class Gpu:
    """Flash attention over an index list: 16-bit operands (float32 when interpreted), float32 results.

    `tune` measures the configurations of this device at the first call of each kind and keeps the best;
    without it the first one is taken, so that results are the same bits on every run.
    """

    name = "triton"
    grouped = True

    def __init__(self, *, tune: bool = True) -> None:
        try:
            self._forward = import_module("weft.run.kernels.triton_forward")
            self._backward = import_module("weft.run.kernels.triton_backward")
        except ImportError as error:
            raise MissingError(
                f"backend='triton' needs triton: {error}.", hint="pip install triton"
            ) from error
        self._interpreted = _is_interpreted()
        self._tune = tune and not self._interpreted

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        scale: float,
        into: Sums | None = None,
        *,
        fresh: bool = False,
    ) -> Sums:
        """(out, lse); with `into`, these tiles are added to that (out, lse) in place, and it is returned."""
        self._check(q, k, v)
        if q.shape[-1] not in HEAD_DIMS:
            out, lse = self.attend(_widened(q), _widened(k), _widened(v), tiles, scale)
            return merged((out[..., : q.shape[-1]], lse), into, fresh=fresh)
        q, k, v = (packed(x) for x in (q, k, v))
        if into is None:
            out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        else:
            out, lse = into
            _check_sums(out, lse, q.dtype if fresh else torch.float32)
        merges = into is not None and not fresh
        if not k.shape[2]:
            return (out, lse) if merges else (out.zero_(), lse.fill_(-torch.inf))
        shape = self._shape(q, k, tiles)
        blocks = self._blocks(tiles, q.device)
        arguments = (q, k, v, out, lse, blocks.starts, blocks.kv)
        strides = _strides(q, k, v, out, lse)
        constants = {**shape, "EVEN": k.shape[2] % shape["BLOCK_K"] == 0, "ADD": merges}
        sizes = (scale, q.shape[1], q.shape[2], k.shape[2])
        self._launch(self._forward.forward, (*arguments, *strides, *sizes), constants, q, over="q")
        return out, lse

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of these tiles; `done` is the final (out, lse) over *all* tiles of the rows."""
        self._check(q, k, v)
        if q.shape[-1] not in HEAD_DIMS:
            wide = _widened(grad), _widened(q), _widened(k), _widened(v), (_widened(done[0]), done[1])
            dq, dk, dv = (x[..., : q.shape[-1]] for x in self.attend_backward(*wide, tiles, scale))
            return dq, dk, dv
        q, k, v = (packed(x) for x in (q, k, v))
        by_head = (q.shape[0], q.shape[1], *k.shape[2:])
        dq, dk, dv = (
            torch.empty(shape, dtype=torch.float32, device=q.device) for shape in (q.shape, by_head, by_head)
        )
        if not q.shape[2] or not k.shape[2]:
            return dq.zero_(), dk[:, : k.shape[1]].zero_(), dv[:, : k.shape[1]].zero_()
        grad, delta, peak = self._prepare(packed(grad), q, *done)
        shape = self._shape(q, k, tiles)
        blocks = self._blocks(tiles, q.device)
        given = (q, k, v, grad, delta, peak)
        sizes = (scale, q.shape[1], q.shape[2], k.shape[2])
        strides = _strides(q, k, v, grad)
        constants = {"DPAD": shape["D"], **shape, "EVEN": k.shape[2] % shape["BLOCK_K"] == 0}
        arguments = (*given, dq, blocks.starts, blocks.kv, *strides, *_strides(dq), *sizes)
        self._launch(self._backward.grad_queries, arguments, constants, q, over="q")
        turned = blocks.inverted if tiles.sparse else blocks
        constants = {"DPAD": shape["D"], **shape, "EVEN": q.shape[2] % shape["BLOCK_Q"] == 0}
        arguments = (*given, dk, dv, turned.starts, turned.kv, *strides, *_strides(dk, dv), *sizes)
        self._launch(self._backward.grad_keys, arguments, constants, dk, over="k")
        if shape["GROUP"] > 1:
            dk, dv = (x.unflatten(1, (-1, shape["GROUP"])).sum(2) for x in (dk, dv))
        return dq, dk, dv

    def _prepare(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(grad in the dtype of q, rowsum(grad · out), lse in units of log 2)."""
        out = packed(out)
        delta = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        peak = torch.empty_like(delta)
        same = grad.dtype == q.dtype
        narrow = grad if same else torch.empty(grad.shape, dtype=q.dtype, device=q.device)
        batch, heads, rows, head_dim = q.shape
        arguments = (grad, out, lse, delta, peak, narrow, *_strides(grad, out, lse, narrow), heads, rows)
        grid = -(-rows // _ROWS), batch * heads
        with on_device(q.device):
            self._backward.prepare[grid](*arguments, D=head_dim, DPAD=head_dim, NARROW=not same, ROWS=_ROWS)
        return narrow, delta, peak

    def _launch(
        self, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, int], x: Tensor, *, over: str
    ) -> None:
        """One program for each BQ (or BK) rows of x, each head and each batch, with the right tile sizes."""
        batch, heads, rows, _ = x.shape
        if not batch * heads * rows:
            return
        size = f"B{over.upper()}"

        def grid(chosen: dict[str, int]) -> tuple[int, int]:
            return -(-rows // chosen[size]), batch * heads

        target = "sm_80" if self._interpreted else target_of(x.device)
        options = configs(target, kernel.__name__, constants["D"], constants["BLOCK_Q"], constants["BLOCK_K"])
        with on_device(x.device):
            if self._tune and len(options) > 1:
                _tuned(kernel, options, rows.bit_length())[grid](*arguments, **constants)
            else:
                kernel[grid](*arguments, **constants, **_keywords(next(iter(options))))

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
                f"backend='triton' was given blocks of {sizes[0]} by {sizes[1]} tokens.",
                hint=f"Its blocks are multiples of {min(BLOCKS)}; backend='exact' takes any.",
            )
        if (q.shape[2], k.shape[2]) != (tiles.q_len, tiles.kv_len):
            raise InputError(
                f"{q.shape[2]} queries and {k.shape[2]} keys do not fit "
                f"tiles of {tiles.q_len} by {tiles.kv_len}."
            )
        group = q.shape[1] // k.shape[1]
        return {"D": q.shape[3], "BLOCK_Q": sizes[0], "BLOCK_K": sizes[1], "DENSE": dense, "GROUP": group}

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if q.device.type == "cpu" and not self._interpreted:
            raise InputError(
                "backend='triton' was given tensors on the CPU.",
                hint="Set TRITON_INTERPRET=1 before triton is imported to test it there, or backend='exact'.",
            )
        if q.shape[-1] > max(HEAD_DIMS):
            raise InputError(f"backend='triton' has head dims up to {max(HEAD_DIMS)}, not {q.shape[-1]}.")
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        served = (torch.float32, torch.float16) if self._interpreted else (torch.bfloat16, torch.float16)
        if q.dtype not in served or not q.dtype == k.dtype == v.dtype:
            raise InputError(
                f"backend='triton' was given {q.dtype}, {k.dtype} and {v.dtype}.",
                hint=f"Here q, k and v are all {served[0]} or all {served[1]}; backend='exact' takes any.",
            )


@cache
def target_of(device: torch.device) -> str:
    """The entry of the table of configurations that fits a device."""
    arch = arch_of(device)
    if arch not in TARGET_OF:
        raise InputError(f"backend='triton' serves {', '.join(TARGET_OF)}, not {arch}.")
    return TARGET_OF[arch]


def _widened(x: Tensor) -> Tensor:
    """Rows with zeros up to the next head dim that there is: they change no score and no other number."""
    return F.pad(x, (0, next(size for size in HEAD_DIMS if size >= x.shape[-1]) - x.shape[-1]))


def _is_interpreted() -> bool:
    from triton import knobs

    return knobs.runtime.interpret


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whatever the tensors say."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _keywords(config: Config) -> dict[str, int]:
    return {"BQ": config.bq, "BK": config.bk, "num_warps": config.warps, "num_stages": config.stages}


@cache
def _tuned(kernel: Any, options: tuple[Config, ...], size: int) -> Any:
    """One tuner for each list and size: a choice for one target, block or length is not another's."""
    del size
    import triton

    found = [triton.Config({"BQ": c.bq, "BK": c.bk}, c.warps, c.stages) for c in options]
    # Measuring runs a kernel many times; a running sum must be added to only once.
    sums = ["out", "lse"] if kernel.__name__ == "forward" else None
    return triton.autotune(found, key=["D", "DENSE", "EVEN"], restore_value=sums)(kernel)


def _strides(*tensors: Tensor) -> tuple[tuple[int, int, int], ...]:
    return tuple((x.stride(0), x.stride(1), x.stride(2)) for x in tensors)


def _check_sums(out: Tensor, lse: Tensor, also: torch.dtype) -> None:
    if out.dtype not in (torch.float32, also) or lse.dtype != torch.float32 or out.stride(-1) != 1:
        raise InputError(
            f"A sum of backend='triton' is float32 with rows in one piece, not {out.dtype}, {lse.dtype}."
        )
