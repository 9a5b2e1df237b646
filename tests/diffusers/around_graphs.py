"""Rows of the table in `around`: torch.compile, derivatives, and what may be refused."""

from __future__ import annotations

import io
import pickle

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.diffusers.around import Run, first, row, weighted
from tests.diffusers.toys import normal


@row("wan", "flux")
def resolutions_under_compile(run: Run) -> None:
    torch.compiler.reset()
    model = run.split(run.model())
    if run.ranks > 1:
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
    for at, grid in enumerate([(3, 3, 5), (1, 5, 7), (3, 3, 5)]):
        run.step(f"{at}", model, grid=grid)


# What may be refused, in a sentence


plain = sdpa_kernel(SDPBackend.MATH)
"""The only attention of torch that has these derivatives."""


@row(may_refuse=True)
@plain
def jvp(run: Run) -> None:
    """Right or refused, but never 0."""
    model = run.split(run.model())
    inputs = run.inputs()
    x = inputs.pop("hidden_states")
    run.keep("tangent", *torch.func.jvp(lambda y: first(model(y, **inputs)), (x,), (normal(*x.shape),)))


@row(may_refuse=True)
@plain
def jvp_of_the_weights(run: Run) -> None:
    model = run.split(run.model()).requires_grad_(requires_grad=False)
    weights = dict(model.named_parameters())
    duals: dict[str, Tensor] = {}
    with forward_ad.dual_level():
        for name, weight in weights.items():
            duals[name] = forward_ad.make_dual(weight, normal(*weight.shape, seed=len(name)))
        out = first(torch.func.functional_call(model, duals, (), run.inputs()))
        run.keep("tangent", *forward_ad.unpack_dual(out))


@row(may_refuse=True)
def vmap(run: Run) -> None:
    model = run.split(run.model())
    inputs = run.inputs()
    x = inputs.pop("hidden_states")
    run.keep("out", torch.vmap(lambda y: first(model(y, **inputs)))(torch.stack([x, 2 * x])))


@row(may_refuse=True)
@plain
def double_backward(run: Run) -> None:
    """A gradient penalty."""
    model = run.split(run.model())
    inputs = run.inputs()
    x = inputs["hidden_states"].requires_grad_()
    (slope,) = torch.autograd.grad(weighted(first(model(**inputs))), x, create_graph=True)
    slope.square().sum().backward()
    run.keep("slope", run.mean(slope.detach()))
    run.gradients("penalty", model)


@row(may_refuse=True)
def func_grad(run: Run) -> None:
    model = run.split(run.model())
    inputs = run.inputs()
    x = inputs.pop("hidden_states")
    slope, value = torch.func.grad_and_value(lambda y: weighted(first(model(y, **inputs))))(x)
    run.keep("value", value, run.mean(slope))


@row("wan", "flux", may_refuse=True)
def export(run: Run) -> None:
    model = run.split(run.model())
    inputs = run.inputs()
    program = torch.export.export(model, (), inputs, strict=False)
    run.keep("out", first(program.module()(**inputs)))


@row(may_refuse=True)
def pickled(run: Run) -> None:
    run.out("loaded", pickle.loads(pickle.dumps(run.split(run.model()))))


@row(may_refuse=True)
def saved_whole(run: Run) -> None:
    torch.save(run.split(run.model()), file := io.BytesIO())
    file.seek(0)
    run.out("loaded", torch.load(file, weights_only=False))


@row(may_refuse=True)
def written_in_place(run: Run) -> None:
    model = run.split(run.model())
    out = first(model(**run.inputs()))
    out.mul_(2)
    out[:1].add_(1)
    weighted(out).backward()
    run.keep("out", out)
    run.gradients("in place", model)
