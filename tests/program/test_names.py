"""What the steps of programs are called, simulated or measured."""

from __future__ import annotations

import pytest

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.plan.choose import build
from weft.program.lower import lower
from weft.program.steps import Attention, Gradient, Post, Wait, span_name
from weft.schedule.reverse import reverse


def schedule(name: str, ranks: int = 4) -> Schedule:
    tokens = Layout.even(31, ranks)
    problem = Problem(batch=1, heads=4, kv_heads=4, head_dim=3, q=tokens, kv=tokens, dtype="float32")
    return build(name, problem, BlockMask.dense(4, 31))


def attends(given: Schedule, rank: int) -> list[str]:
    return [step.label for step in lower(given, rank).steps if isinstance(step, Attention | Gradient)]


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
    steps = lower(schedule("ring"), 1).steps
    post = next(step for step in steps if isinstance(step, Post))
    arrived = next(step for step in steps if isinstance(step, Wait) and not step.sent)
    sent = next(step for step in steps if isinstance(step, Wait) and step.sent)
    assert span_name(post) == "post hop 1"
    assert span_name(post, 2) == "send hop 1 → 2"
    assert span_name(arrived) == "wait hop 1 ← 0"
    assert span_name(sent) == "finish hop 1"
