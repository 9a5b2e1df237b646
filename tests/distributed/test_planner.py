"""The planner on real ranks: masks that change every step, and assignments that follow them."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

import weft
from tests.distributed.test_planner_product import evolving
from tests.run.dense import Truth
from tests.worlds import world
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.topology import Topology
from weft.plan.place import AttentionId
from weft.program import lower as lowering
from weft.run import agree as agreement
from weft.run import execute
from weft.run.world import World, world_of

TOKENS, HEADS, LAYERS = 310, 6, 2
PLACES = [AttentionId("test", layer, 0, "topk") for layer in range(LAYERS)]


def problem(ranks: int = 4) -> Problem:
    layout = Layout.even(TOKENS, ranks)
    return Problem(batch=1, heads=HEADS, kv_heads=HEADS, head_dim=8, q=layout, kv=layout, dtype="float64")


def masks(step: int) -> list[BlockMask]:
    """By layer."""
    return [evolving(layer, HEADS, TOKENS)[step] for layer in range(LAYERS)]


class Step(NamedTuple):
    """What one rank saw of a call."""

    error: float
    version: int


def run(steps: int, asked: str, rank: int, slow: int | None = None) -> list[list[Step]]:
    agreed, lowered, original = [], [], agreement.agree

    def agree(*args: Any, **how: Any) -> Any:
        agreed.append(threading.current_thread())
        return original(*args, **how)

    def lower(*args: Any) -> Any:
        lowered.append(threading.current_thread())
        return lowering.lower(*args)

    with patch.object(agreement, "agree", agree), patch.object(execute, "lower", lower):
        found = _run(World(world_of(None, 60.0).comm), steps, asked, rank, slow)
    if asked != "auto":  # plans of one strategy: only the first ones are agreed on and lowered in a step
        assert len(agreed) == lowered.count(threading.current_thread()) == LAYERS < len(lowered)
    return found


def _run(here: World, steps: int, asked: str, rank: int, slow: int | None) -> list[list[Step]]:
    found = []
    for step in range(steps):
        row = []
        for place, mask in zip(PLACES, masks(step), strict=True):
            truth = Truth.of(problem(), mask, seed=step)
            plan = here.planner.plan(
                place, problem(), mask, step=step, topology=lambda: Topology.local(4), strategy=asked
            )
            if rank == slow and step == steps // 2:
                time.sleep(1.0)
            out = weft.attention(*truth.inputs(rank), mask=mask, plan=plan, mesh=here, scale=truth.scale)
            row.append(Step(truth.output_error_of(out, rank), plan.version))
        here.planner.finish()
        found.append(row)
    return found


@pytest.mark.parametrize("asked", ["ulysses+balanced", "usp:2x2+balanced", "auto"])
def test_every_step_is_exact_and_assignments_follow_the_masks(asked: str) -> None:
    results = world(4).run(run, 6, asked, per_rank=[(rank, 3) for rank in range(4)])
    versions = [[[call.version for call in step] for step in result] for result in results]
    assert all(each == versions[0] for each in versions), "all ranks change at the same call"
    assert max(call.error for result in results for step in result for call in step) < 1e-10
    assert versions[0][0] == [0] * LAYERS
    assert max(max(step) for step in versions[0]) > 0, "a new assignment was used"


def run_twice() -> tuple[list[list[int]], int, bool]:
    """Versions by step of a second run on one world, and what is left in the store."""
    here, found = World(world_of(None, 60.0).comm), []
    rank = here.comm.rank
    for step in [*range(5), *range(4)]:
        for place, mask in zip(PLACES, masks(step), strict=True):
            how = {"topology": lambda: Topology.local(4), "strategy": "usp:2x2+balanced"}
            plan = here.planner.plan(place, problem(), mask, step=step, **how)
            truth = Truth.of(problem(), mask, seed=step)
            out = weft.attention(*truth.inputs(rank), mask=mask, plan=plan, mesh=here, scale=truth.scale)
            assert truth.output_error_of(out, rank) < 1e-10
        here.planner.finish()
        found.append([entry.plan.version for entry in here.planner.entries.values()])
    planner = here.planner
    return found[4:], len(planner.entries), rank > 0 or not planner._store.check(["1"])


def test_another_run_begins_as_the_last_and_messages_do_not_pile_up() -> None:
    for (last, first, *later), entries, is_deleted in world(4).run(run_twice):
        assert max(last) > 0 and first == [0] * LAYERS and max(later[-1]) > 0
        assert entries == LAYERS and is_deleted
