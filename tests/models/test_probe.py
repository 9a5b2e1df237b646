"""What a module mixes is found out by running one row beside another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bench.stdit import AxialBlock
from tests.models.toys import normal, seeded
from weft.models.probe import Call, mixed_dim
from weft.models.sites import Groups

SIZES = {"batch": 2, "time": 3, "space": 4, "channel": 6}
PLAIN: Groups = tuple((dim,) for dim in SIZES)


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def found(module: nn.Module, *dims: str, x: Tensor | None = None, groups: Groups = PLAIN) -> str | None:
    call = Call.find((normal(*SIZES.values()) if x is None else x,), {})
    assert call is not None
    return mixed_dim(module.double(), call, dims, groups, SIZES)


POINTWISE: dict[str, nn.Module] = {
    "norm": nn.LayerNorm(6),
    "wider": nn.Linear(6, 13),
    "mlp": nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Dropout(0.5), nn.Linear(24, 6)),
    "tuple": Apply(lambda x: (x * 2, None)),  # pyright: ignore
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_modules_mix_nothing(name: str) -> None:
    assert found(POINTWISE[name], "batch", "time", "space") is None


@pytest.mark.parametrize(("dim", "at"), [("time", 1), ("space", 2)])
def test_attention_mixes_its_own_dim_alone(dim: str, at: int) -> None:
    block = seeded(AxialBlock(6, 2, at))
    assert found(block, "batch", "time", "space") == dim
    assert found(block, *({"batch", "time", "space"} - {dim})) is None


@pytest.mark.parametrize(
    "function", [lambda x: x - x.mean(1, keepdim=True), lambda x: x.cumsum(1).flip(1), lambda x: x.roll(1, 1)]
)
def test_what_mixes_is_found_even_where_all_rows_are_the_same(function: Callable[[Tensor], Tensor]) -> None:
    same = normal(2, 1, 4, 6).expand(2, 3, 4, 6)
    assert found(Apply(function), "space", "time", x=same) == "time"


def test_dims_that_are_folded_are_found() -> None:
    x = normal(6, 4, 6)
    groups = (("batch", "time"), ("space",), ("channel",))
    assert found(seeded(AxialBlock(6, 2, 1)), "time", x=x, groups=groups) is None
    assert found(seeded(AxialBlock(6, 2, 1)), "time", "space", x=x, groups=groups) == "space"
    assert found(seeded(AxialBlock(6, 2, 0)), "time", x=x, groups=groups) == "time"


def test_a_module_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6))
    module[1].eval()
    state = torch.get_rng_state()
    found(module, "time")
    assert [part.training for part in module.modules()] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), state)
    assert module[1].weight.grad is None


def test_what_cannot_run_on_one_row_is_told() -> None:
    with pytest.warns(UserWarning, match="cannot be run on one row of time"):
        assert found(Apply(lambda x: x + normal(2, 3, 4, 6)), "time") is None


def test_without_rows_there_is_nothing_to_find() -> None:
    assert found(Apply(lambda x: x - x.mean(1, keepdim=True)), "time", x=normal(2, 0, 4, 6)) is None
