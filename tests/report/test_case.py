"""The numbers of a case: shares that add up, loads that agree with the schedule, one call of many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.report.toys import schedule, topology, two_ranks
from weft.core.errors import InputError
from weft.core.timeline import Timeline
from weft.plan.assignment import Assignment
from weft.plan.choose import build
from weft.plan.split import whole
from weft.program.workspace import peak_memory
from weft.report.case import Case, numbers, summary
from weft.report.sources import measured, one_call, simulated
from weft.report.sweep import on_ranks, resized, sizes_up_to, sweep, wanted
from weft.schedule.measure import measure
from weft.simulate.clusters import cluster


def test_the_first_table_of_a_toy():
    found = summary(Case("toy", two_ranks()))
    assert found["seconds"] == 4.0
    assert found["compute"] == (2 + 2) / 2 / 4
    assert found["exposed"] == (0 + 2) / 2 / 4
    assert found["idle"] == (2 + 0) / 2 / 4
    assert found["overlap"] == 0.5
    assert found["slowest"] == [1]


def test_shares_of_every_simulated_case_add_up():
    case = simulated(schedule(), topology())
    found = summary(case)
    assert found["compute"] + found["exposed"] + found["idle"] == pytest.approx(1.0)


def test_numbers_agree_with_the_schedule():
    plan = schedule("usp:2x2+balanced")
    case = simulated(plan, topology(), ["ring", "ulysses"])
    known, found = measure(plan), numbers(case)
    assert found["loads"]["after"] == known.work
    assert found["loads"]["before"] == measure(schedule("usp:2x2")).work
    assert found["loads"]["imbalance"] == pytest.approx(known.imbalance)
    assert found["loads"]["imbalance"] <= found["loads"]["imbalance_before"]
    assert found["per_rank"]["memory"] == list(peak_memory(plan))
    assert np.array_equal(found["traffic"], known.matrix())
    assert found["flops"] == 4 * 16 * sum(known.work)
    assert {p["plan"] for p in found["plans"]} == {"usp:2x2+balanced", "ring", "ulysses"}
    assert sorted({p["gpus"] for p in found["scaling"]}) == [1, 2, 4]


def test_one_state_only_says_why():
    plain = simulated(schedule("ring"), topology()).loads
    assert plain.before == () and plain.bound == 1.0 and "not balanced" in plain.note
    even = simulated(schedule("ulysses+balanced", heads=8, mask="dense"), topology()).loads
    assert even.before == () and "changes nothing" in even.note
    other = simulated(replace(schedule("ring"), name="mine"), topology()).loads
    assert (other.before, other.bound) == ((), None) and "unknown" in other.note
    traced = measured(two_ranks()).loads
    assert (traced.before, traced.bound) == ((), None) and "schedule.json" in traced.note
    assert numbers(measured(two_ranks()))["loads"]["mean"] == 2.0


def test_heads_that_were_assigned_have_a_before():
    plain = schedule("ulysses")
    groups = ((0, 5), (1,), (2, 4), (3,))
    rows = np.zeros((4, plain.mask.q_blocks), dtype=np.int64)
    given = Assignment(whole(groups), rows, rows, plain.mask.block_q, plain.mask.block_k)
    assigned = build("ulysses", plain.problem, plain.mask, topology(), assignment=given)
    loads = simulated(assigned, topology()).loads
    assert loads.before == measure(plain).work and loads.after == measure(assigned).work != loads.before


def test_own_tensors_are_less_than_the_peak():
    case = simulated(schedule(), topology())
    assert all(0 < home <= peak for home, peak in zip(case.home_memory, case.memory, strict=True))


def test_of_several_calls_the_median_one_is_shown():
    toy = two_ranks()
    spans = [
        s._replace(call=call, start=10 * call + s.start * factor, end=10 * call + s.end * factor)
        for call, factor in enumerate((1.5, 0.5, 1.0))
        for s in toy.spans
    ]
    found = one_call(replace(toy, spans=tuple(spans)))
    assert found.seconds == pytest.approx(4.0)
    assert {s.call for s in found.spans} == {2}
    assert min(s.start for s in found.spans) == 0.0


def test_a_forward_is_shown_and_a_backward_counted():
    toy = two_ranks()
    # A forward, its backward of twice the time, a slower forward, its backward.
    spans = tuple(
        s._replace(
            call=call,
            start=20 * call + s.start * factor,
            end=20 * call + s.end * factor,
            name=s.name.replace("attend", "gradient") if call % 2 else s.name,
        )
        for call, factor in enumerate((1.0, 2.0, 1.2, 2.4))
        for s in toy.spans
    )
    case = measured(replace(toy, spans=spans))
    assert {s.call for s in case.timeline.spans} == {0} and case.timeline.seconds == 4.0
    assert case.calls == "the median of 2 forward calls; 2 backward in the trace"
    backward = measured(replace(toy, spans=tuple(s for s in spans if s.call == 1)))
    assert backward.calls == "the backward call" and backward.timeline.seconds == 8.0


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="has 2 ranks, its schedule has 4"):
        measured(two_ranks(), schedule())
    with pytest.raises(InputError, match="for 4 ranks, 8xh100 has 8"):
        simulated(schedule(), cluster("8xh100"))
    with pytest.raises(InputError, match="no spans"):
        measured(Timeline("empty", 2, ()))


def test_machines_are_kept_whole():
    big = cluster("4x8xh100")
    assert (resized(big, 16).machines, resized(big, 16).devices, resized(big, 16).name) == (2, 8, "2x8xh100")
    assert (resized(big, 3).machines, resized(big, 3).devices, resized(big, 3).name) == (1, 3, "3xh100")
    assert resized(big, 64).ranks == 64
    assert resized(replace(big, name="box 1"), 3).name == "box 1", "an x in a name is no size"
    with pytest.raises(InputError, match="must be a multiple of 8") as caught:
        resized(big, 12)
    assert "Try 8 or 16" in caught.value.hint
    assert sizes_up_to(cluster("3x5xh100")) == [1, 2, 4, 5, 10, 15]


def test_a_sweep_has_every_plan_at_every_size():
    plan = schedule()
    clusters = [resized(topology(), n) for n in (1, 2, 4)]
    found = list(sweep(lambda n: on_ranks(plan.problem, n), plan.mask, clusters, ("auto", "ring")))
    assert [(f.point.gpus, f.cluster.ranks) for f in found] == [(1, 1)] * 2 + [(2, 2)] * 2 + [(4, 4)] * 2
    assert all(f.point.seconds == f.timeline.seconds for f in found)
    assert all(f.point.inter_bytes == 0 for f in found if f.point.gpus < 4)
    assert any(f.point.inter_bytes for f in found if f.point.gpus == 4)


def test_all_is_every_candidate_once():
    plan = schedule()
    names = wanted(plan.problem, plan.mask, topology(), ("ring", "all"))
    assert names[0] == "ring" and len(names) == len(set(names)) > 5
    with pytest.raises(InputError, match="usp:4x4 needs 16"):
        wanted(plan.problem, plan.mask, topology(), ("usp:4x4",))
