"""The verdict: of timelines with exactly one cause it names the cause and the rank, link or machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random, SystemRandom

import pytest

from tests.report.drawn_causes import CAUSES, attend_seconds
from tests.report.toys import schedule, topology
from weft.cli.workload import Workload
from weft.core.timeline import Span, Timeline
from weft.plan.choose import build
from weft.report.replay import Replay
from weft.report.verdict import cause_of, sentence
from weft.simulate.clusters import cluster
from weft.simulate.events import simulate


def right(seed: str, draws: int) -> Counter[str]:
    """Count, by cause, the draws that are named with what they name."""
    named: Counter[str] = Counter()
    for draw in CAUSES:
        for number in range(draws):
            drawn = draw(Random(f"{draw.__name__} {seed} {number}"))
            named[draw.__name__] += drawn.holds(cause_of(drawn.timeline, drawn.schedule, drawn.topology))
    return named


def test_causes_and_their_ranks_are_named() -> None:
    named = right("fixed", 4)
    assert len(named) == 12
    assert min(named.values()) >= 3 and named.total() >= 47, named


@pytest.mark.soak
def test_causes_of_fresh_draws_are_named() -> None:
    seed = str(SystemRandom().random())
    named = right(seed, 20)
    assert named.total() >= 230, (seed, named)


def test_a_replay_without_changes_is_the_timeline() -> None:
    for draw in CAUSES:
        timeline = draw(Random(draw.__name__)).timeline
        replay = Replay(timeline)
        assert replay.seconds == pytest.approx(timeline.seconds)
        assert replay.ends() == pytest.approx(
            [span.end for span in replay.spans], abs=1e-9 * timeline.seconds
        )


def test_equal_work_at_uneven_speed_is_not_uneven_work() -> None:
    plan, machine = schedule("ring", mask="dense", cluster=topology("3xh100")), topology("3xh100")
    seconds = attend_seconds(plan, machine)
    slow = {i: took * (1.34 if plan.ops[i].rank == 1 else 1.0) * 100 for i, took in seconds.items()}
    timeline = replace(simulate(plan, machine, seconds=slow), measured=True)
    for known in ((plan, machine), (plan, None)):
        cause = cause_of(timeline, *known)
        assert (cause.kind, cause.rank) == ("slow rank", 1) and cause.factor == pytest.approx(1.34, rel=0.1)
        assert "Uneven speed" in sentence(cause, timeline) and "rank 1" in sentence(cause, timeline)
    alone = cause_of(timeline)
    assert (alone.kind, alone.rank) == ("uneven computing", 1)
    assert "schedule.json" in sentence(alone, timeline)


def test_the_unbalanced_plan_of_the_readme_is_uneven_work_of_rank_2() -> None:
    work = Workload.read("wan2.1-14b", size="", frames=0, mask="sta:dense=0.1", block=64, dtype="bfloat16")
    machine = cluster("8xh100")
    plan = build("ulysses", work.problem(8), work.mask, machine)
    timeline = simulate(plan, machine, memory=False)
    cause = cause_of(timeline, plan, machine)
    assert (cause.kind, cause.rank) == ("uneven work by head", 2)
    text = sentence(cause, timeline)
    assert text.startswith("Uneven work costs most: the heads of rank 2 have 3.44× the mean load.")


def test_waiting_is_charged_to_the_rank_that_is_waited_for() -> None:
    """Rank 1 waits for what rank 0 sends after computing for long; rank 2 waits for rank 1."""
    spans = (
        Span(0, "compute", "attend", "attend", 0.0, 9.0, op=0),
        Span(0, "comm", "send", "kv", 9.0, 9.5, op=1, peer=1, num_bytes=8),
        Span(1, "compute", "attend", "attend", 0.0, 1.0, op=0),
        Span(1, "compute", "wait", "kv", 1.0, 9.5, op=1, peer=0),
        Span(1, "comm", "send", "kv", 9.5, 10.0, op=2, peer=2, num_bytes=8),
        Span(2, "compute", "attend", "attend", 0.0, 1.0, op=0),
        Span(2, "compute", "wait", "kv", 1.0, 10.0, op=2, peer=1),
    )
    cause = cause_of(Timeline("chain", 3, spans))
    assert (cause.kind, cause.rank, cause.seconds) == ("uneven computing", 0, pytest.approx(8.0))


def test_timelines_without_spans_have_no_cause() -> None:
    assert cause_of(Timeline("none", 3, ())).kind == "nothing"
    assert "Little is lost" in sentence(cause_of(Timeline("none", 3, ())), Timeline("none", 3, ()))
