"""Which tiles are selected, what a profile says of them, and the coarse branch, against the plainest code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import weft
from tests.diffusers.toys import check, normal, seeded, step
from tests.train.dsv import BUDGETS, CUBES, GRID, PART, inputs, masks, method, model, on_ranks, sparse
from tests.train.test_dsv_learning import ALONE, BATCH, HEAD, HEADS, PLACES, layouts, look, scores
from weft.core.layout import Layout
from weft.masks.grid import TokenGrid
from weft.run.world import World
from weft.sparse.context import AttentionContext
from weft.sparse.pooling import owned_tokens
from weft.train import coarse
from weft.train.attention_stats import AttentionStats
from weft.train.cubes import Cubes

KINDS = {
    "mean": PART,
    "center": replace(PART, proxy="center"),
    "hidden": replace(PART, source="hidden"),
    "pooled": replace(PART, method="pooled"),
    "window": replace(PART, method="window"),
}
BLOCK = CUBES.block


def test_whole_cubes_are_blocks_wherever_the_text_is() -> None:
    for grid in (GRID, TokenGrid(3, 5, 7, suffix=8), TokenGrid(3, 5, 7, prefix=3, suffix=5)):
        cubes = Cubes(grid, (2, 2, 2), None)
        assert sorted(cubes.place) == list(range(grid.tokens))
        video = cubes.place[grid.prefix : grid.prefix + grid.video]
        of = {at: set[int]() for at in np.ndindex(2, 3, 4)}
        for place, at in zip(video, np.ndindex(*grid.extent), strict=True):
            of[tuple(np.array(at) // 2)].add(int(place) // BLOCK)
        assert all(len(of[at]) == 1 for at in np.ndindex(1, 2, 3))
        assert len({next(iter(of[at])) for at in np.ndindex(1, 2, 3)}) == 6
        assert sorted(cubes.place[: grid.prefix]) + sorted(cubes.place[grid.prefix + grid.video :]) == list(
            range(grid.video, grid.tokens)
        )


def blocks_of(x: Tensor) -> list[Tensor]:
    """Of places in the last but one dim."""
    return list(x.split(BLOCK, -2))


def plain_scores(kind: str, one: AttentionStats) -> Tensor:
    """[B, H, rows, columns]"""
    inverse = np.argsort(CUBES.place)
    if kind == "window":
        at = np.array(list(np.ndindex(*GRID.extent)))[inverse[: GRID.video] - GRID.prefix]
        middle = [at[i * BLOCK : (i + 1) * BLOCK] for i in range(CUBES.rows)]
        centres = np.array([each.mean(0) if len(each) else (1, 2, 3) for each in middle])
        apart = ((centres[:, None] - centres[None]) ** 2).sum(-1)
        return -torch.from_numpy(apart).expand(BATCH, HEADS, -1, -1)
    if kind == "pooled":
        q, k = (x[0].unflatten(0, (BATCH, HEADS))[:, :, inverse] for x in (one.q, one.k))
        q, k = (torch.stack([each.mean(-2) for each in blocks_of(x)], -2) for x in (q, k))
        return q @ k.mT
    predictor, given = one.predictor, one.inputs
    low_q, low_k = (predictor(x[:, :, inverse], side) for side, x in enumerate(given))  # pyright: ignore
    if kind == "center":  # of the cube, or of what there is of it
        at = [
            i * BLOCK + 7 if (i + 1) * BLOCK <= GRID.tokens else (i * BLOCK + GRID.tokens) // 2
            for i in range(15)
        ]
        queries = low_q[:, :, at]
    else:
        queries = torch.stack([each.mean(-2) for each in blocks_of(low_q)], -2)
    found = queries @ low_k.mT * 6**-0.5
    return torch.stack([each.exp().sum(-1).log() for each in found.split(BLOCK, -1)], -1)


def kept() -> Tensor:
    """[rows, columns]: text and what is beside it in a block, and the diagonal."""
    found = torch.eye(CUBES.rows, dtype=torch.bool)
    found[GRID.video // BLOCK :] = True
    found[:, GRID.video // BLOCK :] = True
    return found


def order(kind: str, one: AttentionStats) -> Tensor:
    """Of blocks, the kept first."""
    return plain_scores(kind, one).masked_fill(kept(), torch.inf).sort(descending=True, stable=True)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_tiles_are_selected_on_any_ranks(kind: str) -> None:
    best = order(kind, look(ALONE, Layout.even(GRID.tokens, 1), KINDS[kind]))
    expected = torch.zeros(BATCH, HEADS, CUBES.rows, CUBES.cols, dtype=torch.bool)
    for b, h, row in np.ndindex(BATCH, HEADS, CUBES.rows):
        expected[b, h, row, best[b, h, row, : int(np.ceil(BUDGETS[h] * CUBES.cols))]] = True
    expected |= kept()
    for ranks in (1, 2, 3):
        for layout in [Layout.even(GRID.tokens, 1)] if ranks == 1 else layouts(ranks):

            def job(world: World, layout: Layout = layout) -> Any:
                return look(world, layout, KINDS[kind]).select(BUDGETS)

            for mask in on_ranks(ranks, job):
                assert np.array_equal(mask.tiles, expected.flatten(0, 1).numpy())


def plain_profile(kind: str, one: AttentionStats, budgets: Any, mass: float) -> dict[str, Any]:
    """One query at a time."""
    weights, best, guess = one._scores[0].softmax(-1), order(kind, one).flatten(0, 1), None
    weights = weights[:, :, np.argsort(CUBES.place)]
    if one.predictor is not None:
        true, guess = scores(one)
        weights, guess = true.softmax(-1).flatten(0, 1), guess.flatten(0, 1)
    found: dict[str, list[Any]] = {"needed": [], "sparsity": [], "selected": [], "ideal": [], "keys": []}
    for head in range(HEADS):
        selected, ideal, shares, keys = [], [], [], []
        for sample, (at, place) in [(b, each) for b in range(BATCH) for each in enumerate(PLACES)]:
            row = weights[sample * HEADS + head, at]
            blocks = torch.stack([each.sum() for each in row.split(BLOCK)])
            selected.append(blocks[best[sample * HEADS + head, place // BLOCK]].cumsum(0))
            ideal.append(blocks.sort(descending=True)[0].cumsum(0))
            falling = row if guess is None else guess[sample * HEADS + head, at]
            count = int((row.sort(descending=True)[0].cumsum(0) < mass).sum()) + 1
            keys.append(row[falling.argsort(descending=True)[:count]].sum())
            shares.append(count / GRID.tokens)
        curve, above = (torch.stack(each).mean(0) for each in (selected, ideal))
        count = int((curve < mass).sum()) + 1
        found["needed"].append(count / CUBES.cols)
        found["sparsity"].append(1 - np.mean(shares))
        at = count if budgets is None else int(np.ceil(budgets[head] * CUBES.cols))
        found["selected"].append(curve[at - 1])
        found["ideal"].append(above[at - 1])
        found["keys"].append(torch.stack(keys).mean())
    told = {name: np.array(values) for name, values in found.items()}
    selected, ideal = told.pop("selected"), told.pop("ideal")
    # Heads that keep everything tell nothing of a choice.
    chosen = [budgets is None or budgets[head] < 1 for head in range(HEADS)]
    coverage = told["keys"] if budgets is None else selected[chosen]
    return {
        **told, "keys": told["keys"].mean() / mass,
        "coverage": coverage.mean(), "recall": (selected / ideal)[chosen].mean(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budgets", [None, BUDGETS], ids=["dense", "sparse"])
def test_a_profile_is_that_of_all_scores(kind: str, budgets: Any) -> None:
    part = replace(KINDS[kind], mass=0.8)
    expected = plain_profile(kind, look(ALONE, Layout.even(GRID.tokens, 1), part), budgets, 0.8)
    assert expected["needed"].max() < 1
    for layout in [Layout.even(GRID.tokens, 1), *layouts(3)[: 1 if budgets is None else 2]]:

        def job(world: World, layout: Layout = layout) -> Any:
            return look(world, layout, part).profile(budgets)

        for found in on_ranks(layout.ranks, job):
            for name, value in expected.items():
                np.testing.assert_allclose(getattr(found, name), value, rtol=1e-9, err_msg=name)


def test_coarse_attention_is_among_means_of_cubes() -> None:
    """Of queries that are grouped by heads, and with text on every rank."""
    q, k, v = (normal(2, heads, GRID.tokens, HEAD, seed=heads).requires_grad_() for heads in (4, 2, 2))
    slope = normal(2, 4, GRID.tokens, HEAD, seed=9)
    hidden = normal(2, GRID.tokens, 48, seed=7)
    module = torch.nn.Module()
    module.coarse = seeded(torch.nn.Linear(48, 48))
    inverse = np.argsort(CUBES.place)
    means = [torch.stack([each.mean(-2) for each in blocks_of(x[:, :, inverse])], -2) for x in (q, k, v)]
    mean_k, mean_v = (x.repeat_interleave(2, 1) for x in means[1:])
    out = (means[0] @ mean_k.mT * 0.3).softmax(-1) @ mean_v
    gate = module.coarse(hidden).reshape(2, GRID.tokens, 4, HEAD).transpose(1, 2)
    expected = gate * out[:, :, CUBES.place // BLOCK]
    grads = torch.autograd.grad((expected * slope).sum(), (q, k, v), retain_graph=True)

    def job(world: World) -> Any:
        layout = Layout.even(GRID.tokens, world.comm.size, prefix=GRID.prefix)
        rows = torch.from_numpy(layout.order(world.comm.rank))
        where = AttentionContext(
            layer=0, layers=1, step=0, steps=None, grid=GRID, heads=4, layout=layout, world=world,
            module=module, hidden=hidden[:, rows], scale=0.3,
        )  # fmt: skip
        given = [x.detach()[:, :, rows].requires_grad_() for x in (q, k, v)]
        found = coarse.gated(where, CUBES.layout(layout), BLOCK, *given)
        mine = torch.from_numpy(owned_tokens(layout)[world.comm.rank].rows)
        loss = (found * slope[:, :, rows])[:, :, mine].sum()  # text, that all have, counts once
        own = torch.autograd.grad(loss, given)
        errors = (found - expected[:, :, rows]).abs().max().item()
        return errors, [
            torch.zeros_like(x).index_add(2, rows, grad) for x, grad in zip((q, k, v), own, strict=True)
        ]

    for ranks in (1, 3):
        answers = on_ranks(ranks, job)
        assert max(error for error, _ in answers) < 1e-12
        for grad, *parts in zip(grads, *(own for _, own in answers), strict=True):
            torch.testing.assert_close(sum(parts), grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("again", [False, True])
def test_a_step_with_the_coarse_branch_is_that_of_one_process(again: bool) -> None:
    def job(world: World) -> Any:
        dsv = method(replace(PART, coarse=True))
        return step(sparse(world, dsv, again=again), *inputs()), masks(dsv)

    ((alone, chosen),), found = on_ranks(1, job), on_ranks(3, job)
    assert all(other == chosen for _, other in found)
    check(alone, [each for each, _ in found], 1e-10)
    gates = [at for at, (name, _) in enumerate(model(coarse=True).named_parameters()) if "coarse" in name]
    assert len(gates) == 4 and all(alone[1][at].abs().max() > 1e-6 for at in gates)


def test_a_coarse_branch_begins_at_nothing() -> None:
    """A model that gets one is the model that it was."""
    plain, dsv = model(), method(replace(PART, coarse=True))
    own = model()
    dsv.prepare(own)
    own.double()
    weft.parallelize(own, mesh=ALONE, sparse=dsv)
    other = method(PART)
    weft.parallelize(plain, mesh=ALONE, sparse=other)
    assert torch.equal(own(*inputs()), plain(*inputs()))
