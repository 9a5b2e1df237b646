"""Dispatching: by what is observed and what it costs, and never hither and thither."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.diffusers.toys import on_ranks
from weft.core.errors import InputError
from weft.run.world import LocalComm, World
from weft.train import attention_cost
from weft.train.attention_cost import CPU, AttentionCost
from weft.train.dispatcher import BUDGET_GRID, HYSTERESIS, Dispatcher
from weft.train.recipe import SparseConfig

HEADS = 3
PRICES = AttentionCost(
    tokens=4096, heads=HEADS, ranks=1, full=1.0, head=0.05, share=1.0, select=0.05, plan=0.0
)
"""A block of equal heads pays below a share of 0.9."""
AT_ONCE = SparseConfig(stage1=0)
shares = st.floats(0.0, 1.0)
needs = st.lists(shares, min_size=HEADS, max_size=HEADS)
few = settings(max_examples=30, deadline=None)


def made(part: SparseConfig, layers: int = 1, costs: AttentionCost | None = PRICES) -> Dispatcher:
    return Dispatcher(part, layers=layers, heads=HEADS, costs=costs)


def after(
    part: SparseConfig, *observed: Any, coverage: float = 1.0, costs: AttentionCost | None = PRICES
) -> Dispatcher:
    """Each observation is a step's."""
    dispatcher = made(part, costs=costs)
    for step, needed in enumerate(observed):
        dispatcher.begin(step)
        dispatcher.observe(0, np.broadcast_to(needed, HEADS), coverage)
    dispatcher.begin(len(observed))
    return dispatcher


def budgets(dispatcher: Dispatcher, layer: int = 0) -> list[float] | None:
    found = dispatcher.budgets(layer)
    return None if found is None else found.tolist()


@few
@given(needs)
def test_budgets_are_what_heads_need_rounded_up_and_dense_heads_have_all(needed: list[float]) -> None:
    found = budgets(after(AT_ONCE, needed))
    shares = [max(0.02, share) for share in needed]
    shares = [1.0 if 0.05 + share >= 1 - HYSTERESIS else share for share in shares]
    if sum(shares) + 0.05 * 2 * HEADS < HEADS * (1 - HYSTERESIS):
        assert found is not None
        assert all(
            share - 1e-6 <= budget < share + 1 / BUDGET_GRID
            for budget, share in zip(found, shares, strict=True)
        )
        assert all(budget * BUDGET_GRID % 1 == 0 for budget in found)
    else:
        assert found is None


@few
@given(needs, needs)
def test_who_needs_more_does_not_get_less(some: list[float], others: list[float]) -> None:
    less, more = np.minimum(some, others), np.maximum(some, others)
    low, high = (budgets(after(AT_ONCE, needed)) for needed in (less, more))
    assert high is None or (low is not None and all(np.less_equal(low, high)))


@few
@given(
    st.lists(st.floats(-0.9, 0.9), min_size=4, max_size=20), st.booleans(), st.sampled_from(["cost", 0.03])
)
def test_what_wobbles_inside_the_band_stays_on_its_side(
    wobbles: list[float], sparse: bool, gate: Any
) -> None:
    at, width = (0.9, HYSTERESIS) if gate == "cost" else (gate, gate * HYSTERESIS)
    dispatcher = after(replace(AT_ONCE, gate=gate), 0.02 if sparse else 1.0)
    for step, wobble in enumerate(wobbles, 1):
        assert (budgets(dispatcher) is not None) == sparse
        dispatcher.blocks[0].needed = np.full(HEADS, at + width * wobble)
        dispatcher.begin(step)
    assert (budgets(dispatcher) is not None) == sparse
    for beyond, then in ((1.1, False), (-1.1, True)):
        dispatcher.blocks[0].needed = np.full(HEADS, at + width * beyond)
        dispatcher.begin(99)
        assert (budgets(dispatcher) is not None) == then


def test_lost_sparsity_goes_back_to_dense_and_comes_again() -> None:
    assert budgets(after(AT_ONCE, *[0.1] * 5)) is not None
    assert budgets(after(AT_ONCE, *[0.1] * 5, *[1.0] * 40)) is None
    assert budgets(after(AT_ONCE, *[0.1] * 5, *[1.0] * 40, *[0.1] * 40)) is not None


def test_the_first_observation_counts_whole_and_later_ones_a_tenth() -> None:
    assert budgets(after(AT_ONCE, 0.5)) == [0.5] * HEADS
    assert budgets(after(AT_ONCE, 0.5, 0.25)) == [31 / 64] * HEADS  # 0.475


def test_needs_rise_at_once_where_a_selection_has_lost_the_mass_and_fall_slowly() -> None:
    """Profiles are rare by then: ten of them would be a thousand steps with too few keys."""
    dispatcher = after(AT_ONCE, *[0.1] * 5, coverage=0.9)
    assert budgets(dispatcher) is not None
    dispatcher.observe(0, [0.05, 0.5, 0.1], 0.9)
    assert dispatcher.blocks[0].needed == pytest.approx([0.095, 0.14, 0.1]), "nothing is lost"
    dispatcher.observe(0, [0.05, 0.5, 0.1], 0.8)
    assert dispatcher.blocks[0].needed == pytest.approx([0.0905, 0.5, 0.1])
    dispatcher.begin(6)
    dispatcher.observe(0, [1.0] * HEADS, 0.5)
    dispatcher.begin(7)
    assert budgets(dispatcher) is None
    dispatcher.observe(0, [0.1] * HEADS, 0.5)
    assert dispatcher.blocks[0].needed == pytest.approx([0.91] * HEADS), "a dense block has lost nothing"


def test_a_block_waits_for_its_own_predictor_but_not_for_ever() -> None:
    part = SparseConfig(stage1=5)
    dispatcher = made(part, layers=2)
    for step in range(7):
        dispatcher.begin(step)
        stages = [dispatcher.record(layer)["stage"] for layer in range(2)]
        sparse = [dispatcher.budgets(layer) is not None for layer in range(2)]
        dispatcher.observe(0, [0.1] * HEADS, 0.95 * part.mass)
        dispatcher.observe(1, [0.1] * HEADS, 0.5)
        assert stages == [1 if step == 0 else 2, 1 if step < 5 else 2]
        assert sparse == [stage == 2 for stage in stages]


def test_a_predictor_that_turns_bad_in_stage_1_sends_its_block_back() -> None:
    part = SparseConfig(stage1=100)
    dispatcher = after(part, 0.1, coverage=0.9)
    for coverage, sparse in (
        (0.855 * (1 - HYSTERESIS) + 1e-6, True),
        (0.855 * (1 - HYSTERESIS) - 1e-6, False),
        (0.854, False),
    ):
        dispatcher.blocks[0].coverage = coverage
        dispatcher.begin(2)
        assert (dispatcher.budgets(0) is not None) == sparse
        assert dispatcher.record(0)["mode"] == ("sparse" if sparse else "dense")


def test_methods_without_a_predictor_wait_for_nothing() -> None:
    assert budgets(after(SparseConfig(method="window", budget=0.25))) == [0.25] * HEADS


def test_dense_blocks_are_dense_for_ever_and_learn_nothing() -> None:
    dispatcher = made(replace(AT_ONCE, budget=0.1, dense_blocks=(0, -1)), layers=4)
    dispatcher.begin(1)
    assert [dispatcher.budgets(layer) is None for layer in range(4)] == [True, False, False, True]
    assert [dispatcher.learns(layer) for layer in range(4)] == [False, True, True, False]
    with pytest.raises(InputError, match="4 blocks"):
        made(replace(AT_ONCE, dense_blocks=(4,)), layers=4)


def test_a_forced_budget_is_refused_where_it_does_not_pay() -> None:
    forced = replace(AT_ONCE, budget=0.1)
    assert budgets(after(forced)) == [0.1] * HEADS
    assert budgets(after(forced, costs=replace(PRICES, plan=5.0))) is None
    assert budgets(after(forced, costs=None)) is None, "nobody knows yet what it costs"
    assert budgets(after(replace(forced, gate=0.2), costs=None)) == [0.1] * HEADS
    assert budgets(after(replace(forced, gate=0.05), costs=None)) is None


@few
@given(st.integers(1, 30), st.floats(0.05, 0.5), st.integers(0, 4))
def test_annealing_falls_in_a_line_from_when_the_block_is_ready(steps: int, budget: float, wait: int) -> None:
    part = SparseConfig(stage1=wait, budget=budget, anneal=steps, gate=1.1)
    dispatcher = made(part)
    for step in range(wait + steps + 3):
        dispatcher.begin(step)
        want = 1 + (budget - 1) * min(1.0, (step - wait) / steps)
        found = budgets(dispatcher)
        assert found is None if step < wait else found == pytest.approx([want] * HEADS)


def test_periods_of_profiling_and_of_predictors_that_nobody_asks() -> None:
    dispatcher = made(SparseConfig(stage1=50, profile_every=10, profile_rarely=25), layers=2)
    seen: list[tuple[bool, bool]] = []
    for step in range(100):
        dispatcher.begin(step)
        seen.append((dispatcher.profiles(0), dispatcher.learns(0)))
        if dispatcher.profiles(0):
            dispatcher.observe(0, [1.0] * HEADS, 0.1)
    assert [step for step, (profiled, _) in enumerate(seen) if profiled] == [0, 10, 20, 30, 40, 50, 75]
    assert [step for step, (_, learned) in enumerate(seen) if learned] == [*range(50), 50, 75]


@few
@given(st.lists(st.tuples(needs, shares), min_size=2, max_size=12), st.integers(1, 11))
def test_a_resumed_run_decides_as_one_that_went_on(observed: list[Any], cut: int) -> None:
    part = SparseConfig(stage1=6, anneal=4)

    def run(dispatcher: Dispatcher, first: int, last: int) -> list[Any]:
        found: list[Any] = []
        for step in range(first, min(last, len(observed))):
            dispatcher.begin(step)
            found.append(budgets(dispatcher))
            dispatcher.observe(0, *observed[step])
        return found

    whole, resumed = made(part), made(part, costs=None)
    expected = run(whole, 0, 99)
    first = made(part)
    run(first, 0, cut)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run(resumed, cut, 99) == expected[cut:]
    assert resumed.costs == PRICES


def test_a_state_of_another_model_and_shares_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match="2 blocks"):
        made(AT_ONCE).load_state_dict(made(AT_ONCE, layers=2).state_dict())
    with pytest.raises(InputError, match="3 shares"):
        made(AT_ONCE).observe(0, [0.5] * (HEADS - 1), 1.0)
    with pytest.raises(InputError, match="3 shares"):
        made(AT_ONCE).observe(0, [0.5, float("nan"), 0.5], 1.0)


def test_costs_are_shared_over_ranks_but_not_planning() -> None:
    alone = replace(PRICES, plan=0.5)
    two = replace(alone, ranks=2)
    low, high = np.full(HEADS, 0.1), np.full(HEADS, 0.4)
    assert alone.dense() == 2 * two.dense() == 3.0
    assert alone.sparse(high) - alone.sparse(low) == pytest.approx(2 * (two.sparse(high) - two.sparse(low)))
    assert two.sparse(low) == pytest.approx(0.5 + HEADS * (0.05 + 0.1 + 0.05) / 2)


def test_ranks_measure_together_and_find_the_same_and_leave_no_trace() -> None:
    part = SparseConfig(cube=(1, 4, 4), rank=4, rows=8)

    def job(world: World) -> tuple[AttentionCost, AttentionCost]:
        before = torch.get_rng_state()
        with torch.no_grad():
            found = AttentionCost.measure(131, 5, 8, config=part, world=world)
        assert torch.equal(before, torch.get_rng_state())
        return found, AttentionCost.measure(131, 5, 8, config=part, world=world)

    answers = on_ranks(3, job, timeout=60.0)
    assert len({found for both in answers for found in both}) == 1
    found = answers[0][0]
    assert (found.tokens, found.heads, found.ranks) == (131, 5, 3)
    assert min(found.full, found.head + found.share, found.select) > 0
    asked = replace(part, cost_tokens=1024)
    assert AttentionCost.measure(131, 5, 8, config=asked).tokens == 1024
    assert AttentionCost.measure(131, 5, 8, config=replace(part, method="window")).select == 0


def test_the_masks_that_planning_is_measured_with_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not 20 bytes for each tile of each head: 12 GB with 5 heads of 65,536 tokens in blocks of 4 × 8."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            sizes = [x.numel() * x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
            largest = max(largest, *sizes, 0)
            return out

    heads, tokens = 3, 4096
    part = SparseConfig(cube=(1, 2, 2), block_k=8)
    tiles = heads * (tokens // 4) * (tokens // 8)
    monkeypatch.setattr(attention_cost, "elements_per_chunk", lambda _: tiles // 64)
    with Watch():
        assert sum(len(piece) for piece in attention_cost._tiles(heads * tokens // 4, tokens // 8, 8)) == 3072
    attention_cost._planning(64, heads, CPU, part, World(LocalComm()))  # imports what it needs
    tracemalloc.start()
    try:
        attention_cost._planning(tokens, heads, CPU, part, World(LocalComm()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert largest <= tiles // 2
    assert peak < 2 * tiles + (2 << 20), "bits, and what attention makes of them"


@pytest.mark.parametrize(("rows", "cols"), [(7, 5), (100, 3), (700, 130), (33, 2), (64, 8)])
def test_tiles_come_in_pieces_with_as_many_in_every_row(
    rows: int, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_cost, "elements_per_chunk", lambda _: 16)
    pieces = [*attention_cost._tiles(rows, cols, 2, 4)]
    assert max(map(len, pieces)) == max(1, 16 // cols)
    tiles = torch.cat(pieces)
    assert tiles.shape == (rows, cols) and (tiles.sum(1) == 2).all()
