"""Timelines: shares of time that add up, traffic, and a text form that reads back."""

import pytest

from weft.core.errors import InputError
from weft.core.timeline import Span, Timeline

SPANS = (
    Span(0, "compute", "attend", "attend hop 0", 0.0, 2.0, op=1),
    Span(0, "comm", "send", "send hop 1 → 1", 0.5, 3.0, op=0, peer=1, num_bytes=100),
    Span(0, "compute", "wait", "wait", 2.0, 3.0, op=2, peer=1),
    Span(0, "compute", "attend", "attend hop 1", 3.0, 4.0, op=3),
    Span(1, "compute", "attend", "attend hop 0", 0.0, 1.0, op=1),
    Span(1, "comm", "send", "send hop 1 → 0", 1.0, 3.0, op=0, peer=0, num_bytes=60),
)
LINE = Timeline("two", 2, SPANS, memory=(7, 8))


def test_time_is_compute_wait_or_idle():
    assert LINE.seconds == 4.0
    assert LINE.computing.tolist() == [3.0, 1.0]
    assert LINE.waiting.tolist() == [1.0, 0.0]
    assert LINE.idle.tolist() == [0.0, 3.0]
    assert LINE.imbalance == 1.5
    assert LINE.slowest == 0


def test_overlap_is_the_share_of_sending_under_compute():
    # Rank 0 sends for 2.5 s, 1.5 of them under its attention; rank 1 sends for 2 s after it.
    assert LINE.overlap == pytest.approx(1.5 / 4.5)
    assert Timeline("none", 1, ()).overlap == 1.0


def test_traffic_goes_from_row_to_column():
    assert LINE.traffic.tolist() == [[0, 100], [60, 0]]


def test_text_reads_back():
    assert Timeline.from_jsonl(LINE.to_jsonl()) == LINE


def test_what_is_no_timeline_says_so():
    for text in ("", "{", '{"name": "x", "ranks": 1, "colour": 3}', '{"name": "x", "ranks": 1}\n{"rank": 0}'):
        with pytest.raises(InputError, match="not a timeline"):
            Timeline.from_jsonl(text)


def test_nothing_takes_no_time():
    empty = Timeline("empty", 3, ())
    assert (empty.seconds, empty.imbalance, empty.idle.tolist()) == (0.0, 1.0, [0.0, 0.0, 0.0])
