"""What `bench.serving` asks of a schedule, and the bound that it is shown beside."""

from __future__ import annotations

import pytest

pytest.importorskip("httpx")

from bench import serving as bench  # noqa: E402
from bench.rows import Results  # noqa: E402
from weft.serve.load_test import RequestArrival  # noqa: E402


def numbers(attained: float, image: float) -> dict[str, float]:
    return {"attained": attained, "image_p95": image, "video_p95": 9.0}


@pytest.mark.parametrize(
    ("elastic", "every", "one", "holds"),
    [
        ((0.9, 1.0), (0.6, 3.0), (0.2, 4.0), [True, True]),
        ((0.9, 1.0), (0.2, 3.0), (0.7, 4.0), [False, True]),  # 1.29 of the better
        ((0.9, 1.0), (0.6, 3.0), (0.2, 1.9), [True, False]),  # the better for images is another
        ((0.0, 1.0), (0.0, 3.0), (0.0, 4.0), [False, True]),  # nothing is in time: nothing is better
    ],
)
def test_elastic_is_held_against_the_better_of_the_others(elastic, every, one, holds) -> None:
    report = Results()
    found = {"elastic": numbers(*elastic), "all": numbers(*every), "one": numbers(*one)}
    bench.judge(report, "case", found, bound=0.95, alone=0.5)
    assert [row.holds for row in report.rows] == holds
    assert [row.limit for row in report.rows] == [95.0, 0.5]
    assert report.rows[0].peer == 100 * max(every[0], one[0])
    assert report.rows[1].peer == min(every[1], one[1])
    assert [line.name for line in report.lines] == list(bench.NAMES.values())


def test_a_fluid_is_in_time_as_far_as_two_ranks_carry_it() -> None:
    alone, work = {"image": 1.0, "video": 4.0}, {"image": 1.0, "video": 8.0}
    at_once = [RequestArrival(0.0, "image", 0)] * 6
    assert bench.fluid(at_once, alone, work) == 1.0  # 6 s of work, 2 ranks for 3 s
    assert bench.fluid([*at_once, *at_once], alone, work) == 0.5
    # The images first, then 18 of 16 s are left until the video is due.
    assert bench.fluid([*at_once, RequestArrival(0.0, "video", 0)], alone, work) == 1.0
    assert bench.fluid([*at_once, *[RequestArrival(0.0, "video", 0)] * 3], alone, work) == pytest.approx(
        8.25 / 9
    )
