"""The torus benchmark without a clock: its bound, its timer, and rows that hold or do not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from bench import bed, torus
from bench.rows import Results
from weft.core.mask import BlockMask
from weft.core.topology import Link, Topology
from weft.plan.choose import build
from weft.schedule.measure import measure
from weft.simulate.predict import predict

CARD = 5e7


def topology(machines: int) -> Topology:
    near, far = Link(latency=1e-5, bandwidth=1e11), Link(latency=1e-4, bandwidth=CARD)
    return Topology(machines=machines, devices=2, intra=near, inter=far, nic_bandwidth=CARD, two_sided=True)


@pytest.mark.parametrize("machines", [2, 3, 4])
def test_the_bound_counts_the_bytes_that_a_torus_sends(machines):
    problem = bed.problem_of(144, 2 * machines)
    schedule = build(f"torus:{2 * machines}x1", problem, BlockMask.dense(bed.HEADS, 144), topology(machines))
    links = measure(schedule).link_bytes.items()
    leaving = sum(size for (a, b), size in links if a // 2 == 0 != b // 2)
    assert leaving == bed.least_bytes(problem, machines)


@pytest.mark.parametrize("machines", [2, 3, 4])
def test_rho_is_a_unit_of_compute_over_the_message_it_hides(machines):
    problem = bed.problem_of(288, 2 * machines)
    unit = bed.compute_seconds(problem, bed.flops_for(0.5, problem, CARD)) / machines**2
    queries = problem.q.size * bed.HEADS * bed.DIM * 4 / machines**2  # of one machine, for another one
    assert unit / (queries / CARD) == pytest.approx(0.5)


def test_a_timer_makes_up_for_what_it_overslept(monkeypatch):
    now, asked = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        now[0] += seconds + 0.25

    monkeypatch.setattr(bed.time, "sleep", sleep)
    monkeypatch.setattr(bed.time, "perf_counter", lambda: now[0])
    timer, q = bed.Timer(), torch.zeros(1, 2, 3, 5)
    timer.flops = 4 * 2 * 3 * 7 * 5 / 10.0  # ten seconds for seven keys
    out, lse = timer.attend(q, torch.zeros(1, 2, 7, 5), None, None, 1.0)
    assert timer.attend(q, torch.zeros(1, 2, 7, 5), None, None, 1.0, (out, lse)) == (out, lse)
    assert asked == [10.0, 9.75]
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])


@cache
def cell() -> torus.Cell:
    problem = bed.problem_of(144, 6)
    return torus.cells("bed", topology(3), problem, {1.0: bed.flops_for(1.0, problem, CARD)})[0]


def test_the_torus_is_the_best_that_is_predicted():
    found = cell()
    every = torus.torus_names(3, 2)
    assert len(every) == len(set(every)) == 2 * (3 + 5 + 7)
    mask = BlockMask.dense(bed.HEADS, 144)
    times = [predict(build(n, found.problem, mask, found.topology), found.topology).seconds for n in every]
    assert predict(found.plans[torus.TORUS], found.topology).seconds == min(times)


@pytest.mark.parametrize(
    ("who", "change", "holds"),
    [
        ("torus", {}, True),
        ("torus", {"torus": 1.24, "USP": 1.62}, True),
        ("torus", {"torus": 1.26, "USP": 2.0}, False),  # the bound
        ("torus", {"USP": 1.29}, False),  # the speed-up
        ("torus", {"simulated": 0.86}, False),
        ("planner", {"planner": 1.04}, True),
        ("planner", {"planner": 1.06}, False),
        ("planner", {"planner": 1.04, "swapped": 0.98}, False),
    ],
)
def test_rows_say_what_is_not_kept(monkeypatch, who, change, holds):
    times = {"USP": 1.5, "swapped": 1.5, "torus": 1.0, "planner": 1.0, "simulated": 1.2} | change
    found = cell()
    simulated = replace(predict(found.plans[torus.TORUS], found.topology), seconds=times["simulated"])
    monkeypatch.setattr(torus, "predict", lambda *_: simulated)
    report, wall = Results(), {name: [1e3 * t] * 3 for name, t in times.items()}
    torus.judge(report, found, wall, [1e3] * 3)
    rows = {row.case.split(": ")[1]: row for row in report.rows}
    assert rows[who].holds is holds
    assert rows[who].peer == wall["USP"][0]
