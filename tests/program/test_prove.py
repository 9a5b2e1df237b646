"""`prove` accepts what `lower` writes, and rejects whatever can change a result, by the names of the steps.

What a mutant can do to a result is decided by running it in the worst orders, not by reading it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, cases, machines
from tests.program.interpreter import ORDERS, run
from tests.program.mutants import (
    KINDS,
    NEARS,
    WAYS,
    Judge,
    Programs,
    Subject,
    mutants,
    random_subject,
)
from tests.schedule.partitions import random_schedule
from weft.core.errors import ScheduleError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem, Switch
from weft.core.schedule import Schedule
from weft.plan.choose import build
from weft.program.lower import lower_all
from weft.program.prove import prove, prove_schedule
from weft.program.steps import Target
from weft.schedule.reverse import reverse
from weft.schedule.switch import switch

COUNT = 8
"""Mutants of each kind that are judged, or more until one of them changes a result."""
MAX_COUNT = 200
SOAK_COUNT = 100
KEEPS = st.sampled_from(("all", "none", "auto"))
DTYPES = ("float64", "float32", "bfloat16")
NAMED = re.compile(r"Rank (\d+), step (\d+) \((\w+) of op (-?\d+), (.*?)\)[;:]")


def rejection(programs: Programs) -> str:
    try:
        prove(programs.ranks, programs.workspaces)
    except ScheduleError as error:
        return str(error)
    return ""


def names_steps(message: str, programs: Programs) -> bool:
    """Every step that it names is one, with the rank, index, kind and operation that it has."""
    named = NAMED.findall(message)
    steps = [(programs.ranks[int(rank)].steps[int(at)], kind, int(op)) for rank, at, kind, op, _ in named]
    right = all((type(step).__name__, step.op) == (kind, op) for step, kind, op in steps)
    # A result that is not written names the rank and the slot.
    return right and bool(named or re.match(r"Rank \d+: \S.* (is a result|is saved)", message))


def accepts(schedule: Schedule, near: str, keep: str) -> None:
    subject = Subject(schedule, near, keep)
    for way in WAYS:
        programs = subject.lower(way)
        prove(programs.ranks)


def all_cases(max_tokens: int = 200) -> st.SearchStrategy[Case]:
    return st.one_of([cases(max_tokens, dtype=dtype) for dtype in DTYPES])


@settings(max_examples=150)
@given(case=all_cases(), near=st.sampled_from(NEARS), keep=KEEPS)
def test_programs_of_any_schedule_are_accepted(case: Case, near: str, keep: str) -> None:
    accepts(case.schedule, near, keep)


@settings(max_examples=30)
@given(case=all_cases(97), seed=st.integers(0, 2**16), near=st.sampled_from(NEARS), keep=KEEPS)
def test_programs_of_any_partition_are_accepted(case: Case, seed: int, near: str, keep: str) -> None:
    accepts(random_schedule(np.random.default_rng(seed), case), near, keep)


@pytest.mark.soak
@settings(max_examples=1500)
@given(case=all_cases(400), near=st.sampled_from(NEARS), keep=KEEPS)
def test_programs_of_many_schedules_are_accepted(case: Case, near: str, keep: str) -> None:
    accepts(case.schedule, near, keep)


@pytest.mark.parametrize("name", ["ring", "ulysses"])
def test_a_schedule_is_proved_in_both_directions_over_every_transport(name: str) -> None:
    tokens = Layout.even(12, 3)
    problem = Problem(batch=1, heads=3, kv_heads=3, head_dim=2, q=tokens, kv=tokens)
    schedule = build(name, problem, BlockMask.dense(3, 12))
    nears = ("none", "all", "collective", "landing")
    programs = [Subject(schedule, near).lower(way) for near in nears for way in WAYS]
    steps = sum(len(program.steps) for each in programs for program in each.ranks)
    assert prove_schedule(schedule) == steps > 0


def test_outputs_that_stay_are_not_sent_before_they_are_done() -> None:
    """In a torus, a rank sends the outputs of others before it has computed its own."""
    tokens = Layout.uneven([1, 3])
    problem = Problem(batch=1, heads=2, kv_heads=2, head_dim=4, q=tokens, kv=tokens, dtype="float64")
    schedule = build("torus:2x1", problem, BlockMask.dense(2, 4), machines(2))
    accepts(schedule, "collective", "auto")
    judge = Judge(Subject(schedule, "collective"))
    assert not judge.is_wrong("forward", judge.sound["forward"])


def compare_with_dense(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        judge = Judge(random_subject(rng))
        for way in WAYS:
            for order in ORDERS:
                error = judge.error(way, judge.sound[way], order, seed)
                assert error <= judge.tolerance, (judge.subject.schedule.name, judge.subject.near, way, order)


def test_programs_equal_dense_attention_in_the_worst_orders() -> None:
    compare_with_dense(30, seed=1)


@pytest.mark.soak
def test_many_programs_equal_dense_attention_in_the_worst_orders() -> None:
    compare_with_dense(1000, seed=2)


def judge_mutants(kind: str, count: int, seed: int) -> Counter[tuple[bool, bool]]:
    """How many change a result, and how many are rejected."""
    seen: Counter[tuple[bool, bool]] = Counter()
    for at, (judge, way, mutant) in enumerate(islice(mutants(kind, seed), MAX_COUNT)):
        if at >= count and seen[True, True]:
            break
        message, wrong = rejection(mutant), judge.is_wrong(way, mutant)
        name = f"{judge.subject.schedule.name}, near {judge.subject.near}, {way}"
        assert message or not wrong, f"accepted, but wrong: {name}"
        assert not message or names_steps(message, mutant), message
        seen[wrong, bool(message)] += 1
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_mutants_that_change_a_result_are_rejected(kind: str) -> None:
    seen = judge_mutants(kind, COUNT, seed=0)
    assert seen[True, True] >= 1


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutants_that_change_a_result_are_rejected(
    kind: str, record_property: Callable[[str, object], None]
) -> None:
    seen = judge_mutants(kind, SOAK_COUNT, seed=1)
    record_property("harmless, but rejected", seen[False, True])
    assert seen[True, True] >= 10


@settings(max_examples=40)
@given(
    before=st.integers(1, 23),
    after=st.integers(0, 23),
    ranks=st.integers(1, 6),
    near=st.sampled_from(NEARS),
    dtype=st.sampled_from(DTYPES),
)
def test_switches_are_accepted_and_arrive_in_the_worst_orders(
    before: int, after: int, ranks: int, near: str, dtype: str
) -> None:
    """Without `after`, all ranks gather the whole tensor, and add up its gradients."""
    layout = Layout.even(after, ranks, dim="after") if after else None
    problem = Switch.of(Layout.even(before, ranks, dim="before"), layout, width=2, dtype=dtype)
    x = torch.randint(-9, 9, problem.shape, generator=torch.Generator().manual_seed(0)).double()
    there = [x[problem.before.held(rank).array] for rank in range(ranks)]
    here = [x[:, layout.held(rank).array] if layout else x for rank in range(ranks)]
    schedule = switch(problem)
    back = [part * (1 if layout else ranks) for part in there]
    for one, given_, expected in ((schedule, there, here), (reverse(schedule), here, back)):
        peers = frozenset(range(ranks)) if near in ("all", "landing") else frozenset[int]()
        target = Target(near=peers, collective=near == "collective", lands=near == "landing")
        programs = Programs.of(lower_all(one, target))
        prove(programs.ranks)
        inputs = [{"home x": part[None].to(getattr(torch, dtype))} for part in given_]
        for order in ORDERS:
            ends = run(programs.ranks, programs.workspaces, inputs, None, 1.0, order)
            assert all(
                torch.equal(end["home y"][0].double(), y) for end, y in zip(ends, expected, strict=True)
            )
