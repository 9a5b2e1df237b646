"""Predictors learn what one process would, on any ranks, once for each clip; the model does not notice."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.diffusers.toys import normal, step
from tests.threads import ThreadComm, _Board
from tests.train.dsv import CONFIG, CUBES, GRID, PART, Masked, inputs, masks, method, model, on_ranks, sparse
from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.run.switch import all_gather
from weft.run.world import LocalComm, World
from weft.sparse.context import AttentionContext
from weft.sparse.pooling import sample_positions
from weft.train.attention_stats import AttentionStats
from weft.train.predictor import Predictor

BATCH, HEADS, HEAD = 2, 3, 12
PLACES = sample_positions(0, GRID.video, 13, 5)
ALONE = World(LocalComm())


def layouts(ranks: int) -> list[Layout]:
    """Text and video cut each for itself, as a model is; and one rank without a token."""
    text, video = Layout.even(GRID.prefix, ranks), Layout.even(GRID.video, ranks)
    runs = [
        (*mine, *((start + GRID.prefix, stop + GRID.prefix) for start, stop in rest))
        for mine, rest in zip(text.shards, video.shards, strict=True)
    ]
    counts = [0, *[b - a for shard in Layout.even(GRID.tokens, ranks - 1).shards for a, b in shard]]
    return [Layout(GRID.tokens, tuple(runs)), Layout.uneven(counts)]


def look(world: World, layout: Layout, part: Any = PART) -> AttentionStats:
    """At random queries and keys."""
    q, k = (2 * normal(BATCH, HEADS, GRID.tokens, HEAD, seed=seed) for seed in (3, 4))
    hidden = normal(BATCH, GRID.tokens, HEADS * HEAD, seed=5)
    rows = torch.from_numpy(layout.order(world.comm.rank))
    where = AttentionContext(
        layer=0, layers=2, step=0, steps=None, grid=GRID, heads=HEADS, layout=layout, world=world,
        hidden=hidden[:, rows],
    )  # fmt: skip
    predictor = None
    if part.method == "dsv":
        predictor = Predictor(part, heads=HEADS, width=HEADS * HEAD, seed=1).double()
        for weight in predictor.parameters():
            weight.data += normal(*weight.shape, seed=weight.dim()) / 4
    return AttentionStats(part, predictor, where, CUBES, PLACES, q=q[:, :, rows], k=k[:, :, rows])


def scores(one: AttentionStats) -> tuple[Tensor, Tensor]:
    """True and guessed [B, H, places, keys] of all tokens in the order of places, in the plainest way."""
    inverse = np.argsort(CUBES.place)
    q, k = (x[0].unflatten(0, (BATCH, HEADS))[:, :, inverse] for x in (one.q, one.k))
    true = q[:, :, PLACES] @ k.mT / HEAD**0.5
    predictor, (x_q, x_k) = one.predictor, one.inputs  # pyright: ignore
    low_q, low_k = (
        torch.einsum("bhsd,hdr->bhsr", x[:, :, inverse].expand(-1, HEADS, -1, -1), predictor.maps[side])
        + predictor.bias[side]
        for side, x in enumerate((x_q, x_k))
    )
    return true, low_q[:, :, PLACES] @ low_k.mT / low_q.shape[-1] ** 0.5


PLAIN = {
    "kl": lambda true, guess: F.kl_div(guess.log_softmax(-1), true.softmax(-1), reduction="none").sum(-1),
    "pearson": lambda true, guess: 1 - F.cosine_similarity(
        true - true.mean(-1, keepdim=True), guess - guess.mean(-1, keepdim=True), dim=-1
    ),
    "dsv": lambda true, guess: 0.95 * (1 - F.cosine_similarity(true, guess, dim=-1))
    + 0.05 * (F.normalize(true, dim=-1) - F.normalize(guess, dim=-1)).square().mean(-1),
}  # fmt: skip


@pytest.mark.parametrize("loss", PLAIN)
@pytest.mark.parametrize("source", ["qk", "hidden"])
def test_losses_and_gradients_are_those_of_one_process(loss: str, source: str) -> None:
    part = replace(PART, loss=loss, source=source)
    alone = look(ALONE, Layout.even(GRID.tokens, 1), part)
    expected = PLAIN[loss](*scores(alone)).mean()
    weights = list(alone.predictor.parameters())  # pyright: ignore
    grads = torch.autograd.grad(expected, weights)
    for ranks in (1, 2, 3):
        for layout in [Layout.even(GRID.tokens, 1)] if ranks == 1 else layouts(ranks):

            def job(world: World, layout: Layout = layout) -> Any:
                one = look(world, layout, part)
                return one.learn(), [weight.grad for weight in one.predictor.parameters()]  # pyright: ignore

            found = on_ranks(ranks, job)
            assert [told for told, _ in found] == pytest.approx([expected.item()] * ranks, rel=1e-10)
            for grad, *parts in zip(grads, *(own for _, own in found), strict=True):
                torch.testing.assert_close(sum(parts), grad, rtol=1e-9, atol=1e-11)


def test_hidden_states_of_other_tokens_are_refused() -> None:
    one = look(ALONE, Layout.even(GRID.tokens, 1), replace(PART, source="hidden"))
    where = replace(one.ctx, hidden=None, name="blocks.0.attn")
    with pytest.raises(InputError, match="blocks.0.attn attends from tokens that are not its first"):
        one.predictor.inputs(where, normal(1, 3, 4, 12), normal(1, 3, 4, 12))  # pyright: ignore


def learned(dsv: Any) -> list[Tensor]:
    """What was learned in one step: a tenth of the gradients."""
    dsv.step()
    return [dsv.optimizer.state[weight]["exp_avg"].clone() for weight in dsv.predictors.parameters()]


def alike(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * a.abs().max().item())


def test_the_model_does_not_notice() -> None:
    """Dense, while predictors learn and are profiled: bit for bit what it is without."""
    dsv = method(budgets=None)
    found, expected = step(sparse(ALONE, dsv), *inputs()), step(model(), *inputs())
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert all(weight.grad.abs().max() > 0 for weight in dsv.predictors.parameters())  # pyright: ignore
    before = [weight.detach().clone() for weight in dsv.predictors.parameters()]
    dsv.step()
    assert all((a != b).any() for a, b in zip(before, dsv.predictors.parameters(), strict=True))
    assert [fact["layer"] for fact in dsv.records] == [0, 1]


def test_facts_are_of_this_profile_and_tell_of_blocks_that_are_never_sparse() -> None:
    """Without the latter a log would not know how much of all attention is computed."""
    dsv = method(replace(PART, dense_blocks=(1,)))
    dsv.dispatcher.blocks[0].needed, dsv.dispatcher.blocks[0].coverage = np.full(HEADS, 0.5), 0.0
    sparse(ALONE, dsv)(*inputs())
    [[profile]] = dsv._profiles.values()
    dsv.step()
    first, second = dsv.records
    assert first["coverage"] == pytest.approx(profile.coverage)
    assert (second["layer"], second["mode"], second["density"]) == (1, "dense", [1.0] * HEADS)
    assert "coverage" not in second


def test_a_model_in_evaluation_teaches_nothing_and_keeps_nothing() -> None:
    dsv, world = method(), World(LocalComm())
    with torch.no_grad():
        sparse(world, dsv).eval()(*inputs())
    assert not dsv._masks and not dsv._losses and not dsv._profiles


def test_what_is_computed_again_is_learned_from_once() -> None:
    """Also if two forwards were before the backward, each of which had masks of its own."""

    def job(*, again: bool) -> Any:
        dsv = method()
        own = sparse(ALONE, dsv, again=again)
        loss = sum((own(*inputs(1, seed)) * normal(1, 3, 3, 10, 14, seed=9)).sum() for seed in (1, 2))
        grads = torch.autograd.grad(loss, list(own.parameters()))  # pyright: ignore
        assert [len(each) for each in (*dsv._losses.values(), *dsv._profiles.values())] == [2] * 4
        return grads, learned(dsv)

    (kept, low), (again, low_again) = job(again=False), job(again=True)
    for a, b in zip(kept, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    alike(low, low_again)


def clips(chosen: slice) -> tuple[Tensor, ...]:
    return tuple(x[chosen] for x in inputs(2))


def test_micro_batches_teach_what_one_batch_does() -> None:
    whole, parts = method(), method()
    sparse(ALONE, whole)(*clips(slice(0, 2)))
    own = sparse(ALONE, parts)
    for at in (0, 1):
        own(*clips(slice(at, at + 1)))
    alike(learned(whole), learned(parts))


class Threads:
    """torch.distributed as seen by ranks that are threads."""

    def __init__(self) -> None:
        self.mine = threading.local()

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return self.mine.world.comm.size

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(all_gather(x, mesh=self.mine.world).sum(0))


def test_ranks_with_other_clips_share_what_they_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of two ranks, each group with one clip, against both clips in one process."""
    alone = method()
    sparse(ALONE, alone)(*clips(slice(0, 2)))
    expected = learned(alone)
    threads, boards = Threads(), [_Board(2, 100.0), _Board(2, 100.0)]

    def job(world: World) -> Any:
        threads.mine.world, (group, rank), dsv = world, divmod(world.comm.rank, 2), method()
        sparse(World(ThreadComm(boards[group], rank)), dsv)(*clips(slice(group, group + 1)))
        return learned(dsv), dsv.records

    monkeypatch.setattr("weft.train.dsv.dist", threads)
    monkeypatch.setattr("weft.train.mesh.dist", threads)
    found = on_ranks(4, job)
    for low, facts in found:
        alike(expected, low)
        assert facts == found[0][1]
        for fact, other in zip(facts, alone.records, strict=True):
            assert fact["sparsity"] == pytest.approx(other["sparsity"])


@pytest.mark.parametrize("loss", PLAIN)
def test_a_predictor_finds_what_attention_looks_for(loss: str) -> None:
    """Scores that are in 4 of 12 dims: half of its numbers, but it has to find which."""
    part = replace(PART, loss=loss, rank=4, lr=2e-2)
    dsv = method(part, budgets=None)
    turn = torch.linalg.qr(normal(HEADS, HEAD, HEAD, seed=8))[0][:, :, :4]
    found: list[Any] = []
    for number in range(60):
        q, k = (
            2.5 * (normal(1, HEADS, GRID.tokens, 4, seed=2 * number + side) @ turn.mT).float()
            for side in (0, 1)
        )
        dsv.begin(number)
        where = AttentionContext(
            layer=0, layers=2, step=0, steps=None, grid=GRID, heads=HEADS, world=ALONE,
            layout=Layout.even(GRID.tokens, 1), run=number,
        )  # fmt: skip
        dsv.mask(where, q, k)
        dsv.step()
        found.append(dsv.records[0])
    assert found[0]["keys"] < 0.85
    assert found[-1]["keys"] > 0.95
    assert found[-1]["predictor"] < 0.2 * found[0]["predictor"]


def test_a_state_goes_on_where_it_was() -> None:
    def run(dsv: Any, steps: range) -> list[Tensor]:
        own = sparse(ALONE, dsv)
        for number in steps:
            dsv.begin(number)
            own(*inputs(1, number))
            dsv.step()
        return [weight.detach().clone() for weight in dsv.predictors.parameters()]

    part = replace(PART, budget="profile", mass=0.6)
    one, two = (method(part) for _ in range(2))
    for dsv in (one, two):
        del dsv.dispatcher.budgets
    run(one, range(1, 3))
    two.load_state_dict({**one.state_dict()})
    expected, found = run(one, range(3, 5)), run(two, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert one.records == two.records and one.records[0]["mode"] == "sparse"
    assert CONFIG.depth == len(one.records)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_half_precision_is_that_of_autocast() -> None:
    """Of linears: attention has all in float32 on a CPU, sparse or dense."""
    given = [x.float() if x.is_floating_point() else x for x in inputs()]
    dsv = method()
    with torch.autocast("cpu", torch.bfloat16):
        out = sparse(ALONE, dsv).float()(*given)
        with Masked(masks(dsv)):
            expected = model().float()(*given)
    assert (out - expected).abs().max() < 0.05 * expected.abs().max()
    assert all(weight.grad.isfinite().all() for weight in dsv.predictors.parameters())  # pyright: ignore
