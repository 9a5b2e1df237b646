"""Figures as values: to scale, whole, and light even where there is much to draw."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from tests.report.toys import schedule, topology, two_ranks
from weft.core.timeline import Span, Timeline
from weft.report.bars import grouped, load_bars
from weft.report.case import Case
from weft.report.cases import draw, report_cases
from weft.report.curves import roofline, scaling_curve
from weft.report.draw import Dot, Figure, Label, Pixels, Polyline, Rect
from weft.report.gantt import LEFT, MOST_BARS, MOST_RANKS, RIGHT, gantt, shown_ranks
from weft.report.mask_figure import NOBODY, mask_figure, owners, pixels, shown_heads
from weft.report.page import page
from weft.report.palette import DARK, LIGHT, rank_color
from weft.report.png import encode, render
from weft.report.sources import measured, simulated
from weft.report.sweep import SweepPoint
from weft.report.traffic import traffic_matrix
from weft.schedule.measure import measure
from weft.simulate.clusters import cluster
from weft.simulate.events import simulate


def rects(figure: Figure, kind: str) -> list[Rect]:
    return [s for s in figure.shapes if isinstance(s, Rect) and s.kind == kind]


def test_the_timeline_of_a_toy_is_to_scale():
    figure = gantt([Case("toy", two_ranks())])
    scale = (RIGHT - LEFT) / 4.0
    [wait] = rects(figure, "wait")
    [send] = rects(figure, "send")
    assert wait.hatched and (wait.x, wait.width) == pytest.approx((LEFT + scale, 2 * scale))
    assert (send.x, send.width) == pytest.approx((LEFT + scale, 2 * scale))
    assert sum(r.width for r in rects(figure, "attend")) == pytest.approx(4 * scale)
    assert len(rects(figure, "path")) == 3


def test_hops_are_numbered_also_after_some_that_are_drawn_together():
    """Three that are too short to be told apart are one bar, and three hops."""
    edges = [0.0, 0.0001, 0.0002, 0.0003, 1.0, 2.0]
    spans = [Span(0, "compute", "attend", "", a, b, op=0) for a, b in zip(edges, edges[1:], strict=False)]
    figure = gantt([Case("toy", Timeline("toy", 1, tuple(spans)))])
    assert [s.text for s in figure.shapes if isinstance(s, Label) and s.size == 9] == ["4", "5"]


def test_two_timelines_share_one_axis():
    slow = two_ranks(spans=tuple(s._replace(start=2 * s.start, end=2 * s.end) for s in two_ranks().spans))
    figure = gantt([Case("fast", two_ranks()), Case("slow", slow)])
    first, second = rects(figure, "wait")
    assert second.width == pytest.approx(2 * first.width) and second.y > first.y
    assert "fast is 2.00× as fast" in figure.title


def test_a_timeline_that_would_be_a_hair_has_its_own_axis():
    slow = two_ranks(spans=tuple(s._replace(start=99 * s.start, end=99 * s.end) for s in two_ranks().spans))
    figure = gantt([Case("fast", two_ranks()), Case("slow", slow)])
    first, second = rects(figure, "wait")
    assert second.width == pytest.approx(first.width)
    assert "each on its own axis: fast is 99.00× as fast" in figure.title


def test_a_timeline_of_very_many_spans_stays_small():
    kinds = ("attend", "wait")
    spans = tuple(
        Span(rank, "compute", kinds[i % 2], "s", i * 1e-6, (i + 1) * 1e-6)
        for rank in range(64)
        for i in range(600)
    )
    case = Case("many", Timeline("many", 64, spans))
    figure = gantt([case])
    assert len(figure.shapes) < 2 * MOST_BARS
    assert len(shown_ranks(case)) == MOST_RANKS and case.timeline.slowest in shown_ranks(case)


@pytest.mark.parametrize("plan", ["ulysses", "ring", "usp:2x2+balanced", "gather"])
def test_each_active_tile_has_one_owner_who_has_its_work(plan):
    found = schedule(plan)
    for head in range(found.problem.heads):
        tiles, brought = owners(found, head)
        pattern = found.mask.patterns[found.mask.pattern_of[head]]
        assert np.array_equal(tiles != NOBODY, pattern)
        assert (brought >= 0).all() or plan == "gather"
    sizes = np.outer(found.mask.row_sizes, found.mask.col_sizes)
    work = np.zeros(4, dtype=np.int64)
    for head in range(found.problem.heads):
        tiles, _ = owners(found, head)
        for rank in range(4):
            work[rank] += sizes[tiles == rank].sum()
    assert work.tolist() == list(measure(found).work)


def test_a_dense_mask_is_drawn_in_shares_of_the_tokens():
    tiles, _ = owners(schedule("ring", mask="dense"), 0)
    assert (tiles != NOBODY).all() and set(np.unique(tiles)) == {0, 1, 2, 3}
    assert np.bincount(tiles.ravel()).std() / tiles.size < 0.01


def test_heads_of_the_same_ranks_are_shown_once():
    assert len(shown_heads(schedule("ulysses"))) == 4
    assert len(shown_heads(schedule("ring"))) == 1


def test_pixels_are_as_strong_as_they_are_dense():
    tiles = np.full((600, 600), NOBODY, dtype=np.int64)
    tiles[:300] = 1
    image = pixels(tiles, 4, 1)
    assert image.shape == (216, 216, 4)
    assert np.abs(image[0, 0].astype(int) - [0x56, 0xB4, 0xE9, 255]).max() <= 8 and image[-1, 0, 3] == 0


def test_a_page_full_of_noise_stays_below_two_megabytes(tmp_path):
    noise = schedule(
        "ulysses", cluster=cluster("2x4xh100"), heads=8, tokens=12_800, mask="random:density=0.4"
    )
    kinds = ("attend", "wait")
    spans = tuple(
        Span(rank, "compute", kinds[i % 2], "s", i * 1e-6, (i + 1) * 1e-6)
        for rank in range(8)
        for i in range(900)
    )
    case = Case("noise", Timeline("noise", 8, spans), noise, cluster("2x4xh100"))
    report = report_cases([case, case])
    assert len([f for f in report.figures if f.name.startswith("mask")]) >= 2
    assert 500_000 < len(page(report).encode()) < 2_000_000


def test_both_panels_of_a_mask_have_the_same_tiles():
    found = schedule("usp:2x2+balanced")
    case = simulated(found, topology())
    figure = mask_figure(case, found, 0)
    first, second = (s.pixels for s in figure.shapes if isinstance(s, Pixels))
    assert (first[:, :, 3] > 0).sum() == (second[:, :, 3] > 0).sum() > 0


def test_bars_are_to_scale_and_the_title_says_what_they_show():
    case = simulated(schedule("usp:2x2+balanced"), topology())
    figure = load_bars(case)
    for kind, values in (("load-before", case.loads.before), ("load-after", case.loads.after)):
        heights = np.array([r.height for r in rects(figure, kind)])
        assert heights / heights.max() == pytest.approx(np.array(values) / max(values))
    assert f"{case.timeline.ranks * max(case.loads.after) / sum(case.loads.after):.3f}×" in figure.title


def test_the_line_is_the_bound_or_where_there_is_none_the_mean():
    uneven = simulated(schedule("ulysses"), topology())
    for case, name, height in (
        (measured(two_ranks()), "mean", 1.0),
        (uneven, "bound", uneven.loads.bound or 0.0),
    ):
        figure = load_bars(case)
        [line] = [s for s in figure.shapes if isinstance(s, Polyline) and s.dashed]
        assert line.kind == name and any(isinstance(s, Label) and name in s.text for s in figure.shapes)
        assert (", bound " in figure.title) == (name == "bound")
        bars = rects(figure, "load-after")
        least = height * sum(b.height for b in bars) / len(bars)
        assert bars[0].y + bars[0].height - line.points[0][1] == pytest.approx(least)
        assert not rects(figure, "load-before") and case.loads.note in figure.caption


def test_figures_of_two_stand_beside_each_other_if_both_have_them():
    figures, missing = draw([measured(two_ranks()), simulated(schedule("ring"), topology())])
    sides = {figure.name: figure.side for figure in figures}
    assert (sides["loads-a"], sides["loads-b"], sides["traffic-a"], sides["traffic-b"]) == (
        "a",
        "b",
        "a",
        "b",
    )
    assert sides["memory-b"] == sides["mask-head-0-b"] == "" and "memory-a" not in sides
    assert len(missing) == 1 and missing[0].startswith("toy: masks")
    _, same = draw([measured(two_ranks()), measured(two_ranks())])
    assert same and not any(text.startswith("toy") for text in same)


def test_many_ranks_are_grouped_and_the_largest_is_kept():
    values = [*range(1000)]
    found = grouped(values, 128)
    assert len(found) == 128 and found[0][0] == 0 and found[-1][1:] == (999, 999)
    assert grouped([], 128) == [] and grouped([5.0], 128) == [(0, 0, 5.0)]


def test_loads_of_nothing_are_drawn():
    assert load_bars(Case("idle", Timeline("idle", 3, ()))).shapes


def test_the_matrix_has_a_cell_for_each_pair_that_talks():
    case = simulated(schedule("ring"), topology())
    assert len(rects(traffic_matrix(case), "traffic")) == np.count_nonzero(case.traffic)
    large = Case("large", Timeline("large", 64, (Span(0, "comm", "send", "s", 0, 1, peer=63, num_bytes=7),)))
    [picture] = [s for s in traffic_matrix(large).shapes if isinstance(s, Pixels) and s.kind == "traffic"]
    assert picture.pixels[0, 63, 3] == 255 and np.count_nonzero(picture.pixels[:, :, 3]) == 1


def test_colors_of_traffic_start_at_zero():
    sends = [
        Span(0, "comm", "send", "s", 0, 1, peer=peer, num_bytes=n)
        for peer, n in ((1, 1000), (2, 998), (3, 250))
    ]
    figure = traffic_matrix(Case("even", Timeline("even", 4, tuple(sends))))
    assert [rect.strength for rect in rects(figure, "traffic")] == [1.0, 0.998, 0.25]
    words = [s.text for s in figure.shapes if isinstance(s, Label)]
    assert words[-2:] == ["0", "1.00 kB"] and figure.caption.endswith("250 B to 1.00 kB.")


def test_a_plan_that_is_not_the_fastest_has_its_own_point():
    points = [SweepPoint(n, "ring", 1.0 / n, 0, 1, 0, 0, 0) for n in (1, 2, 4)]
    figure = scaling_curve([*points, SweepPoint(4, "ulysses", 0.9, 0, 1, 0, 0, 0)], "ulysses")
    [own] = [s for s in figure.shapes if isinstance(s, Dot) and s.kind == "own"]
    assert own.tip == "ulysses: 900 ms" and "4: ring" in figure.caption
    assert any(isinstance(s, Label) and s.text == "ulysses, of this report" for s in figure.shapes)


def test_a_perfect_curve_is_a_hundred_percent():
    points = [SweepPoint(n, "ring", 1.0 / n, 0, 1, 0, 0, 0) for n in (1, 2, 4)]
    figure = scaling_curve(points)
    words = [s.text for s in figure.shapes if isinstance(s, Label)]
    assert words.count("100%") == 3 and "4 GPUs are 4.00× as fast as 1" in figure.title


def test_a_traced_run_with_its_schedule_is_one_point_below_the_roof():
    machine = topology()
    case = measured(simulate(schedule("ring"), machine), schedule("ring"), machine)
    figure = roofline([case], machine)
    assert sum(isinstance(s, Dot) and s.kind == "plan" for s in figure.shapes) == 1
    share = case.flops / case.ranks / case.timeline.seconds / machine.flops
    assert f"reaches {share:.0%}" in figure.title


def test_colors_are_distinct_to_eight_and_by_machine_beyond():
    assert len({rank_color(rank, 8) for rank in range(8)}) == 8
    many = [rank_color(rank, 32, 4) for rank in range(32)]
    assert [name for name, _ in many] == [f"c{machine}" for machine in range(4) for _ in range(8)]
    assert len(set(many)) == 32
    assert LIGHT.keys() == DARK.keys()


@pytest.mark.parametrize("name", ["1xh100", "5xh100", "2x2xh100"])
def test_every_figure_is_whole_xml_and_a_picture(name, tmp_path):
    pytest.importorskip("matplotlib", reason="PNG figures need matplotlib: pip install 'weft[report]'")
    from matplotlib.image import imread

    machine = cluster(name)
    figures, _ = draw([simulated(schedule("ring", cluster=machine), machine)])
    for figure in figures:
        root = ElementTree.fromstring(figure.svg())
        assert root.get("viewBox") == f"0 0 {figure.width:g} {round(figure.height, 2):g}"
        assert len(list(root.iter())) > 5
    render(figures[0], str(tmp_path / "one.png"))
    image = imread(tmp_path / "one.png")
    assert image.shape[:2] == (round(2 * figures[0].height), round(2 * figures[0].width))
    assert image.std() > 0.05


def test_pixels_survive_being_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    given = np.random.default_rng(0).integers(0, 256, (7, 5, 4), dtype=np.uint8)
    (tmp_path / "p.png").write_bytes(encode(given))
    assert np.array_equal((imread(tmp_path / "p.png") * 255).round().astype(np.uint8), given)
