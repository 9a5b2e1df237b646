"""`call`: an attention in Python as one torch operation, which torch.compile puts into a graph as it is.

The graph has the number of the callee, in a tensor, and calls it with the tensors of each run. So whatever an
attention depends on besides (plans, layouts, masks, steps) is looked up when it runs: one graph serves all
modules that are alike, and all sequence lengths.
"""

# torch has no public names for its dispatcher, and its own types are incomplete.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch._C import DispatchKey

from weft.core.errors import InputError
from weft.run.transforms import check_traced

# Inductor's CUDA graphs own all memory that lives between their runs, and weft's workspace does: with this
# tag they end before an attention and begin again behind it. `torch.cuda.graph` captures whole calls.
TAGS = (torch.Tag.cudagraph_unsafe,)

_numbers = count()
_callees: WeakValueDictionary[int, Any] = WeakValueDictionary()
_saved: WeakValueDictionary[int, Saved] = WeakValueDictionary()


QKV = tuple[Tensor, Tensor, Tensor]


class CallOptions(NamedTuple):
    """What a graph gives an attention besides q, k and v; none of it gets a gradient."""

    mask: Tensor | None
    hidden: Tensor | None
    scale: float | None
    numbers: list[int]


class Callee(Protocol):
    """What a graph calls."""

    def called(self, qkv: QKV, options: CallOptions) -> Tensor:
        """Return a tensor like q."""
        ...


def number_of(callee: object) -> int:
    """Return a number for an object; the caller keeps the object alive."""
    number = next(_numbers)
    _callees[number] = callee
    return number


def handle_of(callee: object) -> Tensor:
    """A number for graphs of which one serves many objects: an int would be a constant of each."""
    return torch.tensor(number_of(callee), device="cpu")


def callee_of(handle: Tensor) -> Any:
    return _callees[int(handle)]


def call(
    callee: Tensor | int,
    qkv: QKV,
    *,
    mask: Tensor | None = None,
    hidden: Tensor | None = None,
    scale: float | None = None,
    numbers: Sequence[int] = (),
) -> Tensor:
    """Call a callee, by its handle or number."""
    check_traced("Attention")
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in qkv)
    handle, number = (None, callee) if isinstance(callee, int) else (callee, -1)
    return call_op(handle, number, *qkv, mask, hidden, scale, [*numbers], keep)[0]


class Saved(np.ndarray):
    """What the backward of a call needs. A tensor made of it is all that a compiled graph has to keep."""

    call: tuple[tuple[Tensor, ...], Tensor]

    @staticmethod
    def tensor(inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        number = next(_numbers)
        saved = np.array([number]).view(Saved)
        saved.call = inputs, out
        _saved[number] = saved
        return torch.from_numpy(saved)  # holds it


def _with_autograd() -> Any:
    """Enable autograd, which is disabled inside of an operation."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


@torch.library.custom_op("weft::call", mutates_args=(), tags=TAGS)
def call_op(  # noqa: PLR0913 - an operation takes numbers and tensors only
    handle: Tensor | None,
    number: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    hidden: Tensor | None,
    scale: float | None,
    numbers: list[int],
    keep: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    """(output, what stands for all that the backward needs)."""
    check_traced("Attention")  # a graph may be older than a level of forward-mode AD
    function = _callees[number if handle is None else int(handle)].called
    options = CallOptions(mask, hidden, scale, numbers)
    with torch._C.DisableTorchFunction():  # modes have seen the call already
        if not keep:
            out = function((q, k, v), options)
            return _own(out, q, k, v), torch.empty(1, dtype=torch.int64)
        with _with_autograd(), torch.enable_grad():
            inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
            out = function(inputs, options).contiguous()
        return _own(out.detach(), q, k, v), Saved.tensor(inputs, out)


def _own(out: Tensor, *inputs: Tensor) -> Tensor:
    """An operation must not return what it was given."""
    is_theirs = any(out.untyped_storage()._cdata == x.untyped_storage()._cdata for x in inputs)
    return out.clone() if is_theirs else out.contiguous()


@call_op.register_fake
def _(handle: Tensor | None, number: int, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    del handle, number, rest
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(1, dtype=torch.int64)


@torch.library.custom_op("weft::call_backward", mutates_args=(), tags=TAGS)
def call_backward_op(
    grad: Tensor, saved: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> list[Tensor]:
    """[dq, dk, dv]. The forward's tensors are given so that their memory is not used again before."""
    del q, k, v, out
    held = _saved.get(int(saved))
    if held is None:
        raise InputError(
            "What a compiled attention saved for its backward is gone: only a copy of its tensor is left.",
            hint="Saved tensors must not be copied, as save_on_cpu does; use gradient checkpointing instead.",
        )
    inputs, result = held.call
    with torch._C.DisableTorchFunction(), _with_autograd():
        grads = torch.autograd.grad(result, inputs, grad, retain_graph=True)
    return [x.contiguous() for x in grads]


@call_backward_op.register_fake
def _(grad: Tensor, saved: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
    del grad, saved, out
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[2:5], output[0])


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    saved, q, k, v, out = ctx.saved_tensors
    grads = call_backward_op(torch.zeros_like(out) if grad is None else grad, saved, q, k, v, out)
    return None, None, *grads, None, None, None, None, None


call_op.register_autograd(_backward, setup_context=_setup_context)
