"""Rows that depend on more than themselves are found by running them among noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diffusers.toys import normal
from weft.hooks.probe import RowSpans, Trace, noise_like


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def blamed(module: nn.Module, dim: int = 1, *shape: int) -> Any:
    """Whether it mixes a dim, of which the first run has one row, the second noise around it."""
    model, x = nn.Sequential(nn.Identity(), module.double()), normal(*(shape or (2, 1, 4, 6)))
    noise = noise_like(torch.cat([x, x, x], dim))
    trace = Trace(model)
    trace.run(lambda: model(x))
    among = torch.cat([noise.narrow(dim, 0, x.shape[dim]), x, noise.narrow(dim, 0, 2 * x.shape[dim])], dim)
    trace.run(lambda: model(among), [RowSpans(1, 4, ((0, 1, 1),))])
    return trace.first_mixed()


POINTWISE: dict[str, Any] = {
    "norm": nn.LayerNorm(6),
    "wider": nn.Linear(6, 13),
    "mlp": nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Dropout(0.5), nn.Linear(24, 6)),
    "tuple": Apply(lambda x: (x * 2, None)),
    "folded": Apply(lambda x: x.flatten(0, 1)),
    "folded the other way": Apply(lambda x: x.transpose(0, 1).flatten(0, 1)),
    "channels first": Apply(lambda x: x.movedim(-1, 1).relu()),
    "along another dim": Apply(lambda x: x - x.mean(2, keepdim=True)),
    "without rows": Apply(lambda x: x.new_ones(x.shape[0], 3)),
}
MIXING: dict[str, Any] = {
    "mean": Apply(lambda x: x - x.mean(1, keepdim=True)),
    "cumulative sum": Apply(lambda x: x.cumsum(1)),
    "reversed": Apply(lambda x: x.flip(1).cumsum(1).flip(1)),
    "place": Apply(lambda x: x + torch.arange(x.shape[1])[:, None, None]),
    "number": Apply(lambda x: x * x.shape[1]),
    "pooled": Apply(lambda x: x.mean(1)),
    "channels first": Apply(lambda x: F.group_norm(x.movedim(-1, 1), 2)),
    "folded": Apply(lambda x: x.roll(1, 1).flatten(0, 1)),
    "convolution": Apply(lambda x: F.avg_pool2d(x.movedim(-1, 1), (3, 1), 1, (1, 0))),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_what_computes_rows_one_by_one_is_not_blamed(name: str) -> None:
    assert blamed(POINTWISE[name]) is None


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_is_blamed(name: str) -> None:
    assert blamed(MIXING[name]) == ("1", "")


def test_a_model_is_left_as_it_was() -> None:
    """Modes, statistics, random numbers, hooks and autocast's weights."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.BatchNorm1d(6))
    model[1].eval()
    calls: list[int] = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    state, mean = torch.get_rng_state(), model[2].running_mean.clone()  # pyright: ignore
    with torch.autocast("cpu", torch.bfloat16):
        Trace(model).run(lambda: model(torch.randn(8, 6)))
        model(torch.randn(8, 6)).sum().backward()
    assert calls == [1]  # of the second
    assert model[1].weight.grad is not None
    assert [part.training for part in model.modules()] == [True, True, False, True]
    torch.set_rng_state(state)
    Trace(model).run(lambda: model(torch.randn(8, 6)))
    assert torch.equal(torch.get_rng_state(), state)
    model[2].running_mean = mean
    Trace(model).run(lambda: model(torch.randn(8, 6)))
    assert torch.equal(model[2].running_mean, mean)
    assert len(model[1]._forward_hooks) == 1
