"""Plans through a denoising loop: few re-plans, better balance than the published policy, no waiting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.deals import DbspPolicy, replay
from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.masks.evolving import evolving_mask
from weft.masks.grid import TokenGrid
from weft.masks.random import random_mask
from weft.plan.balance import bound, ratio, step_ratio
from weft.plan.blocks import LIMITS, Placement, contiguous, joint, tile_sums
from weft.plan.choose import build
from weft.plan.counts import head_loads, tile_loads
from weft.plan.heads import group_loads, natural, refined
from weft.plan.online import Hybrid, Online, OnlineBlocks, forecast, ratios
from weft.plan.swaps import slot_loads, swapped, to_grouping, to_slots
from weft.schedule.measure import measure
from weft.schedule.verify import verify


def evolving(steps: int = 12, layers: int = 6, heads: int = 40, seed: int = 0) -> np.ndarray:
    """Counts whose logarithms drift along and jitter a little, as those of real models do."""
    rng = np.random.default_rng(seed)
    start, drift = rng.normal(0, 0.4, (layers, heads)), rng.normal(0, 0.03, (layers, heads))
    jitter = rng.normal(0, 0.01, (steps, layers, heads))
    return np.rint(1e4 * np.exp(start + drift * np.arange(steps)[:, None, None] + jitter)).astype(np.int64)


def start(counts, groups: int = 8):
    return [natural(counts.shape[2], groups)] * counts.shape[1]


def test_online_beats_the_published_policy_and_the_natural_order():
    counts = evolving()
    still = replay(Online(start(counts), threshold=np.inf), counts).mean()
    ours, theirs = Online(start(counts)), DbspPolicy(start(counts))
    found, published = replay(ours, counts), replay(theirs, counts)
    assert found[2:].mean() < 1.03 < published[2:].mean() < still
    assert 0 < ours.replanned < counts.shape[0] * counts.shape[1]
    assert (found[0] == published[0]).all()  # nothing is known before the first step


def test_a_prior_balances_the_first_step():
    counts = evolving()
    prior = [refined(layer, 8, equal=True) for layer in counts[0]]
    assert replay(Online(prior), counts)[0].max() < 1.1 < replay(Online(start(counts)), counts)[0].mean()


@given(st.integers(0, 99), st.integers(1, 7), st.integers(1, 9))
def test_every_plan_holds_every_head_once_and_is_no_better_than_the_bound(seed, groups, heads):
    counts = evolving(steps=5, layers=2, heads=heads, seed=seed)
    policy = Online(start(counts, groups))
    found = replay(policy, counts)
    for plan in policy.plans:
        assert sorted(head for group in plan for head in group) == list(range(heads))
        assert len(plan) == groups and max(len(group) for group in plan) == -(-heads // groups)
    least = np.array([[bound(layer, groups) for layer in step] for step in counts])
    assert (found >= least - 1e-12).all()
    again = Online(start(counts, groups))
    replay(again, counts)
    assert again.plans == policy.plans


def test_only_layers_past_the_threshold_are_planned_anew():
    fits, drifts = [5, 5, 5, 5], [9, 9, 1, 1]
    policy = Online([natural(4, 2)] * 2)
    first, second = policy.observe([fits, drifts])
    assert first == natural(4, 2) and group_loads(second, drifts).tolist() == [10, 10]
    assert policy.replanned == 1
    assert policy.observe([fits, drifts]) == (first, second) and policy.replanned == 1


def test_a_plan_that_cannot_be_improved_is_not_counted_as_new():
    policy = Online([((0,), (1,))])
    for _ in range(3):
        assert policy.observe([[9, 1]]) == (((0,), (1,)),)
    assert policy.replanned == 0


def test_ratios_are_those_of_each_plan():
    plans = (((0, 1, 2, 3), (4, 5)), ((5,), (0, 1, 2, 3, 4)))
    counts = np.array([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    expected = [ratio(group_loads(plan, row)) for plan, row in zip(plans, counts, strict=True)]
    assert ratios(plans, counts).tolist() == expected


@given(st.integers(0, 99), st.integers(1, 6), st.integers(0, 14))
def test_swaps_keep_heads_and_never_make_the_busiest_group_busier(seed, groups, heads):
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 10 ** rng.integers(1, 12), (3, heads))
    dealt = rng.integers(0, groups, (3, heads))
    plans = [tuple(tuple(np.flatnonzero(row == group).tolist()) for group in range(groups)) for row in dealt]
    slots = to_slots(plans, heads)
    after = swapped(slots, loads)
    busiest = [slot_loads(some, loads).sum(axis=2).max(axis=1) for some in (slots, after)]
    assert (busiest[1] <= busiest[0]).all()
    assert [to_grouping(layer, heads) for layer in slots] == plans
    for layer in after:
        assert sorted(head for group in to_grouping(layer, heads) for head in group) == list(range(heads))
    alone = [swapped(slots[i : i + 1], loads[i : i + 1])[0] for i in range(3)]
    assert np.array_equal(after, np.stack(alone))  # layers do not know each other


def test_swaps_bring_skewed_heads_close_to_balance():
    loads = np.rint(1e5 * np.random.default_rng(5).lognormal(0, 0.4, (30, 40))).astype(np.int64)
    before = to_slots([natural(40, 8)] * 30, 40)
    busiest = [slot_loads(s, loads).sum(axis=2).max(axis=1) for s in (before, swapped(before, loads))]
    least = loads.sum(axis=1) / 8
    assert (busiest[1] / least).mean() < 1.02 < 1.2 < (busiest[0] / least).mean()


@pytest.mark.parametrize(
    ("loads", "groups", "busiest"),
    [
        ([17, 3, 11, 14, 17, 10, 8, 6], 2, 43),  # two heads at once; one at a time ends at 44
        ([10, 8, 8, 5, 10, 2], 3, 16),  # the middle group takes part; without it, 18
    ],
)
def test_swaps_find_what_single_ones_or_the_same_partners_do_not(loads, groups, busiest):
    table = np.array([loads])
    after = swapped(to_slots([natural(len(loads), groups)], len(loads)), table)
    assert slot_loads(after, table).sum(axis=2).max() == busiest


def test_no_work_at_all_is_balanced():
    for heads in (0, 5):
        counts = np.zeros((4, 2, heads), dtype=int)
        assert (replay(Online(start(counts, 3)), counts) == 1.0).all()


def test_counts_and_plans_of_another_model_are_refused():
    with pytest.raises(InputError, match="2 layers × 4 heads"):
        Online([natural(4, 2)] * 2).observe(np.ones((2, 5), dtype=int))
    with pytest.raises(InputError, match="2 different numbers"):
        Online([natural(4, 2), natural(4, 3)])
    with pytest.raises(InputError, match="0 different numbers"):
        Online([])
    with pytest.raises(InputError, match="each of 4 heads exactly once"):
        Online([natural(4, 2), ((0, 1), (1, 2))])
    with pytest.raises(InputError, match="below 0"):
        Online([natural(2, 2)]).observe([[3, -1]])


def test_a_steady_change_is_carried_on_and_a_jump_is_not():
    line = [np.array([[100, 100 + 10 * t, 1000 - 20 * t]]) for t in range(4)]
    assert forecast(line[:3]).tolist() == line[3].tolist()
    assert forecast(line[:2]).tolist() == line[1].tolist()
    assert forecast([step << 40 for step in line[:3]]).tolist() == (line[3] << 40).tolist()
    assert forecast([np.array([[90]]), np.array([[50]]), np.array([[10]])]).tolist() == [[0]]
    there_and_back = [np.array([[10, 50]]), np.array([[50, 10]]), np.array([[10, 50]])]
    assert forecast(there_and_back).tolist() == [[10, 50]]


@given(st.lists(st.lists(st.integers(0, 2**50), min_size=3, max_size=3), min_size=1, max_size=3))
def test_a_forecast_is_never_negative_nor_further_than_the_last_change(steps):
    history = [np.array([step]) for step in steps]
    change = history[-1] - history[-2] if len(history) > 1 else 0 * history[-1]
    found = forecast(history)
    assert (found >= 0).all()
    assert (np.abs(found - history[-1]) <= np.abs(change)).all()


LAYERS, STEPS, HEADS = 2, 6, 10
MESHES = [(2, 2), (1, 4), (3, 2)]


@pytest.fixture(scope="module")
def video() -> list[list[BlockMask]]:
    """[steps][layers] of 96 blocks that drift."""
    grid = TokenGrid(8, 16, 48)
    return [[evolving_mask(HEADS, grid, seed=s, step=t) for s in range(LAYERS)] for t in range(STEPS)]


def at_home(mask: BlockMask, slices: int, ring: int) -> Hybrid:
    homes = contiguous(mask.q_blocks, ring), contiguous(mask.kv_blocks, ring)
    return Hybrid(natural(mask.heads, slices), Placement.at_home(slices, *homes, ring))


def anew(mask: BlockMask, slices: int, ring: int) -> Hybrid:
    grouping = refined(head_loads(mask), slices, equal=True)
    return Hybrid(grouping, Placement(ring, *joint(tile_loads(mask, grouping), ring)))


def moved(now: Hybrid, before: Hybrid) -> float:
    """The share of rows and columns that are elsewhere than before."""
    pairs = ((now.blocks.rows, before.blocks.rows), (now.blocks.cols, before.blocks.cols))
    return float(np.concatenate([(a != b).ravel() for a, b in pairs]).mean())


def judged(plan: Hybrid, mask: BlockMask) -> float:
    return step_ratio(tile_sums(tile_loads(mask, plan.grouping), *plan.blocks.dealt, plan.blocks.ring))


@pytest.mark.parametrize(("slices", "ring"), MESHES)
def test_blocks_stay_balanced_through_a_loop_and_few_of_them_move(video, slices, ring):
    policy = OnlineBlocks([anew(mask, slices, ring) for mask in video[0]])
    once, cold = policy.plans, policy.plans
    reused, fresh, stale, moves, cold_moves = [], [], [], [], []
    for before, now in zip(video, video[1:], strict=False):
        was, cold_was = policy.plans, cold
        policy.observe(before)
        cold = tuple(anew(mask, slices, ring) for mask in before)
        moves += map(moved, policy.plans, was)
        cold_moves += map(moved, cold, cold_was)
        for found, plans in ((reused, policy.plans), (fresh, cold), (stale, once)):
            found += [judged(plan, mask) for plan, mask in zip(plans, now, strict=True)]
        for plan in policy.plans:
            homes = at_home(now[0], slices, ring).blocks
            assert (plan.blocks.rows != homes.rows).mean(axis=1).max() <= LIMITS.budget
            assert (plan.blocks.cols != homes.cols).mean(axis=1).max() <= LIMITS.budget
    assert np.mean(reused) < np.mean(stale)
    assert np.mean(reused) < np.mean(fresh) + 0.01
    assert np.mean(moves) < 0.7 * np.mean(cold_moves)
    assert policy.replanned


@pytest.mark.parametrize(("slices", "ring"), MESHES)
def test_blocks_are_planned_alike_everywhere_and_only_where_they_drift(video, slices, ring):
    steady = random_mask(HEADS, 96 * 64, 96 * 64, density=1.0, seed=0)
    policies = [OnlineBlocks([at_home(steady, slices, ring)] * 2) for _ in range(2)]
    for step in video[:3]:
        first, second = (policy.observe([step[0], steady]) for policy in policies)
        assert first == second
    assert first[0].blocks != at_home(steady, slices, ring).blocks
    # Where every tile is active, 10 heads in 3 slices are uneven and blocks cannot help that.
    assert moved(first[1], at_home(steady, slices, ring)) == 0
    before = policies[0].replanned
    assert before <= 3
    good = policies[0].observe([video[2][0], steady])
    assert policies[0].observe([video[2][0], steady])[0].blocks is good[0].blocks
    still = OnlineBlocks([at_home(steady, slices, ring)], threshold=np.inf)
    assert still.observe([video[0][0]])[0].blocks is still.plans[0].blocks
    assert still.plans[0].blocks == at_home(steady, slices, ring).blocks and still.replanned == 0


@pytest.mark.parametrize(("slices", "ring", "heads"), [(1, 3, 2), (3, 1, 5), (2, 3, 7), (3, 2, 2)])
@pytest.mark.parametrize("density", [0.0, 0.3])
def test_a_plan_in_force_is_a_schedule(slices, ring, heads, density):
    """Prime sizes, a ragged last block, one slice more than heads, and nothing to do at all."""
    layout = Layout.even(11 * 13 + 4, slices * ring)
    problem = Problem(batch=1, heads=heads, kv_heads=heads, head_dim=4, q=layout, kv=layout)
    masks = [
        random_mask(heads, layout.size, layout.size, block=11, density=density, seed=s) for s in range(3)
    ]
    policy = OnlineBlocks([at_home(masks[0], slices, ring)])
    for mask in masks:
        (plan,) = policy.observe([mask])
    schedule = build(f"usp:{slices}x{ring}", problem, masks[-1], grouping=plan.grouping, blocks=plan.blocks)
    verify(schedule)
    assert measure(schedule).imbalance <= max(1.0, judged(plan, masks[-1])) + 1e-9


def test_blocks_that_do_not_fit_are_refused():
    mask = random_mask(4, 640, 640, block=64)
    plan = at_home(mask, 2, 2)
    with pytest.raises(InputError, match=r"shapes \(2, 10\) and \(2, 10\)"):
        OnlineBlocks([plan]).observe([random_mask(4, 640, 640, block=32)])
    with pytest.raises(InputError, match="1 layers"):
        OnlineBlocks([plan]).observe([mask, mask])
    with pytest.raises(InputError, match="in 1 slices"):
        OnlineBlocks([Hybrid(natural(4, 1), plan.blocks)]).observe([mask])
    layout = Layout.even(640, 4)
    problem = Problem(batch=1, heads=4, kv_heads=4, head_dim=4, q=layout, kv=layout)
    for name, other in (("usp:2x2", random_mask(4, 640, 640, block=32)), ("ring", mask)):
        with pytest.raises(InputError, match="do not fit"):
            build(name, problem, other, blocks=plan.blocks)
