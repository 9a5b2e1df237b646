"""Limits on predicted time: what is refused, with which numbers, and on how few ranks a job may run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.serving_simulator import SimulatedJob, simulate
from tests.serve.ranks import FACTS
from weft.core.topology import Topology
from weft.serve.admission import STALE_SECONDS, Admission
from weft.serve.batch import Batch
from weft.serve.jobs import JobShape
from weft.serve.latency import Latency
from weft.serve.scheduler import POLICIES, elastic

DEFAULT = JobShape(frames=16, height=64, width=64, steps=10, guided=True)
OPENAI = JobShape(frames=32, height=1280, width=720, steps=10, guided=True)
"""What OpenAI's client asks for by default: 720x1280, 4 seconds."""
LONG = JobShape(frames=16, height=512, width=512, steps=10, guided=True)


class Timed(Admission):
    """As the simulator wants it."""

    @property
    def topology(self) -> Topology:
        return self.latency.topology


def admission(ranks: int = 2, *, slow: float = 1.0, **limits: Any) -> Timed:
    """Of a machine that takes so many times what is predicted, as was seen in twenty steps of each size."""
    latency = Latency(FACTS, Topology.local(ranks), clock=limits.pop("clock", lambda: 0.0))
    for shape in (DEFAULT, LONG):
        for size in latency.sizes:
            latency.observe(shape, size, 1, slow * latency.predicted(shape, size), steps=20)
    return Timed(latency, **limits)


def test_the_default_size_of_openais_client_is_refused_with_the_numbers() -> None:
    admits = admission(slow=0.01)
    assert admits.refusal(DEFAULT) is None
    refused = admission().refusal(OPENAI)
    assert refused is not None
    assert (refused.status, refused.code, refused.param) == (400, "too_long", "size")
    seconds = admission().latency.alone(OPENAI)
    for words in (
        f"{seconds:,.0f} s in all",
        "admits 3,600 s",
        "admits 30 s",
        "16 frames of 64x64 in 10 steps",
    ):
        assert words in refused.message


@pytest.mark.parametrize("slow", [0.01, 1.0, 150.0, 1e6])
def test_the_models_default_request_is_admitted_on_any_machine(slow: float) -> None:
    admits = admission(slow=slow)
    assert admits.refusal(DEFAULT) is None
    assert admits.max_time >= max(3600, 9.9 * admits.latency.alone(DEFAULT))
    assert admits.max_step >= 30


def test_the_limit_on_all_of_it_names_the_steps_that_fit() -> None:
    seconds = admission().latency.alone(LONG)
    admits = admission(max_time=seconds / 2, max_step=1e9)
    refused = admits.refusal(LONG)
    assert refused is not None
    assert refused.param == "num_inference_steps"
    steps = int(refused.message.partition("Ask for ")[2].split()[0])
    assert 3 <= steps <= 5
    assert admits.refusal(replace(LONG, steps=steps)) is None
    assert admits.refusal(replace(LONG, steps=steps + 1)) is not None


def test_step_far_larger_than_all_observed_needs_a_margin_below_the_limit() -> None:
    latency = Latency(FACTS, Topology.local(1))
    latency.observe(DEFAULT, 1, 1, latency.predicted(DEFAULT, 1), warmup=True)
    step, default = latency.step(LONG, 1), latency.step(DEFAULT, 1)
    admits = Admission(latency, max_step=1.2 * step)
    refused = admits.refusal(LONG)
    assert refused is not None
    assert "nothing nearly as large was observed yet" in refused.message
    assert Admission(latency, max_step=1.6 * step).refusal(LONG) is None
    assert Admission(latency, max_step=1.01 * default).refusal(DEFAULT) is None
    latency.observe(LONG, 1, 1, step, steps=20)
    assert admits.refusal(LONG) is None


def test_a_limit_below_the_default_request_is_the_operators_wish() -> None:
    assert admission(max_time=1e-4).refusal(DEFAULT, idle=True) is not None
    assert admission(max_step=1e-5).refusal(DEFAULT, idle=True) is not None


def test_memory_comes_first() -> None:
    admits = admission()
    admits.latency.limit = 1e6
    refused = admits.refusal(OPENAI)
    assert refused is not None
    assert refused.code == "out_of_memory"
    assert f"take about {admission().latency.alone(OPENAI):,.0f} s" in refused.message


@pytest.mark.parametrize(("policy", "turns"), [("all", 8), ("one", 2)])
def test_several_images_of_one_request_count_together(policy: str, turns: int) -> None:
    image = replace(DEFAULT, frames=1)
    latency = admission(4).latency
    for size in (1, 2, 4):
        latency.observe(image, size, 1, 1.0, steps=20)
    whole = latency.total(image, 4 if policy == "all" else 1)
    enough, less = ((turns + by) * whole for by in (0.1, -0.1))
    assert Admission(latency, policy=policy, max_time=enough).refusal(image, jobs=8) is None
    refused = Admission(latency, policy=policy, max_time=less).refusal(image, jobs=8)
    assert refused is not None
    assert (refused.code, refused.param) == ("too_long", "n")
    assert refused.message.startswith("8 images of 64x64 in 10 steps would take about")
    assert Admission(latency, policy=policy, max_time=less).refusal(image) is None


def test_the_scheduler_gives_no_job_so_few_ranks_that_a_step_is_too_long() -> None:
    latency = admission(4).latency
    for size, seconds in {1: 10.0, 2: 7.0, 4: 6.0}.items():  # where few ranks cost least
        latency.observe(LONG, size, 1, seconds, steps=20)
    times, bounded = Admission(latency, max_step=20.0), Admission(latency, max_step=8.0)
    assert [math.isfinite(bounded.step(LONG, size)) for size in (1, 2, 4)] == [False, True, True]
    tasks = [Batch(id=f"{at}", jobs=[f"{at}"], shape=LONG, arrived=0.0, deadline=1e9) for at in range(4)]
    assert {len(grant.ranks) for grant in elastic(tasks, 0.0, 4, times)} == {1}
    assert min(len(grant.ranks) for grant in elastic(tasks, 0.0, 4, bounded)) >= 2
    assert {len(grant.ranks) for grant in POLICIES["one"](tasks, 0.0, 4, bounded)} == {2}


def test_what_has_become_too_long_still_runs_where_it_is_fastest() -> None:
    """It was admitted; then the machine became slow."""
    late = admission(4, max_step=1e-5)
    assert [math.isfinite(late.step(LONG, size)) for size in (1, 2, 4)] == [False, False, True]
    task = Batch(id="a", jobs=["a"], shape=LONG, arrived=0.0, deadline=1.0)
    assert [grant.ranks for grant in elastic([task], 0.0, 4, late)] == [(0, 1, 2, 3)]


@pytest.mark.parametrize("policy", ["all", "one"])
def test_time_is_that_on_the_ranks_that_the_policy_gives(policy: str) -> None:
    latency = admission(2).latency
    for _ in range(20):  # on both ranks a small one is slower
        latency.observe(DEFAULT, 2, 1, 5 * latency.predicted(DEFAULT, 1))
    seconds = {size: latency.total(DEFAULT, size) for size in (1, 2)}
    assert seconds[1] < seconds[2] / 2
    limited = Admission(latency, policy=policy, max_time=seconds[1] * 1.5)
    assert (limited.refusal(DEFAULT) is None) == (policy == "one")


def test_an_idle_server_that_measured_long_ago_measures_again() -> None:
    now = 0.0
    admits = admission(slow=150, clock=lambda: now, max_time=1.0)
    assert admits.refusal(DEFAULT, idle=True) is not None, "what was measured is fresh"
    now = STALE_SECONDS + 1
    assert admits.refusal(DEFAULT, idle=False) is not None
    assert admits.refusal(DEFAULT, idle=True) is None
    assert admits.refusal(LONG, idle=True) is not None
    assert admits.refusal(replace(DEFAULT, steps=999), idle=True) is not None
    admits.latency.observe(DEFAULT, 1, 1, 100.0)
    assert admits.refusal(DEFAULT, idle=True) is not None


def test_what_is_told_of_limits_is_json() -> None:
    admits = admission(max_time=600, max_step=5)
    said = json.loads(json.dumps(admits.to_json(), allow_nan=False))
    assert said["limits"] == {"max_time_seconds": 600, "max_step_seconds": 5, "memory_bytes_per_rank": None}
    assert said["default"]["size"] == "64x64"
    assert 0 < said["default"]["seconds"] < 600
    plan = json.loads(json.dumps(admits.explain(OPENAI), allow_nan=False))
    assert (plan["admitted"], "would take about" in plan["refusal"]) == (False, True)
    assert plan["seconds"] > 600
    assert plan["step_seconds"] == min(admits.latency.step(OPENAI, size) for size in (1, 2))
    assert admits.explain(DEFAULT)["refusal"] is None
    admits.latency.limit = 1e6
    json.dumps([admits.explain(DEFAULT), admits.to_json()], allow_nan=False)


def test_a_server_knows_whether_the_one_before_had_other_limits(tmp_path: Path) -> None:
    path = tmp_path
    assert admission().differs_from(path)
    assert not admission().differs_from(path)
    assert admission(max_time=5).differs_from(path)
    assert admission(4, max_time=5).differs_from(path)
    assert not admission(4, max_time=5).differs_from(path)
    (path / "limits.json").write_bytes(b"\xff")
    assert admission(4, max_time=5).differs_from(path)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("came", [0.5, 25.0, 100.0])
@pytest.mark.parametrize("deadline", [None, 1e-3])
def test_an_image_waits_for_one_step_of_the_longest_video_and_no_more(
    ranks: int, came: float, deadline: float | None
) -> None:
    times = admission(ranks)
    step = min(times.latency.step(LONG, size) for size in times.latency.sizes)
    slow = admission(ranks, slow=30 / step, max_step=30.1)
    image = replace(DEFAULT, frames=1)
    assert slow.refusal(LONG) is None
    alone = slow.latency.alone(image)
    jobs = [
        SimulatedJob(0.0, LONG, slow.allowed(LONG, deadline)),
        SimulatedJob(came, image, came + 3 * alone),
    ]
    outcome = simulate(jobs, elastic, slow)  # type: ignore[arg-type]
    assert outcome.latencies[1] <= slow.max_step + alone + 2
