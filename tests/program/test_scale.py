"""Lowering takes time in proportion to what a rank does, however many ranks there are."""

import sys
from types import FrameType
from typing import Any

import pytest

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.choose import build
from weft.program.lower import lower
from weft.schedule.reverse import reverse


def dense(name: str, ranks: int) -> Schedule:
    layout = Layout.even(16 * ranks, ranks)
    problem = Problem(batch=1, heads=8, kv_heads=8, head_dim=4, q=layout, kv=layout, dtype="bfloat16")
    topology = Topology(machines=ranks // 8, devices=8)
    return build(name, problem, BlockMask.dense(8, 16 * ranks), topology)


def calls(schedule: Schedule) -> int:
    """Python functions that are called to lower one rank: a measure that is the same on every machine."""
    count = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        del frame, arg
        count += event == "call"

    sys.setprofile(profile)
    try:
        lower(schedule, 1)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["ring", "zigzag", "gather", "ulysses", "usp:4x{}", "torus:8x{}"])
def test_twice_the_ranks_take_twice_the_time(name, backward):
    found = []
    for ranks in (32, 64):
        schedule = dense(name.format(ranks // int(name[-4]) if "{" in name else 1), ranks)
        found.append(calls(reverse(schedule) if backward else schedule))
    assert found[1] <= 2.3 * found[0]
