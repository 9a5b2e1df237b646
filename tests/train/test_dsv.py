"""The sparse step: on any ranks, by any plan, it is the masked dense attention of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.diffusers.toys import check, step
from tests.train.dsv import BUDGETS, CUBES, PART, Masked, inputs, masks, method, model, on_ranks, sparse
from weft.run.world import World

METHODS = {"dsv": PART, "pooled": replace(PART, method="pooled"), "window": replace(PART, method="window")}


@pytest.mark.parametrize(
    ("ranks", "plan", "name", "again"),
    [
        (1, "auto", "dsv", False),
        (1, "auto", "window", True),
        (2, "ulysses+balanced", "dsv", True),
        (2, "ring", "pooled", False),
        (3, "gather+balanced", "dsv", True),
        (3, "auto", "window", False),
        (4, "gather:2x2", "dsv", False),
        (4, "usp:2x2+balanced", "pooled", True),
        (4, "auto", "dsv", True),
    ],
)
def test_a_sparse_step_is_that_of_one_process(ranks: int, plan: str, name: str, again: bool) -> None:
    """Output and gradients of the model, of which one head is dense and two samples have two masks."""

    def job(world: World) -> Any:
        dsv = method(METHODS[name])
        found = step(sparse(world, dsv, plan, again=again), *inputs())
        return found, masks(dsv)

    answers = on_ranks(ranks, job)
    chosen = answers[0][1]
    assert all(each == chosen for _, each in answers)
    assert len(chosen) == 2 and chosen[0].density < 0.7
    tiles = chosen[0].tiles
    assert tiles[2].all() and tiles[5].all()
    assert [int(tiles[head, 0].sum()) for head in (0, 1)] == [CUBES.blocks(share) for share in BUDGETS[:2]]
    assert name == "window" or not (tiles[:3] == tiles[3:]).all()
    with Masked(chosen) as mode:
        expected = step(model(), *inputs())
    assert mode.calls == 2
    assert (expected[0] - step(model(), *inputs())[0]).abs().max() > 1e-3
    check(expected, [found for found, _ in answers], 1e-10)
