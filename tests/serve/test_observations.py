"""Estimates from observed durations: on step times recorded from the shipped model, and on made-up ones."""

from __future__ import annotations

import json
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from weft.core import tables
from weft.core.topology import Topology
from weft.serve.jobs import JobShape
from weft.serve.latency import Latency
from weft.serve.model_facts import ModelFacts
from weft.serve.observations import (
    MAX_KEYS,
    WINDOW_STEPS,
    Observations,
    PredictedCost,
    WeightedPoint,
    fit_line,
)

RECORDED = json.loads(Path(__file__).with_name("recorded_steps.json").read_text())
"""Of `weft serve` with the shipped model on 2 ranks (two cores), by policies `one` and `all`: warm-ups, steps
as [mean seconds, steps], and the time around steps. One server was started beside four busy loops, which
ended when it was ready."""
FACTS = tables.read(ModelFacts, RECORDED["facts"], "recorded_steps.json")
RUNS = sorted(RECORDED["runs"])
SIZES = sorted({tuple(row[:5]) for run in RUNS for row in RECORDED["runs"][run]["steps"]})


def shape(frames: int, height: int, width: int, guided: bool, steps: int = 30) -> JobShape:  # noqa: FBT001
    return JobShape(frames=frames, height=height, width=width, guided=guided, steps=steps)


def recorded(run: str) -> dict[tuple[Any, ...], list[float]]:
    """Seconds of each step, by size and ranks."""
    return {
        tuple(row[:5]): [seconds for seconds, steps in row[5] for _ in range(steps)]
        for row in RECORDED["runs"][run]["steps"]
    }


def started(run: str) -> Latency:
    """A server that has only warmed up."""
    latency = Latency(FACTS, Topology.local(2))
    for *size, ranks, seconds in RECORDED["runs"][run]["warmups"]:
        latency.observe(shape(*size), ranks, 1, seconds, warmup=True)
    return latency


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("seen", SIZES)
def test_twenty_steps_of_one_size_predict_other_step_counts_and_sizes(
    run: str, seen: tuple[Any, ...]
) -> None:
    times, latency = recorded(run), started(run)
    *size, ranks = seen
    for seconds in islice(cycle(times[seen]), 20):
        latency.observe(shape(*size, steps=20), ranks, 1, seconds)
    for steps in (1, 7, 50, 999):
        assert latency.step(shape(*size, steps=steps), ranks) == pytest.approx(median(times[seen]), rel=0.25)
    others = [other for other in times if other[3:] == seen[3:]]
    assert len(others) > 3
    for *other, _ in others:
        ratio = latency.step(shape(*other), ranks) / median(times[(*other, ranks)])
        assert 1 / 2 < ratio < 2, f"{other} is predicted at {ratio:.2f} of its time"


@pytest.mark.parametrize("run", RUNS)
def test_all_sizes_that_were_seen_predict_the_one_that_was_not(run: str) -> None:
    times = recorded(run)
    for left_out, truth in times.items():
        latency = started(run)
        for key, each in times.items():
            if key != left_out:
                for seconds in each:
                    latency.observe(shape(*key[:4]), key[4], 1, seconds)
        assert 1 / 2 < latency.step(shape(*left_out[:4]), left_out[4]) / median(truth) < 2


def test_what_a_loaded_start_measured_does_not_stick() -> None:
    """Warm-ups 150 times too slow, as were seen once; then one small image on one rank."""
    latency = Latency(FACTS, Topology.local(2))
    times = recorded("started idle")
    for *size, ranks, seconds in RECORDED["runs"]["started idle"]["warmups"]:
        latency.observe(shape(*size), ranks, 1, 150 * seconds, warmup=True)
    assert latency.alone(shape(16, 64, 64, True)) > 100
    for seconds in times[1, 64, 64, True, 1]:
        latency.observe(shape(1, 64, 64, True, steps=20), 1, 1, seconds)
    for ranks in (1, 2):
        ratio = latency.step(shape(16, 64, 64, True), ranks) / median(times[16, 64, 64, True, ranks])
        assert 1 / 2 < ratio < 2


@pytest.mark.parametrize("ratio", [0.25, 0.5, 2.0, 4.0])
def test_steps_on_two_ranks_correct_the_estimate_for_one(ratio: float) -> None:
    """If steps are slower than while warming up, half of that may be waiting, which one rank does not."""
    observations, costs = Observations(0.05), {ranks: PredictedCost(1.2 / ranks, ranks) for ranks in (1, 2)}
    for ranks, cost in costs.items():
        observations.add(ranks, cost, 2 * cost.seconds, warmup=True)
    before = {ranks: observations.estimate(ranks, cost) for ranks, cost in costs.items()}
    observations.add(2, costs[2], ratio * before[2], steps=WINDOW_STEPS)
    after = {ranks: observations.estimate(ranks, cost) for ranks, cost in costs.items()}
    assert after[2] == pytest.approx(ratio * before[2], rel=0.01)
    assert after[1] == pytest.approx(min(ratio, ratio**0.5) * before[1], rel=0.1)


def test_a_loaded_moment_is_forgotten_after_twenty_steps() -> None:
    latency = Latency(FACTS, Topology.local(2))
    for seconds in [1.0] * 50 + [0.05] * WINDOW_STEPS:
        latency.observe(shape(16, 64, 64, True), 2, 1, seconds)
    assert latency.step(shape(16, 64, 64, True), 2) == pytest.approx(0.05, rel=0.01)
    latency.observe(shape(16, 64, 64, True), 2, 1, 1.0)
    assert latency.step(shape(16, 64, 64, True), 2) == pytest.approx(0.05, rel=0.01), (
        "one slow step is no news"
    )


@pytest.mark.parametrize("run", RUNS)
def test_time_around_steps_is_a_constant_and_a_part_by_the_pixel(run: str) -> None:
    latency = Latency(FACTS, Topology.local(2))
    rows = RECORDED["runs"][run]["fixed"]
    for frames, height, width, seconds in rows:
        latency.observe_fixed(shape(frames, height, width, True), seconds)
    for frames, height, width in {tuple(row[:3]) for row in rows}:
        truth = median(row[3] for row in rows if row[:3] == [frames, height, width])
        assert latency.fixed(shape(frames, height, width, True)) == pytest.approx(truth, rel=0.6, abs=0.05)
    assert latency.fixed(shape(16, 512, 512, True)) < 10


def test_one_slow_file_of_an_image_is_no_slow_file_of_a_video() -> None:
    latency = Latency(FACTS, Topology.local(2))
    before = latency.alone(shape(16, 720, 1280, True))
    latency.observe_fixed(shape(1, 64, 64, True), 0.3)
    assert latency.fixed(shape(1, 64, 64, True)) == pytest.approx(0.3)
    assert latency.alone(shape(16, 720, 1280, True)) == pytest.approx(before + 0.3, abs=0.1)


def test_a_constant_for_each_number_of_ranks_and_one_slope() -> None:
    """Two ranks wait 20 ms for messages; both compute at the same speed, twice that of the closed form."""
    seen = Observations(overhead=0.05)
    for x in (0.01, 0.04, 1.0):
        for ranks, wait in ((1, 0.0), (2, 0.02)):
            for _ in range(10):
                seen.add((x, ranks), PredictedCost(x, ranks), wait + 0.5 * x)
    assert seen.estimate("new", PredictedCost(0.02, 2)) == pytest.approx(0.03, rel=0.05)
    assert seen.estimate("new", PredictedCost(0.02, 1)) == pytest.approx(0.01, rel=0.05)
    assert seen.estimate("new", PredictedCost(10.0, 4)) == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.02, 100.0), (2.0, 19500), (0.001, 10)],
    ids=["overhead", "a slow machine", "a fast machine"],
)
def test_one_point_is_a_constant_if_that_is_plausible_and_else_a_slope(
    seconds: float, expected: float
) -> None:
    line = fit_line([WeightedPoint(1, 0.01, seconds)], overhead=0.05)
    assert line(0.01, 1) == pytest.approx(seconds)
    assert line(100.0, 1) == pytest.approx(expected, rel=0.01)


def test_neither_constant_nor_slope_is_below_zero() -> None:
    falling = fit_line([WeightedPoint(1, 1.0, 9.0), WeightedPoint(1, 9.0, 1.0)], overhead=0.05)
    assert falling.slope >= 0
    steep = fit_line(
        [WeightedPoint(1, 1.0, 0.1), WeightedPoint(1, 2.0, 9.0), WeightedPoint(2, 1.0, 5.0)], overhead=0.05
    )
    assert min(steep.constants.values()) >= 0


def test_the_number_of_keys_is_bounded_and_odd_times_are_left_out() -> None:
    seen = Observations(overhead=0.05)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        seen.add("odd", PredictedCost(1.0), seconds)
    assert len(seen) == seen.steps == 0
    assert seen.estimate("odd", PredictedCost(3.0)) == 3.0
    for key in range(3 * MAX_KEYS):
        seen.add(key, PredictedCost(1.0 + key), 1.0)
    assert len(seen) == MAX_KEYS
    assert 3 * MAX_KEYS - 1 in seen
    for _ in range(100):  # the others are so old that their weight vanishes
        seen.add("new", PredictedCost(2.0), 5.0, steps=10_000)
    assert seen.estimate("new", PredictedCost(2.0)) == pytest.approx(5.0, rel=0.01)
    assert seen.estimate("another", PredictedCost(2.0)) == pytest.approx(5.0, rel=0.05)


def test_a_thread_estimates_while_another_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may come between any two steps of this one: here it does."""
    seen = Observations(overhead=0.05)
    seen.add("first", PredictedCost(1.0), 1.0)
    weight = seen._weight

    def meanwhile(each: Any) -> float:
        seen.add(len(seen), PredictedCost(1.0), 1.0)
        return weight(each)

    monkeypatch.setattr(seen, "_weight", meanwhile)
    assert seen.estimate("other", PredictedCost(2.0)) > 0


def test_loads_that_change_do_not_let_large_sizes_look_cheap() -> None:
    """Small steps were seen under load, larger ones not: the line through both falls."""
    steps = Observations(overhead=0.05)
    steps.add("image", PredictedCost(0.01, ranks=1), 0.3, steps=20)
    steps.add("video", PredictedCost(0.05, ranks=1), 0.2, steps=20)
    assert steps.estimate("large", PredictedCost(1000.0, ranks=1)) > 250.0
