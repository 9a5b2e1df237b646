"""Places: which plan comes next, when another strategy is looked up, and what an earlier run leaves."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from weft.core.errors import AgreementError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.topology import Topology
from weft.plan.assignment import Assignment
from weft.plan.balanced import Balancer
from weft.plan.forecast import Forecast
from weft.plan.place import MAX_STEPS, AttentionId, Entry, StrategyChoice, planned, resume
from weft.plan.strategies import parse

TOKENS, HEADS, BLOCK = 256, 8, 8
LAYOUT = Layout.even(TOKENS, 4)
PROBLEM = Problem(batch=1, heads=HEADS, kv_heads=HEADS, head_dim=8, q=LAYOUT, kv=LAYOUT)
TOPOLOGY = Topology.local(4)
BALANCED, OTHER = parse("usp:2x2+balanced", 4), parse("ulysses+balanced", 4)


def mask(seed: int, share: float = 0.3, skew: float = 1.0) -> BlockMask:
    blocks, random = TOKENS // BLOCK, np.random.default_rng(seed)
    shares = share * skew ** np.arange(HEADS)[:, None, None]
    tiles = random.random((HEADS, blocks, blocks)) < shares
    return BlockMask.from_tiles(tiles, q_len=TOKENS, kv_len=TOKENS, block_q=BLOCK)


def entry(requested: str = "auto") -> Entry:
    first = mask(0)
    assignment = Balancer(PROBLEM, first, TOPOLOGY).assign(BALANCED).assignment
    plan = planned(BALANCED, assignment, "first", PROBLEM, first, TOPOLOGY)
    return Entry(1, AttentionId("model", 3, 1, "topk"), PROBLEM, TOPOLOGY, plan, first, 0, requested)


class Counted:
    """A choice that finds ulysses twice as fast as all others, and counts how often it is requested."""

    def __init__(self, found: float) -> None:
        self.looked_up = 0
        self.choice = StrategyChoice(BALANCED, "", {BALANCED: 1.0, OTHER: found})

    def __call__(self, _: BlockMask) -> Any:
        return self

    def estimate(self, *args: Any) -> float:
        return self.choice.estimate(*args)

    def better(self, *args: Any) -> Any:
        self.looked_up += 1
        return self.choice.better(*args)


def test_strategies_are_looked_up_once_and_when_masks_have_moved() -> None:
    place, choice, forecast = entry(), Counted(100.0), Forecast()
    for step in range(4):
        place.observe(mask(step), step, place.plan, forecast, choice)
    assert choice.looked_up == 1
    place.observe(mask(4, share=0.5), 4, place.plan, forecast, choice)
    assert choice.looked_up == 2, "another density"
    place.observe(mask(5, share=0.9, skew=0.85), 5, place.plan, forecast, choice)
    assert choice.looked_up == 3, "another spread over heads"
    requested = entry("usp:2x2+balanced")
    requested.observe(mask(0), 0, requested.plan, forecast, choice)
    assert choice.looked_up == 3, "the user has chosen"


def test_a_better_strategy_is_changed_to_with_its_reason() -> None:
    place = entry()
    draft = place.observe(mask(1), 0, place.plan, Forecast(), Counted(0.01))
    assert draft is not None
    strategy, assignment, why = draft
    assert strategy == OTHER and assignment.fits(PROBLEM, mask(1), OTHER)
    assert "ulysses+balanced is" in why and "ahead of usp:2x2+balanced" in why
    prepared: list[Any] = []
    place.hold(1, draft, lambda *plans: prepared.append(plans))
    assert prepared == [(place.plan, place.held[1])]
    assert place.plan.version == 0 and place.newest == 1
    old = place.use(1)
    assert old is place.first and place.plan.strategy == OTHER and place.plan.why == why
    assert place.stored().strategy == "ulysses+balanced", "the next run begins with it"
    assert place.again(2, 0).plan is place.plan


def test_a_strategy_that_is_hardly_better_is_not() -> None:
    balancer, plan = Balancer(PROBLEM, mask(0), TOPOLOGY), entry().plan
    times = [way.estimate(PROBLEM, TOPOLOGY, balancer.assign(way)) for way in (BALANCED, OTHER)]
    for gain, changes in ((1.01, False), (1.05, True)):
        choice = StrategyChoice(BALANCED, "", {BALANCED: 1.0, OTHER: times[0] / times[1] / gain})
        draft = choice.better(balancer, BALANCED, plan.assignment)
        assert (draft is not None and draft[0] == OTHER) == changes


def test_versions_go_up_and_old_plans_are_let_go() -> None:
    place = entry()
    for version in (1, 2, 3):
        place.hold(version, (BALANCED, place.first.assignment, ""), lambda *_: None)
    with pytest.raises(AgreementError, match="another schedule than rank 0"):
        place.hold(4, (BALANCED, place.first.assignment, ""), lambda *_: None, "a schedule of rank 0")
    assert place.use(0) is None and place.plan is place.first
    assert place.use(2) is place.first and sorted(place.held) == [2, 3]
    assert place.use(1) is None and place.plan.version == 2, "never back"


def test_what_is_remembered_is_bounded() -> None:
    place, same = entry("usp:2x2+balanced"), mask(0)
    place.loads = {step: np.ones(HEADS, dtype=np.int64) for step in range(MAX_STEPS)}
    place.observe(same, MAX_STEPS, place.plan, Forecast(), Counted(1.0))
    assert len(place.loads) == MAX_STEPS and min(place.loads) == 1


def test_an_earlier_run_is_carried_on_where_it_fits() -> None:
    stored = replace(entry().stored(), steps=(0,), loads=np.ones((1, HEADS), dtype=np.int64))
    balancer = Balancer(PROBLEM, mask(7, skew=0.8), TOPOLOGY)
    strategy, assignment, _ = resume(stored, "auto", balancer) or pytest.fail("it fits")
    assert strategy == BALANCED and assignment.fits(PROBLEM, balancer.mask, BALANCED)
    assert resume(stored, "usp:2x2+balanced", balancer)
    assert resume(stored, "ulysses", balancer) is None
    assert resume(replace(stored, strategy="of tomorrow"), "auto", balancer) is None
    assert resume(replace(stored, strategy="ring+balanced"), "auto", balancer) is None
    cut = stored.assignment
    bad = Assignment(cut.heads, cut.rows[:, 1:], cut.cols, cut.q_unit, cut.kv_unit)
    assert resume(replace(stored, assignment=bad), "auto", balancer) is None


@pytest.mark.parametrize("flops", [1e8, 1e12])
@pytest.mark.parametrize("skew", [0.7, 1.0])
def test_the_choice_is_the_fastest_of_balanced_plans(skew: float, flops: float) -> None:
    topology, first = replace(TOPOLOGY, flops=flops), mask(0, skew=skew)
    choice = StrategyChoice.of(PROBLEM, first, topology)
    assert choice.strategy.balance == "balanced"
    balancer = Balancer(PROBLEM, first, topology)
    assert choice.better(balancer, choice.strategy, balancer.assign(choice.strategy).assignment) is None
