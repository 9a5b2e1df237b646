"""Random numbers of ranks: those of one process with the seed of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.diffusers.toys import normal, on_ranks
from weft.core.errors import AgreementError, InputError
from weft.core.layout import Layout
from weft.hooks.rng import DROPOUT_FUNCTIONS, RANDOM_FUNCTIONS, broadcast_rng, sharded_dropout
from weft.run.spawn.pool import Pool
from weft.run.world import World, world_of

STREAMS = Layout(11, (((0, 2), (4, 7)), ((2, 3), (7, 9)), ((3, 4), (9, 11))))  # 4 of text, 7 of video


def draw(*generators: Generator) -> list[Tensor]:
    return [torch.randn(5, generator=generator) for generator in generators]


def seeded(*seeds: int) -> list[Generator]:
    return [Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("ranks", [1, 3])
def test_generators_that_were_passed_have_the_state_of_rank_0(ranks: int) -> None:
    def job(world: World | None) -> Any:
        rank = world.comm.rank if world else 0
        one, *many = seeded(40 + rank, 50 + rank, 60 - rank)
        draw(one)  # not only a seed: also how far it is
        if world:
            broadcast_rng(world, *(("a prompt",), {"generator": one, "more": {"generator": many}}))
        return draw(one, *many, one), [generator.get_state() for generator in (one, *many)]

    expected = job(None)
    for found in on_ranks(ranks, job):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def numbers_of_a_process(seed: int, together: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    world = world_of(None, 20.0)
    torch.manual_seed(seed + world.comm.rank)
    torch.randn(3)
    if together:
        broadcast_rng(world)
    return torch.randn(7), torch.get_rng_state()


def test_torchs_own_generator_is_that_of_rank_0(worlds: Callable[[int], Pool]) -> None:
    alone = worlds(3).run(numbers_of_a_process, 5, False)
    together = worlds(3).run(numbers_of_a_process, 5, True)
    assert not torch.equal(alone[0][0], alone[1][0])
    for found in together:
        torch.testing.assert_close(found, alone[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("prompt", ["a cat", "a dog"]),
        ("latents", [normal(2, 3), normal(2, 3, seed=5)]),
        ("latents", [normal(2, 3), normal(2, 3).float()]),
        ("image", [normal(4).numpy(), normal(4, seed=2).numpy()]),
        ("prompt", ["a cat " * 40, "a cat " * 40 + "!"]),
        ("generator", [None, Generator()]),
    ],
)
def test_arguments_that_differ_are_told(name: str, values: list[Any]) -> None:
    with pytest.raises(AgreementError, match=f"rank 2 has {name}|rank 2 has generators"):
        on_ranks(3, lambda world: broadcast_rng(world, *((1,), {name: values[world.comm.rank == 2]})))


def test_devices_and_functions_may_differ() -> None:
    def job(world: World) -> None:
        broadcast_rng(
            world, ((), {"device": f"cuda:{world.comm.rank}", "callback": lambda: None, "steps": None})
        )

    on_ranks(2, job)


def whole_dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = F.dropout(x, p, training=True)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return out.detach(), grad, torch.get_rng_state()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "layout", [STREAMS, Layout.even(11, 12), Layout.zigzag(11, 2), Layout.replicated(11, 2)]
)
def test_dropout_is_that_of_the_whole_bit_by_bit(layout: Layout, dtype: torch.dtype, p: float) -> None:
    x = normal(2, 11, 3, dtype=dtype)
    out, grad, after = whole_dropout(x, p)
    for rank in range(layout.ranks):
        rows = torch.from_numpy(layout.order(rank))
        torch.manual_seed(3)
        mine = x[:, rows].requires_grad_()
        found = sharded_dropout(mine, p, True, dim=1, layout=layout, rank=rank)
        assert torch.equal(found, out[:, rows])
        (found_grad,) = torch.autograd.grad(found, mine, torch.ones_like(found))
        assert torch.equal(found_grad, grad[:, rows])
        assert torch.equal(torch.get_rng_state(), after)


def test_dropout_of_a_tensor_that_lies_otherwise_in_memory() -> None:
    x = normal(2, 11, 3, 5).permute(0, 3, 1, 2)  # [B, C, S, D] of a tensor [B, S, D, C]
    out, _, _ = whole_dropout(x, 0.5)
    rows = torch.from_numpy(STREAMS.order(1))
    mine = x.permute(0, 2, 3, 1)[:, rows].permute(0, 3, 1, 2)
    torch.manual_seed(3)
    assert torch.equal(sharded_dropout(mine, 0.5, True, dim=2, layout=STREAMS, rank=1), out[:, :, rows])
    torch.manual_seed(3)
    assert torch.equal(sharded_dropout(mine, 0.5, True, dim=-2, layout=STREAMS, rank=1), out[:, :, rows])


def test_dropout_in_a_checkpoint_draws_the_same_again() -> None:
    rows = torch.from_numpy(STREAMS.order(2))

    def block(x: Tensor) -> Tensor:
        return sharded_dropout(x.sin(), 0.4, True, dim=0, layout=STREAMS, rank=2).cos()

    def step(again: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
        torch.manual_seed(9)
        x = normal(11, 3)[rows].requires_grad_()
        out = checkpoint(block, x, use_reentrant=False) if again else block(x)
        torch.randn(100)  # what came between forward and backward
        return out.detach(), torch.autograd.grad(out.sum(), x)[0]

    for found, expected in zip(step(True), step(False), strict=True):
        assert torch.equal(found, expected)


def test_no_dropout_draws_nothing() -> None:
    before = torch.get_rng_state()
    x = normal(5, 3)
    assert sharded_dropout(x, 0.5, False, dim=0, layout=STREAMS, rank=0) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_of_other_rows_than_the_rank_has() -> None:
    with pytest.raises(InputError, match="on rank 0 must have 5 rows, .* got 4"):
        sharded_dropout(normal(4, 3), 0.5, True, dim=0, layout=STREAMS, rank=0)


def test_every_public_function_that_draws_is_known() -> None:
    """torch tags operations that draw; attention does so for its dropout only, which regions see."""
    known, tagged = RANDOM_FUNCTIONS | DROPOUT_FUNCTIONS | {F.scaled_dot_product_attention}, set[str]()
    for name in torch._C._dispatch_get_all_op_names():
        room, _, rest = name.partition("::")
        op, _, overload = rest.partition(".")
        if room == "aten" and not op.startswith("_"):
            found = getattr(getattr(torch.ops.aten, op), overload or "default")
            tagged |= {op} if torch.Tag.nondeterministic_seeded in found.tags else set()
    assert len(tagged) > 30
    functions = [getattr(home, op, None) for op in tagged for home in (torch, Tensor, F)]
    unknown = {function for function in functions if callable(function)} - known
    assert {function.__name__ for function in unknown} <= {"miopen_rnn"}  # only of AMD's recurrent layers


class Refuse(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RANDOM_FUNCTIONS:
            raise InputError("random")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "draws",
    [
        lambda x: torch.randn_like(x),
        lambda x: torch.bernoulli(x),
        lambda x: x.bernoulli_(0.5),
        lambda x: x.normal_(),
        lambda x: torch.rand(x.shape),
        lambda x: torch.randperm(x.numel()),
        lambda x: F.alpha_dropout(x, 0.5, True),
        lambda x: torch.nn.Dropout2d()(x),
        lambda x: F.gumbel_softmax(x),
        lambda x: torch.normal(0.0, x),
    ],
)
def test_a_mode_sees_what_is_to_be_refused(draws: Callable[[Tensor], Any]) -> None:
    with Refuse(), pytest.raises(InputError, match="random"):
        draws(torch.full((2, 3, 4), 0.5))


def test_a_mode_sees_dropout() -> None:
    seen: list[Any] = []

    class See(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with See():
        torch.nn.Dropout()(torch.ones(2))
        torch.dropout(torch.ones(2), 0.5, True)
    assert sum(func in DROPOUT_FUNCTIONS for func in seen) == 2
