"""The critical path: known on a toy, a chain without gaps on every simulated schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.report.toys import schedule, topology, two_ranks
from weft.core.timeline import Span, Timeline
from weft.report.replay import Replay
from weft.simulate.events import simulate


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    return Replay(timeline).path()


def test_the_path_goes_through_the_send_that_was_waited_for():
    path = [(s.rank, s.kind, s.start, s.end) for s in critical_path(two_ranks())]
    assert path == [(0, "attend", 0.0, 1.0), (0, "send", 1.0, 3.0), (1, "attend", 3.0, 4.0)]


def test_computing_does_not_wait_for_its_own_sends():
    toy = two_ranks()
    longer = toy.spans[1]._replace(peer=1, end=2.0), toy.spans[2]._replace(start=2.0, end=5.0)
    timeline = replace(toy, spans=(toy.spans[0], *longer))
    assert [s.kind for s in critical_path(timeline)] == ["attend", "attend"]


def test_nothing_has_no_path():
    assert critical_path(Timeline("none", 3, ())) == ()


def test_spans_of_no_length_do_not_trap_the_walk():
    toy = two_ranks()
    still = tuple(toy.spans[0]._replace(start=1.0, end=1.0, op=op) for op in range(5, 9))
    path = critical_path(replace(toy, spans=(*toy.spans, *still)))
    assert path[-1].end == 4.0 and len(path) <= 7


@pytest.mark.parametrize("plan", ["ring", "ulysses", "usp:2x2+balanced", "gather", "swapped:2x2"])
def test_a_simulated_path_is_a_chain_from_the_end_to_the_start(plan):
    timeline = simulate(schedule(plan), topology())
    path = critical_path(timeline)
    assert path[-1].end == timeline.seconds
    assert path == critical_path(timeline)
    for before, after in pairwise(path):
        assert before.end <= after.start + 1e-12
        # A message begins when the later of its two ends has posted it.
        assert after.rank in (before.rank, before.peer) or (after.kind, after.peer) == ("send", before.rank)
    gaps = sum(max(0.0, b.start - a.end) for a, b in pairwise(path)) + path[0].start
    assert gaps <= 0.5 * timeline.seconds  # what posts and latencies take has no spans
