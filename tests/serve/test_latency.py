"""Predictions: from sizes by the planner's closed form, then as seen; and what `GET /v1/plan` says."""

from __future__ import annotations

import json
import math
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest

from bench.serving_simulator import WAN
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.plan.choose import choose
from weft.serve import latency as latencies
from weft.serve.jobs import JobShape
from weft.serve.latency import Latency, mask_density, resized_topology
from weft.simulate.clusters import cluster
from weft.simulate.model_step import step
from weft.simulate.models import ModelSizes

VIDEO = JobShape(frames=81, height=480, width=832, steps=50, guided=True)
IMAGE = JobShape(frames=1, height=480, width=832, steps=50, guided=True)
OTHER = JobShape(frames=1, height=720, width=1280, steps=50, guided=True)


@pytest.fixture
def latency() -> Latency:
    return Latency(WAN, cluster("8xh100"))


def test_a_video_is_cut_into_tokens(latency: Latency) -> None:
    assert latency.grid(VIDEO) == (21, 30, 52)
    assert latency.grid(IMAGE) == (1, 30, 52)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_prediction_is_that_of_the_planner(latency: Latency, ranks: int) -> None:
    """The closed form that it uses is within a few percent of the plan that would be built."""
    plain = replace(VIDEO, guided=False)
    layout = Layout.even(32760, ranks)
    problem = Problem(
        batch=1, heads=40, kv_heads=40, head_dim=128, q=layout, kv=layout, dtype="bfloat16"
    )  # fmt: skip
    topology = resized_topology(latency.topology, ranks)
    plan = choose(problem, BlockMask.dense(40, 32760), topology)
    whole = step(latency.model, (21, 30, 52), plan.ranked[0].seconds, topology).seconds
    assert latency.step(plain, ranks) == pytest.approx(whole, rel=0.03)


def test_linear_layers_are_counted_by_the_parameters(latency: Latency) -> None:
    """Twice the parameters are two operations more for each of them and each token."""
    plain = replace(IMAGE, guided=False)
    double = Latency(replace(WAN, params=2 * WAN.params), latency.topology)
    more = double.step(plain, 1) - latency.step(plain, 1)
    assert more == pytest.approx(2 * WAN.params * 1560 / latency.topology.flops, rel=0.1)


def test_guidance_is_a_second_pass_and_a_batch_takes_as_many(latency: Latency) -> None:
    plain = latency.step(replace(VIDEO, guided=False), 8)
    assert latency.step(VIDEO, 8) == pytest.approx(2 * plain, rel=0.02)
    assert latency.step(VIDEO, 8, jobs=3) == pytest.approx(6 * plain, rel=0.03)
    assert latency.step(IMAGE, 8, jobs=8) < 8 * latency.step(IMAGE, 8), "messages are shared"


def test_more_ranks_save_less_of_an_image_than_of_a_video(latency: Latency) -> None:
    gains = [latency.total(shape, 1) / latency.total(shape, 8) for shape in (IMAGE, VIDEO)]
    assert 4 < gains[0] < gains[1] < 8
    assert latency.alone(VIDEO) == latency.total(VIDEO, 8)


def test_a_sparse_mask_shortens_attention(latency: Latency) -> None:
    sparse = Latency(WAN, cluster("8xh100"), sparse="topk:0.25")
    whole, kept = latency.predicted(VIDEO, 1), sparse.predicted(VIDEO, 1)
    attention = 2 * 40 * 4 * 32760**2 * 5120 / latency.topology.flops
    assert whole - kept == pytest.approx(0.75 * attention, rel=0.05)


SMALL = ModelSizes(name="", layers=4, heads=4, head_dim=8)


@pytest.mark.parametrize(
    ("sparse", "expected"),
    [("topk:0.2", 0.2), ("topk:0.2,dense_steps=0.5", 0.6), ("topk:0.5,tile=2x2x2", 0.5), ("dense", 1.0),
     ("something:new", 1.0), ("random:density=0.25", 0.25)],
)  # fmt: skip
def test_the_density_of_sparse_attention(sparse: str, expected: float) -> None:
    assert mask_density(sparse, (4, 16, 16), SMALL) == pytest.approx(expected, rel=0.15)


def test_observed_steps_correct_predictions_of_all_sizes_ranks_and_step_counts(latency: Latency) -> None:
    before = {shape: latency.step(shape, 2) for shape in (VIDEO, IMAGE, OTHER)}
    for _ in range(30):
        latency.observe(IMAGE, 2, 1, 3 * before[IMAGE])
    assert latency.step(IMAGE, 2) == pytest.approx(3 * before[IMAGE])
    assert latency.step(replace(IMAGE, steps=3), 2) == pytest.approx(3 * before[IMAGE])
    assert latency.step(OTHER, 2) == pytest.approx(3 * before[OTHER], rel=0.3)
    for _ in range(30):
        latency.observe(VIDEO, 4, 1, 0.5 * latency.predicted(VIDEO, 4))
    assert latency.step(VIDEO, 2) == pytest.approx(0.5 * before[VIDEO], rel=0.2), "the same machine"
    assert latency.step(IMAGE, 2) == pytest.approx(3 * before[IMAGE], rel=0.1)


def test_one_slow_step_is_soon_forgotten(latency: Latency) -> None:
    usual = latency.predicted(IMAGE, 1)
    for seconds in [usual] * 5 + [10 * usual] + [usual] * 10:
        latency.observe(IMAGE, 1, 1, seconds)
    assert latency.step(IMAGE, 1) == pytest.approx(usual, rel=0.05)


def test_weights_of_all_parts_count(latency: Latency) -> None:
    more = Latency(
        replace(WAN, bytes=2 * WAN.params + 2**34), latency.topology
    )  # bfloat16, and 16 GiB of text
    assert more.memory(VIDEO, 8) - latency.memory(VIDEO, 8) == 2**34


def test_memory_shrinks_with_ranks_and_limits_them(latency: Latency) -> None:
    one, eight = latency.memory(VIDEO, 1), latency.memory(VIDEO, 8)
    assert 2 * WAN.params < eight < one
    tight = Latency(WAN, cluster("8xh100"), limit=(one + eight) / 2)
    assert tight.step(VIDEO, 1) == math.inf
    assert tight.alone(VIDEO) == latency.total(VIDEO, 8)
    assert list(tight.explain(VIDEO)["seconds_by_ranks"])[-1] == "8"
    assert tight.no_room(VIDEO) is None
    none = Latency(WAN, cluster("8xh100"), limit=1e9)
    assert "any number of ranks" in none.explain(VIDEO)["reason"]
    assert none.explain(VIDEO)["seconds"] is None
    seconds = latency.alone(VIDEO)  # as long as if there were room
    assert f"0.9 are free, and they would take about {seconds:,.0f} s" in str(none.no_room(VIDEO))


def test_an_explanation_names_the_plan_the_seconds_and_the_reason(latency: Latency) -> None:
    said = json.loads(json.dumps(latency.explain(IMAGE)))
    assert said["plan"] == "ulysses"
    assert said["ranks"] == 8
    assert list(said["seconds_by_ranks"]) == ["1", "2", "4", "8"]
    assert said["seconds"] == min(said["seconds_by_ranks"].values()) == latency.alone(IMAGE)
    assert said["reason"].startswith("It is fastest on 8 ranks: 5.")
    assert not said["observed"]
    latency.observe(IMAGE, 8, 1, 1e3)
    slow = latency.explain(IMAGE)
    assert slow["observed"]
    one = Latency(WAN, cluster("1xh100")).explain(IMAGE)["reason"]
    assert one == "It is fastest on 1 rank."


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, (1, 1)), (4, (1, 4)), (8, (1, 8)), (32, (4, 8)), (12, (2, 6))]
)
def test_a_part_of_a_cluster(ranks: int, expected: tuple[int, int]) -> None:
    found = resized_topology(cluster("8x8xh100"), ranks)
    assert (found.machines, found.devices) == expected


HUGE = JobShape(frames=100_000, height=99_984, width=99_984, steps=50, guided=True)


@pytest.mark.parametrize("sparse", [None, "sta"])
def test_a_size_that_nobody_can_make_is_predicted_all_the_same(sparse: str | None) -> None:
    latency = Latency(WAN, cluster("8xh100"), sparse=sparse)
    began = time.monotonic()
    assert latency.explain(HUGE)["seconds"] > 1e9
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_what_is_scaled_takes_as_long(latency: Latency, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    true = latency.predicted(VIDEO, ranks)
    monkeypatch.setattr(latencies, "MAX_PLANNED_TOKENS", 10_000)
    scaled = Latency(WAN, cluster("8xh100"))
    assert scaled.predicted(VIDEO, ranks) == pytest.approx(true, rel=0.01)


def test_what_is_remembered_of_what_was_asked_is_bounded(
    latency: Latency, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("MAX_CACHED_CANDIDATES", "MAX_CACHED_PREDICTIONS"):
        monkeypatch.setattr(latencies, bound, 4)
    latency = Latency(WAN, cluster("8xh100"))
    kept: weakref.WeakSet[Any] = weakref.WeakSet()
    make = latencies._Candidates

    def noted(*given: Any) -> Any:
        kept.add(way := make(*given))
        return way

    monkeypatch.setattr(latencies, "_Candidates", noted)
    for frames in range(1, 90, 8):
        latency.step(replace(IMAGE, frames=frames), 1)
    assert len(kept) <= 4
    assert len(latency._estimates) <= 4
