"""The simulator: what it counts, that nothing starves, and that the elastic policy earns its place."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from bench.serving_simulator import SimulatedJob, arrivals, bound, least_work, simulate, table
from weft.core.errors import InputError
from weft.core.topology import Topology
from weft.serve.jobs import JobShape
from weft.serve.latency import Latency
from weft.serve.model_facts import ModelFacts
from weft.serve.scheduler import POLICIES, STARVATION_FACTOR, elastic
from weft.simulate.clusters import cluster

FACTS = ModelFacts(
    model="small", heads=8, head_dim=32, depth=6, patch=(4, 8, 8), text_tokens=8, params=7_000_000
)
IMAGE = JobShape(frames=1, height=64, width=64, steps=8, guided=True)
VIDEO = JobShape(frames=64, height=128, width=128, steps=20, guided=True)
SMALL = JobShape(frames=1, height=64, width=64, steps=2, guided=True)
SHORT = JobShape(frames=8, height=64, width=64, steps=6, guided=True)
MIX = {IMAGE: 0.8, VIDEO: 0.2}


def local(ranks: int, **given: float) -> Latency:
    return Latency(FACTS, Topology.local(ranks), **given)


def trace(latency: Latency, load: float = 0.8, count: int = 30, seed: int = 0) -> list[SimulatedJob]:
    return arrivals(latency, load=load, count=count, mix=MIX, seed=seed)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_job_ends_after_what_it_takes_alone(policy: str, ranks: int) -> None:
    latency = local(ranks)
    jobs = trace(latency)
    found = simulate(jobs, POLICIES[policy], latency)
    alone = [latency.alone(job.shape) for job in jobs]
    assert (found.latencies >= np.array(alone) * (1 - 1e-9)).all()
    assert 0 < found.utilization <= 1
    assert 0 <= found.attained <= bound(jobs, latency) + 1e-9
    assert found.moves == 0 or policy == "elastic"


def test_one_job_alone_takes_what_was_predicted() -> None:
    latency = local(4)
    jobs = [SimulatedJob(5.0, VIDEO, 1e9)]
    assert simulate(jobs, elastic, latency).ended[0] == pytest.approx(5 + latency.alone(VIDEO))
    one = simulate(jobs, POLICIES["one"], latency)
    assert one.ended[0] == pytest.approx(5 + latency.total(VIDEO, 1))
    assert one.utilization == pytest.approx(0.25)
    assert one.percentile(50, images=False) == pytest.approx(latency.total(VIDEO, 1))
    assert np.isnan(one.percentile(50, images=True))


def test_a_fifo_waits_for_who_came_before() -> None:
    latency = local(2)
    jobs = [SimulatedJob(0.0, VIDEO, 1e9), SimulatedJob(0.0, IMAGE, 1e9)]
    found = simulate(jobs, POLICIES["all"], latency)
    assert found.ended[1] == pytest.approx(latency.total(VIDEO, 2) + latency.total(IMAGE, 2))


def test_a_video_stops_at_the_end_of_a_step_and_pays_for_going_on() -> None:
    latency = local(1, switch=0.05)
    step = latency.step(VIDEO, 1)
    jobs = [
        SimulatedJob(0.0, VIDEO, 1e3),
        SimulatedJob(1.5 * step, IMAGE, 1.5 * step + 3 * latency.total(IMAGE, 1)),
    ]
    found = simulate(jobs, elastic, latency)
    assert found.moves == 1
    assert found.ended[1] == pytest.approx(2 * step + latency.total(IMAGE, 1))
    assert found.ended[0] == pytest.approx(latency.total(VIDEO, 1) + latency.total(IMAGE, 1) + 0.05)


@pytest.mark.parametrize(("ranks", "load"), [(1, 1.5), (2, 1.5), (4, 0.9)])
def test_a_video_ends_against_an_endless_stream_of_urgent_images(ranks: int, load: float) -> None:
    """Within AGED times its allowance, what came before that, and its time on one rank.

    The stream is longer than that, and by itself more than all ranks can do.
    """
    latency = local(ranks)
    alone, work = latency.alone(SHORT), least_work(latency, SMALL)
    apart, limit = work / ranks / load, STARVATION_FACTOR * 3 * alone
    count = int(2 * (limit + latency.total(SHORT, 1)) / apart)
    jobs = [SimulatedJob(0.0, SHORT, 3 * alone)]
    jobs += [SimulatedJob(at * apart, SMALL, at * apart + 1.2 * latency.alone(SMALL)) for at in range(count)]
    before = sum(job.at <= limit for job in jobs) * work / ranks
    ended = simulate(jobs, elastic, latency).ended[0]
    assert ended <= limit + before + 2 * latency.total(SHORT, 1)
    assert ended < jobs[-1].at, "the stream was not endless enough to show anything"


def most_in_time(jobs: list[SimulatedJob], work: float, ranks: int) -> int:
    """By trying all subsets of jobs of equal work: a set fits if no span of time has too much of it."""
    for size in range(len(jobs), 0, -1):
        for chosen in combinations(jobs, size):
            spans = [(a.at, b.deadline) for a in chosen for b in chosen]
            if all(
                sum(start <= job.at and job.deadline <= end for job in chosen) * work
                <= ranks * (end - start) + 1e-9
                for start, end in spans
                if end > start
            ):
                return size
    return 0


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_above_the_best_choice_and_near_it(seed: int) -> None:
    latency, chance = local(2), np.random.default_rng(seed)
    work = least_work(latency, IMAGE)
    starts = chance.uniform(0, 2 * work, 7)
    jobs = [SimulatedJob(at, IMAGE, at + chance.uniform(0.5, 1.5) * work) for at in starts.tolist()]
    best = most_in_time(jobs, work, 2)
    assert best <= bound(jobs, latency) * 7 + 1e-9
    assert bound(jobs, latency) * 7 < best + 1, "parts of jobs add up to less than one more"


def test_arrivals_bring_the_asked_load_and_the_same_for_a_seed() -> None:
    latency = local(4)
    jobs = trace(latency, load=0.5, count=4000)
    brought = sum(least_work(latency, job.shape) for job in jobs) / (4 * jobs[-1].at)
    assert brought == pytest.approx(0.5, rel=0.1)
    assert jobs == trace(latency, load=0.5, count=4000)
    assert jobs != trace(latency, load=0.5, count=4000, seed=1)
    with pytest.raises(InputError, match="must be > 0, got 0, 30"):
        trace(latency, load=0)


def test_elastic_meets_the_aim_on_a_machine_of_eight() -> None:
    rows = list(table([cluster("8xh100")], loads=(0.8,), seeds=(0,), count=40))
    assert [row["policy"] for row in rows] == list(POLICIES)
    best, *fifos = rows
    assert best["attained"] >= 1.3 * max(row["attained"] for row in fifos)
    assert best["image_p95"] <= 0.5 * min(row["image_p95"] for row in fifos)
    assert all(row["attained"] <= row["bound"] + 1e-9 for row in rows)
