"""Switch, split, gather and keep with threads as ranks, against one process, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import weft
from tests.threads import run_threads
from weft.core.errors import AgreementError, InputError, WeftError
from weft.core.indices import split_evenly
from weft.core.layout import Layout
from weft.core.problem import Switch
from weft.run.world import World
from weft.schedule.measure import measure
from weft.schedule.reverse import reverse
from weft.schedule.switch import switch

SIZES = st.integers(1, 7)
NAMES = ("batch", "time", "space", "channel")


@pytest.fixture(scope="module", autouse=True)
def one_thread_a_rank() -> Iterator[None]:
    """Ranks that each have threads of their own would wait for each other's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def grid(*sizes: int) -> dict[str, int]:
    return dict(zip(NAMES, sizes, strict=True))


def whole(dims: dict[str, int], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(dims.values()), generator=random, dtype=torch.float64).to(dtype)


def part(x: Tensor, dims: dict[str, int], name: str, rank: int, ranks: int) -> Tensor:
    start, stop = split_evenly(dims[name], ranks)[rank]
    return x.narrow(list(dims).index(name), start, stop - start)


def on_ranks(ranks: int, job: Callable[[World], Any], timeout: float = 20.0) -> list[Any]:
    return run_threads(ranks, lambda comm: job(World(comm)), timeout=timeout)


@settings(max_examples=120)
@given(sizes=st.tuples(SIZES, SIZES, SIZES, SIZES), ranks=st.integers(1, 5), pair=st.permutations(NAMES))
def test_any_dim_switches_to_any_other_and_its_gradient_back(
    sizes: tuple[int, ...], ranks: int, pair: list[str]
) -> None:
    dims, (source, target) = grid(*sizes), pair[:2]
    x, slope = whole(dims), whole(dims, 1)

    def job(world: World) -> tuple[Tensor, Tensor]:
        rank = world.comm.rank
        mine = part(x, dims, source, rank, ranks).clone().requires_grad_()
        out = weft.switch(mine, source, target, dims=dims, mesh=world)
        return out, torch.autograd.grad(out, mine, part(slope, dims, target, rank, ranks))[0]

    for rank, (out, grad) in enumerate(on_ranks(ranks, job)):
        assert torch.equal(out, part(x, dims, target, rank, ranks))
        assert torch.equal(grad, part(slope, dims, source, rank, ranks))


@settings(max_examples=60)
@given(sizes=st.tuples(SIZES, SIZES, SIZES, SIZES), ranks=st.integers(1, 5), name=st.sampled_from(NAMES))
def test_split_and_gather_are_adjoint_to_what_they_do(sizes: tuple[int, ...], ranks: int, name: str) -> None:
    """⟨y, A x⟩ = ⟨Aᵀ y, x⟩, summed over the ranks, each of which has a loss of its own."""
    dims = grid(*sizes)
    x = whole(dims)

    def job(world: World) -> tuple[Tensor, ...]:
        rank = world.comm.rank
        mine = x.clone().requires_grad_()
        shard = weft.split(mine, name, dims=dims, mesh=world)
        back = weft.gather(shard, name, dims=dims, mesh=world)
        slope = whole(dims, rank + 1)
        at_shard, at_whole = torch.autograd.grad(back, (shard, mine), slope)
        return shard, back, at_shard, at_whole

    answers = on_ranks(ranks, job)
    total = torch.stack([whole(dims, rank + 1) for rank in range(ranks)]).sum(0)
    for rank, (shard, back, at_shard, _) in enumerate(answers):
        assert torch.equal(shard, part(x, dims, name, rank, ranks))
        assert torch.equal(back, x)
        assert torch.allclose(at_shard, part(total, dims, name, rank, ranks), atol=1e-12)
    # A replicated input's gradient is partial on each rank, as a replicated parameter's.
    assert torch.allclose(torch.stack([at for *_, at in answers]).sum(0), total, atol=1e-12)


def mixer(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """Mixes one dim of [B, T, S, C] and nothing else."""
    y = x.transpose(dim, -2) @ weight
    return (y + torch.softmax(y @ y.transpose(-1, -2), -1) @ y).transpose(dim, -2)


@pytest.mark.parametrize("loss", ["of shards", "of the whole"])
@pytest.mark.parametrize(("ranks", "sizes"), [(2, (2, 5, 7, 3)), (3, (1, 1, 11, 2)), (4, (2, 3, 13, 4))])
def test_parameter_gradients_sum_to_those_of_one_process(
    ranks: int, sizes: tuple[int, ...], loss: str
) -> None:
    """A loss of shards sums over the ranks; a loss that all ranks compute alike counts N times."""
    dims = grid(*sizes)
    x, goal = whole(dims), whole(dims, 5)
    random = torch.Generator().manual_seed(3)
    C = sizes[-1]
    start = [torch.randn(C, C, generator=random, dtype=torch.float64) / C for _ in range(4)]

    def run(weights: list[Tensor], world: World | None) -> Tensor:
        before, spatial, temporal, after = weights
        y = x @ before
        if world is None:
            return (mixer(mixer(y, spatial, 2), temporal, 1) @ after - goal).square().sum()
        y = weft.split(y, "time", dims=dims, mesh=world)
        y = mixer(y, spatial, 2)
        y = weft.switch(y, "time", "space", dims=dims, mesh=world)
        y = mixer(y, temporal, 1)
        if loss == "of shards":
            return (y @ after - part(goal, dims, "space", world.comm.rank, ranks)).square().sum()
        y = weft.gather(y, "space", dims=dims, mesh=world)
        return (y @ after - goal).square().sum()

    def gradients(world: World | None) -> list[Tensor]:
        weights = [w.clone().requires_grad_() for w in start]
        return list(torch.autograd.grad(run(weights, world), weights))

    expected = gradients(None)
    by_rank = on_ranks(ranks, gradients)
    for found, wanted in zip(zip(*by_rank, strict=True), expected, strict=True):
        total = torch.stack(found).sum(0) / (ranks if loss == "of the whole" else 1)
        assert (total - wanted).abs().max() < 1e-10 * wanted.abs().max()


def test_a_gradient_of_a_gradient_is_switched_too() -> None:
    dims = grid(1, 3, 4, 2)
    x = whole(dims)

    def job(world: World) -> Tensor:
        mine = part(x, dims, "time", world.comm.rank, 2).clone().requires_grad_()
        out = weft.switch(mine, "time", "space", dims=dims, mesh=world)
        (grad,) = torch.autograd.grad((out**3).sum(), mine, create_graph=True)
        return torch.autograd.grad((grad**2).sum(), mine)[0]

    for rank, found in enumerate(on_ranks(2, job)):
        assert torch.allclose(found, part(36 * x**3, dims, "time", rank, 2))


def test_an_asynchronous_switch_is_the_same_and_lets_others_pass() -> None:
    dims = grid(2, 5, 6, 3)
    x, slope = whole(dims), whole(dims, 1)

    def job(world: World) -> tuple[Tensor, ...]:
        rank = world.comm.rank
        mine = part(x, dims, "time", rank, 3).clone().requires_grad_()
        first = weft.switch(mine, "time", "space", dims=dims, mesh=world, async_op=True)
        second = weft.switch(2 * mine, "time", "space", dims=dims, mesh=world, async_op=True)
        third = weft.switch(3 * mine, "time", "space", dims=dims, mesh=world)
        outs = first.wait(), second.wait(), third
        assert first.wait() is outs[0]
        mine_slope = part(slope, dims, "space", rank, 3)
        return *outs, torch.autograd.grad(sum(outs), mine, mine_slope)[0]

    for rank, (*outs, grad) in enumerate(on_ranks(3, job)):
        for times, out in enumerate(outs, 1):
            assert torch.equal(out, times * part(x, dims, "space", rank, 3))
        assert torch.allclose(grad, 6 * part(slope, dims, "time", rank, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_rank_sends_what_the_schedule_says(dtype: torch.dtype) -> None:
    dims, ranks = grid(2, 5, 7, 3), 3
    x = whole(dims, dtype=dtype)

    def job(world: World) -> list[int]:
        mine = part(x, dims, "time", world.comm.rank, ranks).clone().requires_grad_()
        sent = [world.comm.bytes_sent]
        out = weft.switch(mine, "time", "space", dims=dims, mesh=world)
        sent.append(world.comm.bytes_sent)
        everything = weft.gather(out, "space", dims=dims, mesh=world)
        sent.append(world.comm.bytes_sent)
        everything.sum().backward()
        sent.append(world.comm.bytes_sent)
        assert everything.dtype == mine.grad.dtype == dtype
        assert (mine.grad == ranks).all()
        return [b - a for a, b in zip(sent, sent[1:], strict=False)]

    name = str(dtype).removeprefix("torch.")
    time, space = Layout.even(5, ranks), Layout.even(7, ranks)
    one = switch(Switch.of(time, space, width=6, dtype=name))
    two = switch(Switch.of(space, width=30, dtype=name))
    told = [measure(s) for s in (one, two, reverse(two), reverse(one))]
    for rank, found in enumerate(on_ranks(ranks, job)):
        forward, gathered, back, again = (report.sent(rank) for report in told)
        assert found == [forward, gathered, back + again]


def test_16_bit_gradients_of_many_copies_are_added_in_32_bits() -> None:
    dims = {"time": 1, "channel": 1}

    def job(world: World) -> Tensor:
        mine = weft.split(torch.ones(1, 1, dtype=torch.bfloat16), "time", dims=dims, mesh=world)
        mine.requires_grad_()
        slope = torch.full((1, 1), 1.0 if world.comm.rank else 256.0, dtype=torch.bfloat16)
        weft.gather(mine, "time", dims=dims, mesh=world).backward(slope)
        return mine.grad

    # In bfloat16 256 + 1 is 256; four times over it would still be.
    assert on_ranks(5, job)[0].item() == 260


def test_no_copy_is_made_of_what_lies_in_one_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """[time, space]: leaving by rows and coming by rows need none; the columns on the other side do."""
    dims = {"time": 4, "space": 6}
    x = torch.randn(4, 6, dtype=torch.float64)

    def job(world: World) -> tuple[list[int], Tensor]:
        lent: list[int] = []
        post = world.comm.post

        def spy(sends: Any, receives: Any, label: str, tag: int) -> Any:
            lent.extend(int(buffer.data_ptr() == mine.data_ptr()) for _, buffer in sends)
            return post(sends, receives, label, tag)

        monkeypatch.setattr(world.comm, "post", spy)
        mine = part(x, dims, "space", world.comm.rank, 2).clone()
        return lent, weft.switch(mine, "space", "time", dims=dims, mesh=world)

    for rank, (lent, out) in enumerate(on_ranks(2, job)):
        assert torch.equal(out, part(x, dims, "time", rank, 2))
        assert lent == [rank], "rank 1 sends its first rows from where they lie; rank 0 its last"


def test_what_ran_in_inference_mode_may_be_trained_next() -> None:
    dims = grid(2, 3, 5, 4)
    x = whole(dims)

    def job(world: World) -> Tensor:
        mine = part(x, dims, "time", world.comm.rank, 2).clone()
        with torch.inference_mode():
            weft.switch(mine, "time", "space", dims=dims, mesh=world)
        out = weft.switch(mine.requires_grad_(), "time", "space", dims=dims, mesh=world)
        return torch.autograd.grad(out.square().sum() / 2, mine)[0]

    for rank, grad in enumerate(on_ranks(2, job)):
        assert torch.equal(grad, part(x, dims, "time", rank, 2))


def test_strides_do_not_matter() -> None:
    dims = grid(2, 3, 5, 4)
    x = whole(dims)

    def job(world: World) -> Tensor:
        mine = part(x, dims, "time", world.comm.rank, 2)
        flipped = mine.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        assert not flipped.is_contiguous()
        return weft.switch(flipped, "time", "space", dims=dims, mesh=world)

    for rank, out in enumerate(on_ranks(2, job)):
        assert torch.equal(out, part(x, dims, "space", rank, 2))


def test_an_empty_shard_of_another_axis_is_passed_on() -> None:
    def job(world: World) -> tuple[int, ...]:
        rows = split_evenly(5, 3)[world.comm.rank]
        x = torch.empty(0, rows[1] - rows[0], 7)
        world.comm.post = None  # pyright: ignore - nobody has anything to send
        out = weft.switch(x, "time", "space", dims={"h": None, "time": 5, "space": 7}, mesh=world)
        return tuple(out.shape)

    assert on_ranks(3, job) == [(0, 5, 3), (0, 5, 2), (0, 5, 2)]


def test_one_process_is_a_world_of_one() -> None:
    x = torch.randn(2, 3, 4, 5)
    dims = grid(2, 3, 4, 5)
    out = weft.gather(
        weft.switch(weft.split(x, "time", dims=dims), "time", "space", dims=dims), "space", dims=dims
    )
    assert torch.equal(out, x)
    assert weft.assert_sharded(x, "time", dims=dims) is x


DIMS = grid(2, 5, 7, 3)
MISTAKES: dict[str, tuple[Callable[[Tensor, World], Any], str]] = {
    "unknown source": (lambda x, w: weft.switch(x, "tim", "space", dims=DIMS, mesh=w), "no dim 'tim'"),
    "unknown target": (lambda x, w: weft.switch(x, "time", "spice", dims=DIMS, mesh=w), "no dim 'spice'"),
    "same dim": (lambda x, w: weft.switch(x, "time", "time", dims=DIMS, mesh=w), "by time already"),
    "other sharding": (
        lambda x, w: weft.switch(x, "space", "time", dims=DIMS, mesh=w, stage="blocks.3"),
        "blocks.3: on rank . of 2 x has",
    ),
    "size unknown": (
        lambda x, w: weft.switch(x, "time", "space", dims={**DIMS, "time": None}, mesh=w),
        "size of the sharded dim 'time' is None",
    ),
    "other batch": (lambda x, w: weft.switch(x, "time", "space", dims={**DIMS, "batch": 3}, mesh=w), "batch"),
    "dims missing": (lambda x, w: weft.switch(x, "time", "space", dims={"time": 5}, mesh=w), "names 1"),
    "integers": (lambda x, w: weft.switch(x.int(), "time", "space", dims=DIMS, mesh=w), "x is torch.int32"),
    "gather": (lambda x, w: weft.gather(x, "space", dims=DIMS, mesh=w), "gather space: on rank"),
    "split": (lambda x, w: weft.split(x, "space", dims=DIMS, mesh=w), "x must be whole"),
    "assert_sharded": (
        lambda x, w: weft.assert_sharded(x, "space", dims=DIMS, mesh=w),
        "assert_sharded space: on rank",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_raises_and_says_where(mistake: str) -> None:
    call, said = MISTAKES[mistake]
    with pytest.raises(InputError, match=said):
        on_ranks(2, lambda w: call(part(whole(DIMS), DIMS, "time", w.comm.rank, 2), w), timeout=2.0)


@pytest.mark.parametrize("what", ["batch", "dtype", "dim", "shape"])
def test_ranks_that_differ_all_raise_and_name_the_stage(what: str) -> None:
    def job(world: World) -> str:
        rank = world.comm.rank
        x = part(whole(DIMS), DIMS, "time", rank, 3)
        dims: dict[str, int | None] = {**DIMS, "batch": None}
        target = "space"
        if rank == 1:
            if what == "batch":
                x = x[:1]
            elif what == "dtype":
                x = x.float()
            elif what == "dim":
                target = "channel"
            else:
                x = x[:, :1]
        with pytest.raises(WeftError) as caught:
            weft.switch(x, "time", target, dims=dims, mesh=world, stage="blocks.7.temporal")
        assert isinstance(caught.value, AgreementError) or rank == 1
        return str(caught.value)

    for said in on_ranks(3, job, timeout=5.0):
        assert "blocks.7.temporal" in said
        assert "ank 1" in said
