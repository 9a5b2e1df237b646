"""Dropout in and between stages draws the numbers of one process, for outputs and for gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import weft
from tests.diffusers.toys import normal, seeded
from weft.core.errors import InputError
from weft.run.spawn.pool import Pool
from weft.run.world import LocalComm, World
from weft.switching.activation import ShardedActivation
from weft.switching.dropout_mode import DropoutMode
from weft.switching.stages import Mixes

WIDTH = 6


class Stage(nn.Module):
    """Attention over one dim of [B, T, S, C], and dropout of all sorts of tensors."""

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.dim, self.kind = dim, kind
        self.qkv, self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(self.dim, 2).flatten(0, 1)  # [(B T), S, C] or [(B S), T, C]
        q, k, v = self.qkv(rows).chunk(3, -1)
        scores = (q @ k.mT).softmax(-1)
        if self.kind == "scores":
            scores = self.drop(scores)
        out = scores @ v
        if self.kind == "rows":
            out = self.drop(out)
        y = x + out.unflatten(0, (x.shape[0], -1)).transpose(self.dim, 2)
        if self.kind == "strided":
            y = self.drop(y.transpose(1, 2)).transpose(1, 2)
        hidden = self.up(y).relu()
        if self.kind == "wider":
            hidden = self.drop(hidden)
        if self.kind == "function":
            hidden = F.dropout(hidden, 0.3, training=self.training)
        if self.kind == "path" and self.training:  # one number a sample: no tokens
            y = y * y.new_empty(len(y), 1, 1, 1).bernoulli_(0.5)
        return y + self.down(hidden)


class Model(nn.Module):
    def __init__(self, kind: str, *, again: bool = False) -> None:
        super().__init__()
        self.kind, self.again = kind, again
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"spatial": Stage(2, kind), "temporal": Stage(1, kind), "between": nn.Dropout(0.25)}
            )
            for _ in range(2)
        )
        self.first = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.blocks:
            for part in ("spatial", "between", "temporal"):
                if part != "between" or self.kind == "between":
                    x = checkpoint(layer[part], x, use_reentrant=False) if self.again else layer[part](x)  # pyright: ignore
        return x


TURNS = {"blocks.*.spatial": "space", "blocks.*.temporal": "time"}
KINDS = ("wider", "rows", "scores", "strided", "between", "function", "path")


def step(kind: str, size: tuple[int, ...], again: bool, how: dict[str, Any] | None) -> list[Tensor]:  # noqa: FBT001
    """Output and gradients of two steps; ranks have seeds of their own, but for the first."""
    model = seeded(Model(kind, again=again)).train()
    mesh = None
    if how is not None:
        rank = torch.distributed.get_rank()
        torch.manual_seed(3 + rank)
        if "axes" in how:
            mesh = init_device_mesh("cpu", how["axes"], mesh_dim_names=("a", "b"))
        weft.stages(model, TURNS, dims="batch time space channel", shard=how.get("shard", ""), mesh=mesh)
    else:
        torch.manual_seed(3)
    found: list[Tensor] = []
    for seed in (1, 2):
        out = model(normal(*size, WIDTH, seed=seed))
        loss = (out * normal(*out.shape, seed=7)).sum()
        found += [out.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]
    return [torch.zeros(0) if each is None else each for each in found]


def compare(answers: list[list[Tensor]], expected: list[Tensor]) -> None:
    for at, want in enumerate(expected):
        is_output = at % (len(expected) // 2) == 0
        found = [answer[at] for answer in answers]
        for each in found if is_output else [torch.stack(found).mean(0)]:
            torch.testing.assert_close(each, want, rtol=1e-9, atol=1e-9)


CASES = [(2, kind, kind in ("rows", "between")) for kind in KINDS] + [
    (3, "strided", True),
    (3, "scores", False),
]


@pytest.mark.parametrize(
    ("ranks", "kind", "again"),
    [
        pytest.param(*case, marks=[] if case in CASES else [pytest.mark.soak])
        for case in product((2, 3), KINDS, (False, True))
    ],
)
def test_dropout_draws_the_numbers_of_one_process(
    worlds: Callable[[int], Pool],
    ranks: int,
    kind: str,
    again: bool,  # noqa: FBT001
) -> None:
    """Sizes that do not divide; blocks that are computed again for their gradients."""
    size = (2, 5, 7)
    compare(worlds(ranks).run(step, kind, size, again, {}), step(kind, size, again, None))


def test_dropout_where_two_dims_or_the_batch_are_sharded(worlds: Callable[[int], Pool]) -> None:
    size = (4, 5, 7)
    for how in ({"axes": (2, 2), "shard": "batch time space"}, {"shard": "batch time space"}):
        compare(worlds(4).run(step, "wider", size, False, how), step("wider", size, False, None))


class Noisy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([nn.Identity(), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = DRAWS[self.kind](x)
        return self.blocks[1](x)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: x + torch.randn_like(x),
    "feature": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "folded": lambda x: F.dropout(x.transpose(1, 2).flatten(0, 1), 0.5).view_as(x),
}


def draw(kind: str) -> str:
    model = Noisy(kind).train()
    handle = weft.stages(model, {"blocks.*": "space"}, dims="batch time space channel")
    handle._runs = 2  # the third forward is not rehearsed
    try:
        model(normal(2, 4, 2, 8))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("noise", "randn_like draws random numbers for the shard [2, 2, 2, 8]"),
        ("feature", "alpha_dropout draws random numbers for the shard"),
        ("attention", "scaled_dot_product_attention with dropout draws"),
        ("folded", "Dropout of a tensor of shape [4, 2, 8]: weft cannot locate time in it"),
    ],
)
def test_other_draws_are_refused(worlds: Callable[[int], Pool], kind: str, words: str) -> None:
    """Also where the rehearsal of the model has let them pass."""
    for message in worlds(2).run(draw, kind):
        assert words in message


@pytest.mark.parametrize(
    ("shape", "groups", "way"),
    [
        ((2, 3, 5, 99), "", (("b",), ("t",), ("s",), ())),
        ((6, 5, 8), "", (("b", "t"), ("s",), ("c",))),
        ((10, 3, 4), "", (("b", "s"), ("t",), ())),
        ((6, 4, 5, 5), "", (("b", "t"), (), ("s",), ())),
        ((10, 3, 8), "(b s) t c", (("b", "s"), ("t",), ("c",))),
        ((9, 9), "", None),
    ],
)
def test_dims_are_read_off_sizes(shape: tuple[int, ...], groups: str, way: Any) -> None:
    """Two orders of b and s differ only where there is more than one sharded dim between them."""
    activation = ShardedActivation(["b", "t", "s", "c"], (World(LocalComm()),))
    activation.sizes, activation.placement = {"b": 2, "t": 3, "s": 5, "c": 8}, ("t",)
    draws = DropoutMode(activation)
    if groups:
        draws.groups = (("b", "s"), ("t",), ("c",))
    if way is None:
        with pytest.raises(InputError, match="cannot locate t in it"):
            draws._agree(torch.zeros(shape))
    else:
        found = draws._agree(torch.zeros(shape))
        assert [sorted(dims) for dims in found if "t" in dims] == [
            sorted(dims) for dims in way if "t" in dims
        ]


def test_a_stage_with_its_dims_in_another_order_has_dropout_too(worlds: Callable[[int], Pool]) -> None:
    for found in worlds(2).run(folded, True):
        torch.testing.assert_close(found, folded(False))


def folded(sharded: bool) -> Tensor:  # noqa: FBT001
    model = nn.Sequential(nn.Sequential(nn.Dropout(0.5)), nn.Sequential(nn.Dropout(0.5)))
    torch.manual_seed(5)
    if sharded:
        torch.manual_seed(5 + torch.distributed.get_rank())
        mixes = Mixes("time", dims="(batch space) time channel")
        weft.stages(model, {"0": mixes, "1": mixes}, dims="batch time space channel").sizes["space"] = 3
    return model(normal(6, 4, 5))
