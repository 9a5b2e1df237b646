"""The compiled CPU kernel: block-sparse attention, forward and backward, in time proportional to density."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.core.errors import InputError, MissingError
from weft.run.build import Library

if TYPE_CHECKING:
    from weft.run.kernels import Accumulator, Sums
    from weft.run.kernels.tiles import Tiles

SOURCES = Path(__file__).parent / "csrc"
# Strict IEEE order, except that a*b+c may become an FMA: -ffast-math would break the rounding in exp2.
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-std=gnu11"]
# By instruction set: W, the float32 lanes of a vector, and the compiler flags that enable it.
ISAS = {
    "avx512": ["-DW=16", "-mavx512f", "-mavx2", "-mfma"],
    "avx2": ["-DW=8", "-mavx2", "-mfma"],
    "base": ["-DW=4"],
}


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("batch", "head", "row")]

    def __init__(self, x: Tensor) -> None:
        super().__init__(x.data_ptr(), *x.stride()[:3])


class _Args(ctypes.Structure):
    """Mirrors `Args` of csrc/attend.h."""

    _fields_ = (
        [(name, _Tensor) for name in ("q", "k", "v", "out", "lse", "grad", "dq", "dk", "dv")]
        + [
            (name, ctypes.c_int64)
            for name in ("batch", "heads", "q_len", "kv_len", "dim", "block_q", "block_k")
        ]
        + [("starts", ctypes.c_void_p), ("kv", ctypes.c_void_p), ("scale", ctypes.c_float)]
        + [(name, ctypes.c_int32) for name in ("bf16", "accumulate")]
    )


class Cpu:
    """Attention in float32 and bfloat16 on the CPU; float16 is cast to float32, float64 is not supported."""

    name = "cpu"
    grouped = False

    def __init__(self, isa: str | None = None) -> None:
        self.isa = isa or isas()[0]
        if self.isa not in isas():
            raise InputError(f"This CPU has no {self.isa}.", hint=f"Use one of {', '.join(isas())}.")

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, into: Accumulator | None = None
    ) -> Sums:
        q, k, v = (_ready(x) for x in (q, k, v))
        if into is None:
            out = torch.empty(q.shape, dtype=torch.float32)
            lse = torch.empty(q.shape[:-1], dtype=torch.float32)
        else:
            out, lse, _ = into
        if out.dtype != torch.float32:  # a 16-bit accumulator: compute in float32, then merge
            from weft.run.kernels.merge import merged

            return merged(self.attend(q, k, v, tiles, scale), into)
        tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse.unsqueeze(-1)}
        self._call(tensors, tiles, scale, backward=False, accumulate=into is not None and not into.fresh)
        return out, lse

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (_ready(x) for x in (q, k, v))
        grad = _ready(grad.float())
        out, lse = _ready(done[0].float()), done[1]
        grads = [torch.empty(x.shape, dtype=torch.float32) for x in (q, k, v)]
        tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse.unsqueeze(-1), "grad": grad}
        tensors |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        self._call(tensors, tiles, scale, backward=True)
        return grads[0], grads[1], grads[2]

    def _call(
        self,
        tensors: dict[str, Tensor],
        tiles: Tiles,
        scale: float,
        *,
        backward: bool,
        accumulate: bool = False,
    ) -> None:
        q, k = tensors["q"], tensors["k"]
        if 0 in (*q.shape, *k.shape):
            raise InputError(f"q and k must not be empty, got {list(q.shape)} and {list(k.shape)}.")
        args = _Args(scale=scale, bf16=q.dtype == torch.bfloat16, accumulate=accumulate)
        for name, x in tensors.items():
            setattr(args, name, _Tensor(x))
        args.batch, args.heads, args.q_len, args.dim = q.shape
        args.kv_len, args.block_q, args.block_k = k.shape[2], tiles.block_q, tiles.block_k
        if tiles.sparse:
            lists = tiles.lists(q.device)
            args.starts, args.kv = lists.starts.data_ptr(), lists.kv.data_ptr()
        threads = torch.get_num_threads()
        if _library().weft_attend(ctypes.byref(args), backward, self.isa.encode(), threads):
            raise MemoryError("The CPU kernel cannot allocate its workspace.")


@cache
def isas() -> tuple[str, ...]:
    """Return the instruction sets that this CPU has, the fastest first."""
    names = (_library().weft_isa(i) for i in range(3))
    return tuple(name.decode() for name in names if name)


def unavailable_reason() -> str:
    """Return why the kernel cannot run on this machine; "" if it can."""
    try:
        isas()
    except MissingError as error:
        return str(error)
    return ""


@cache
def _library() -> Any:
    library = ctypes.CDLL(str(library_path()))
    library.weft_isa.restype = ctypes.c_char_p
    library.weft_attend.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
    return library


def library_path() -> Path:
    """Return the path of the library: forward and backward for each instruction set of this architecture."""
    flags_by_isa = ISAS if platform.machine() in ("x86_64", "AMD64") else {"base": ISAS["base"]}
    sources: list[tuple[str, tuple[str, ...]]] = [("dispatch.c", ("-O2",))]
    for isa, flags in flags_by_isa.items():
        for name in ("forward", "backward"):
            sources.append((f"{name}.c", (*FLAGS, *flags, f"-DISA={isa}")))
    return Library("attend", SOURCES, tuple(sources), "The compiled CPU kernel", "backend='exact'").path()


def _ready(x: Tensor) -> Tensor:
    """Return x in a dtype that the kernel reads, contiguous along the last axis."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()
