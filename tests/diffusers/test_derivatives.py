"""Tangents and `torch.func` through parallelized transformers and staged models, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from tests.diffusers.toys import normal, seeded
from tests.diffusers.zoo import ZOO
from tests.distributed.jobs import Worlds

# torch's own: it scripts its rules for forward-mode AD when the first is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

Result = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Output, tangent, gradients of the weights."""


class Axial(nn.Module):
    """Attention over time, then over space, as declared stages."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.space = nn.Module(), nn.Module()
        self.stages = nn.ModuleList([Along(1), Along(2)])

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        for stage in self.stages:
            hidden_states = stage(hidden_states)
        return (hidden_states,)


class Along(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.weight = dim, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight(x).transpose(self.dim, 2)
        scores = y @ y.mT / 3
        return x + (scores.softmax(-1) @ y).transpose(self.dim, 2)


def model_of(name: str) -> tuple[Callable[[Tensor], Tensor], nn.Module, Tensor]:
    """A function of the hidden states; the model is split where there are ranks."""
    if name == "stages":
        model, given = seeded(Axial()), {"hidden_states": normal(2, 5, 7, 6)}
    else:
        model, given = ZOO[name].make(), ZOO[name].inputs()
    x = given.pop("hidden_states")
    if dist.is_initialized():
        if name == "stages":
            weft.stages(model, {"stages.0": "time", "stages.1": "space"}, dims="batch time space channel")
        else:
            weft.parallelize(model)
    return lambda x: model(hidden_states=x, **given)[0], model, x


def mean_flow(name: str, way: str) -> Result:
    """A step against a target that is made of the tangent, as MeanFlow and sCM train."""
    fn, model, x = model_of(name)
    dx = normal(*x.shape, seed=3)
    with sdpa_kernel(SDPBackend.MATH):  # the only one of torch's that has tangents
        if way == "func":
            out, tangent = torch.func.jvp(fn, (x,), (dx,))
        else:
            with forward_ad.dual_level():
                out, tangent = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, dx)))
        (out - (0.3 * tangent + 0.1).detach()).square().sum().backward()
    grads = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    return out.detach(), tangent.detach(), grads


def close(found: Tensor, expected: Tensor) -> bool:
    """Wan has layers that are float32 whatever its dtype."""
    return bool((found - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("name", "way"), [("wan", "func"), ("flux", "dual"), ("sd3", "func"), ("stages", "func")]
)
def test_steps_with_tangents_are_those_of_one_process(worlds: Worlds, name: str, way: str, size: int) -> None:
    out, tangent, grads = mean_flow(name, way)
    assert tangent.abs().max() > 1e-3
    answers = worlds(size).run(mean_flow, name, way)
    for found, found_tangent, _ in answers:
        assert close(found, out)
        assert close(found_tangent, tangent)
    for key, grad in grads.items():
        assert close(torch.stack([found[key] for *_, found in answers]).mean(0), grad), key


def functional_gradients(name: str) -> dict[str, Tensor]:
    """By `torch.func.grad` of a `functional_call`."""
    _, model, x = model_of(name)
    given = {**ZOO[name].inputs(), "hidden_states": x}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (), given)[0].square().sum()

    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.grad(loss)({key: weight.detach() for key, weight in model.named_parameters()})


@pytest.mark.parametrize("size", [2, 3])
def test_functional_gradients_are_those_of_one_process(worlds: Worlds, size: int) -> None:
    expected, answers = functional_gradients("wan"), worlds(size).run(functional_gradients, "wan")
    for key, grad in expected.items():
        assert close(torch.stack([found[key] for found in answers]).mean(0), grad), key


def twice(fn: Any, x: Tensor) -> Any:
    (grad,) = torch.autograd.grad(fn(x.requires_grad_()).square().sum(), x, create_graph=True)
    return torch.autograd.grad(grad.sum(), x)


def exported(fn: Any, x: Tensor) -> Any:
    model = nn.Module()
    model.forward = fn
    return torch.export.export(model, (x,), strict=False)


def in_level(fn: Any, x: Tensor) -> Any:
    """Compiled blocks, which have run before."""
    (model,) = (cell.cell_contents for cell in fn.__closure__ if isinstance(cell.cell_contents, nn.Module))
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    fn(x)
    with forward_ad.dual_level():
        return fn(forward_ad.make_dual(x, x))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "double backward": (twice, "gradient of its gradient"),
    "vmap": (lambda fn, x: torch.func.vmap(fn)(x[None]), "torch.vmap"),
    "export": (exported, "cannot be exported"),
    "trace": (lambda fn, x: torch.jit.trace(fn, (x,)), "cannot be exported"),
    "tangent through compiled blocks": (in_level, "graph of torch.compile"),
}


def refusals() -> dict[str, str]:
    answers = {}
    for name, (use, _) in REFUSED.items():
        fn, _, x = model_of("wan")
        try:
            use(fn, x)
            answers[name] = "nothing"
        except Exception as error:  # noqa: BLE001
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


def test_what_is_not_computed_is_refused_by_a_sentence(worlds: Worlds) -> None:
    for answers in worlds(2).run(refusals):
        assert not {
            name: answers[name]
            for name, (_, words) in REFUSED.items()
            if words not in answers[name] or "DerivativeError" not in answers[name]
        }
