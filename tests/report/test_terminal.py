"""Terminal views: never wider than asked, the slowest always there, what most of a column is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.report.toys import schedule, two_ranks
from weft.core.timeline import Span, Timeline
from weft.report.terminal import load_lines, text_gantt
from weft.simulate.clusters import cluster
from weft.simulate.events import simulate


def test_a_toy_is_drawn_to_scale():
    first, second, axis, legend = text_gantt(two_ranks(), width=53)
    assert first == "rank 0  " + "█" * 20 + " " * 20 + "  50%"
    assert second == "rank 1  " + "█" * 10 + "░" * 20 + "█" * 10 + "  50%"
    assert axis.endswith("4.00 s") and "waits" in legend


@pytest.mark.parametrize("ranks", [1, 3, 4, 17])
def test_no_line_is_wider_than_80(ranks):
    name = f"{ranks}xh100"
    timeline = simulate(schedule("ring", cluster=cluster(name), tokens=1700), cluster(name))
    lines = text_gantt(timeline)
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(f"rank {timeline.slowest} ") for line in lines)
    assert max(map(len, load_lines(timeline.computing.tolist(), 1.0))) <= 80


def test_an_empty_timeline_is_blank():
    lines = text_gantt(Timeline("none", 2, ()))
    assert lines[0].split() == ["rank", "0", "0%"]


def test_bars_are_as_long_as_loads_and_show_the_extremes():
    lines = load_lines([1, 2, 3, 2], 1.2)
    bars = [line.count("█") for line in lines[:-1]]
    assert bars[2] > bars[1] == bars[3] > bars[0]
    assert "1.500×" in lines[2] and "bound 1.200×" in lines[-1]
    many = load_lines([*range(1, 40)], 1.0)
    assert len(many) == 9 and any(line.startswith("rank 38") for line in many)


def test_loads_of_nothing_are_bars_of_nothing():
    assert all("█" not in line for line in load_lines([0, 0, 0]))


def test_a_host_that_is_behind_is_waiting():
    late = Span(1, "compute", "launch", "launches", 4.0, 8.0)
    first, second, *_ = text_gantt(replace(two_ranks(), spans=(*two_ranks().spans, late)), width=53)
    assert second == "rank 1  " + "█" * 5 + "░" * 10 + "█" * 5 + "░" * 20 + "  25%"
    assert "░" not in first
