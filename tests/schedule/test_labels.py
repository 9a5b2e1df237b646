"""What the operations of a schedule are called, simulated or measured."""

from __future__ import annotations

import pytest

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Attend, Schedule
from weft.plan.choose import build
from weft.schedule.labels import attend_name, finish_name, post_name, send_name, wait_name
from weft.schedule.reverse import reverse


def schedule(name: str, ranks: int = 4) -> Schedule:
    tokens = Layout.even(31, ranks)
    problem = Problem(batch=1, heads=4, kv_heads=4, head_dim=3, q=tokens, kv=tokens, dtype="float32")
    return build(name, problem, BlockMask.dense(4, 31))


def attends(given: Schedule, rank: int) -> list[str]:
    return [attend_name(given, index) for index, op in given.attends() if op.rank == rank]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ring", ["hop 0", "hop 1", "hop 2", "hop 3"]),
        ("zigzag", ["hop 0", "hop 1", "hop 2", "hop 3"]),
        ("usp:2x2", ["hop 0", "hop 1"]),
        ("ulysses", ["hop 0"]),
        ("gather", ["hop 0", "fetch"]),
    ],
)
def test_attends_are_called_after_the_exchange_that_brought_their_keys(name: str, told: list[str]) -> None:
    for rank in range(4):
        assert attends(schedule(name), rank) == [f"attend {label}" for label in told]
        again = reverse(schedule(name), keep="none")
        assert attends(again, rank) == [f"gradient {label}" for label in told]


def test_keys_that_were_kept_have_been_there_from_the_start() -> None:
    assert set(attends(reverse(schedule("ring"), keep="all"), 1)) == {"gradient hop 0"}


def test_messages_say_which_exchange_and_who_is_at_the_other_end() -> None:
    given = schedule("ring")
    first = next(index for index, op in enumerate(given.ops) if not isinstance(op, Attend))
    assert send_name(given, first, 3) == "send hop 1 → 3"
    assert wait_name(given, first, 2) == "wait hop 1 ← 2"
    assert post_name(given, first) == "post hop 1"
    assert finish_name(given, first) == "finish hop 1"
