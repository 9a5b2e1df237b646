"""The attention as one opaque torch operation, with its gradient: `torch.compile` sees a single node."""

# torch's own types are incomplete here.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from weft.run.execute import Executor
from weft.run.transforms import gradient, is_transformed, maps_refused, no_second_derivative, saved_tensors

_executors: WeakValueDictionary[int, Executor] = WeakValueDictionary()
"""By number: a torch operation takes numbers and tensors only. Worlds and backwards to come hold them."""
_numbers = count()


def number_of(executor: Executor) -> int:
    """Return the number by which an operation finds an executor."""
    if executor.number < 0:
        executor.number = next(_numbers)
        _executors[executor.number] = executor
    return executor.number


# Inductor's CUDA graphs own all memory that lives between their runs, and weft's workspace does: with this
# tag they end before an attention and begin again behind it. `torch.cuda.graph` captures whole calls.
TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("weft::attention", mutates_args=(), tags=TAGS)
def attention_op(q: Tensor, k: Tensor, v: Tensor, executor: int, scale: float, keep: bool) -> list[Tensor]:
    """[output, *what the backward needs]."""
    out, saved = _executors[executor].forward(q, k, v, scale, keep=keep)
    return [out, *saved]


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, executor: int, scale: float, keep: bool) -> list[Tensor]:
    shapes = _executors[executor].saved_shapes() if keep else []
    return [torch.empty(q.shape, dtype=q.dtype, device=q.device)] + [
        torch.empty(shape, dtype=dtype, device=q.device) for shape, dtype in shapes
    ]


@torch.library.custom_op("weft::attention_backward", mutates_args=(), tags=TAGS)
def backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: list[Tensor], executor: int, scale: float
) -> list[Tensor]:
    """[dq, dk, dv]; `saved` begins with the output if the executor reads it."""
    runner = _executors[executor]
    out, rest = (saved[0], saved[1:]) if runner.reads_output else (None, saved)
    grads = runner.backward(grad, (q, k, v), out, rest, scale)
    # torch.compile plans memory from the strides that the fake below promises.
    return [x.contiguous() for x in grads]


@backward_op.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, saved: list[Tensor], executor: int, scale: float
) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, number, ctx.scale, _ = inputs
    ctx.executor = _executors[number]
    # Where outputs are not computed at home, the backward reads those; then the result may be freed.
    saved = output if ctx.executor.reads_output else output[1:]
    ctx.save_for_backward(q, k, v, *saved)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    q, k, v, *saved = saved_tensors(ctx)
    grad = grads[0] if grads[0] is not None else torch.zeros_like(q)
    if is_transformed():
        out = () if ctx.executor.reads_output else (None,)
        return *gradient(ctx.executor, ctx.scale, grad, q, k, v, *out, *saved), None, None, None
    with maps_refused("The gradient of weft.attention"):
        dq, dk, dv = backward_op(grad, q, k, v, saved, ctx.executor.number, ctx.scale)
    return dq, dk, dv, None, None, None


attention_op.register_autograd(_backward, setup_context=_setup_context)
backward_op.register_autograd(no_second_derivative)
