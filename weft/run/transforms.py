"""Transforms that kernels cannot see (forward-mode AD, `torch.func`, export): detect and refuse them."""

# torch has no public names for its dispatcher, and its own types are incomplete.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnnecessaryComparison=false

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad

from weft.core.errors import DerivativeError, InputError

FIRST_ONLY = (
    "backward, torch.func.grad, vjp and jvp serve. For second derivatives run the model in one process, "
    "without weft, under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
)


_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(*tensors: Tensor) -> bool:
    """Whether torch may skip its dispatcher for a call: no mode is active, and no tensor is of a subclass."""
    return torch._C._len_torch_dispatch_stack() == 0 and all(type(x) in _PLAIN for x in tensors)


def is_transformed() -> bool:
    """Whether forward-mode AD or a transform of `torch.func` is active: kernels see neither of them."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def check_transforms(name: str) -> None:
    """Refuse what would differentiate twice, and what maps: all ranks refuse alike."""
    kinds = [each.key() for each in get_interpreter_stack() or ()]
    if any(kind not in (TransformType.Grad, TransformType.Jvp) for kind in kinds):
        raise _vmap_error(name)
    if kinds.count(TransformType.Jvp) > 1 or TransformType.Jvp in kinds[:-1]:
        raise DerivativeError(
            f"{name} has no second derivative, which nested torch.func.jvp needs.", hint=FIRST_ONLY
        )


def check_unmapped(name: str, x: Tensor) -> None:
    """Refuse a tensor of `is_grads_batched`, whose maps have no stack to look at."""
    if not torch._C._has_storage(x) and "Batched" in str(torch._C._dispatch_keys(x)):
        raise _vmap_error(name)


def check_tensors(*tensors: Tensor) -> None:
    """Refuse tensors whose shape is that of the whole: a rank computes with its shard."""
    module = sys.modules.get("torch.distributed.tensor")  # there if anybody has a DTensor
    if module is not None and any(isinstance(x, module.DTensor) for x in tensors):
        raise InputError("q, k or v is a DTensor.", hint="Give this rank's shard: x.to_local().")


def refuse_export(name: str) -> None:
    """Refuse torch.export and torch.jit.trace."""
    if torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None:
        raise DerivativeError(
            f"{name} cannot be exported: the program would have no ranks to talk to.",
            hint="Export the model without weft, or use torch.compile.",
        )


def check_call(name: str) -> None:
    """Refuse what no part of a model could do, before anything of it runs."""
    refuse_export(name)
    check_transforms(name)


def check_traced(name: str) -> None:
    """Refuse what a graph would lose; torch.compile runs this while it traces, and guards the transforms."""
    check_call(name)
    if is_transformed():
        raise DerivativeError(
            f"{name} in a graph of torch.compile has no tangent, and no derivative by torch.func.",
            hint="Call torch.func.jvp or torch.func.grad on the model that is not compiled.",
        )


check_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def untransformed(*tensors: Tensor) -> Generator[tuple[Tensor, ...]]:
    """Run outside of `torch.func`, on the values of tensors: for what reads them and has no derivative."""
    if peek_interpreter_stack() is None:
        yield tensors
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    values: list[Tensor] = []
    for x in tensors:
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        values.append(x)
    with temporarily_clear_interpreter_stack():
        yield tuple(x.detach() for x in values)


def refused(what: str, hint: str = FIRST_ONLY) -> Any:
    """Return a static method of an autograd function that raises."""

    def refuse(*_: Any) -> Any:
        raise DerivativeError(what, hint=hint)

    return staticmethod(refuse)


def unmapped(name: str) -> Any:
    """Return the `vmap` of an autograd function that has none."""

    def refuse(*_: Any) -> Any:
        raise _vmap_error(name)

    return staticmethod(refuse)


def _vmap_error(name: str) -> DerivativeError:
    return DerivativeError(
        f"{name} cannot be mapped by torch.vmap (jacrev, jacfwd and is_grads_batched use it).",
        hint="Put the mapped dim into the batch, or loop over it.",
    )


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """What a forward saved, if nothing has been written into it."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise DerivativeError(
            "q, k, v or the output of weft.attention was changed in place, and its backward reads it.",
            hint="Write out = out + x in place of out += x, or change a clone.",
        ) from error
