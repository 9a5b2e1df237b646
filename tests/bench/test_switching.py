"""What `bench.switching` asks of a case, and how it counts memory."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bench.baselines import METHODS
from bench.rows import Results, Row
from bench.switching import COMPUTE, SHAPES, WIRE, Facts, SwitchCase, _peak, judge

CASE = SwitchCase("2x2", SHAPES[0], training=False)


def verdict(*, alone: float, error: float = 0.0, extra: int = 0, **times: float) -> Row:
    walls = {"switching": 10.0, **times, COMPUTE: alone, WIRE: 3.0}
    facts = {name: Facts(error, CASE.formula(name, 4) + extra, 0, 0) for name in METHODS}
    report = Results()
    judge(report, CASE, [facts] * 4, {name: [wall] * 3 for name, wall in walls.items()})
    return report.rows[0]


@pytest.mark.parametrize(
    ("alone", "ulysses", "megatron", "holds"),
    [
        (8.0, 9.9, 11.0, True),  # compute counts: nobody may be faster, and 1 % is nothing
        (8.0, 9.7, 11.0, False),
        (6.5, 13.3, 31.0, True),  # messages count
        (6.5, 13.1, 31.0, False),
        (6.5, 13.3, 29.0, False),
    ],
)
def test_more_is_asked_where_messages_take_half_of_the_time(
    alone: float, ulysses: float, megatron: float, holds: bool
) -> None:
    found = verdict(alone=alone, ulysses=ulysses, ring=20.0, megatron=megatron)
    assert (found.holds, found.peer, found.limit) == (holds, ulysses, alone)


@pytest.mark.parametrize("wrong", [{"error": 1e-3}, {"extra": 4}])
def test_wrong_answers_and_other_bytes_are_no_speed(wrong: dict[str, float]) -> None:
    found = verdict(alone=8.0, ulysses=20.0, ring=20.0, megatron=20.0, **wrong)  # pyright: ignore
    assert not found.holds
    assert "NOT EXACT" in found.bar


def test_memory_is_what_is_alive_at_once() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(3):
            kept = torch.ones(1000, 1000)
            del kept
    assert 4_000_000 <= _peak(seen) < 5_000_000
