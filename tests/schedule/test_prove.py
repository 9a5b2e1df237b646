"""`prove` accepts what `lower` writes, and rejects whatever can change a result, by the names of the steps.

What a mutant can do to a result is decided by running it in the worst orders, not by reading it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, cases
from tests.schedule.partitions import random_schedule
from tests.schedule.program_interpreter import ORDERS, run
from tests.schedule.program_mutants import (
    KINDS,
    NEARS,
    WAYS,
    Judge,
    Programs,
    Subject,
    mutants,
    random_subject,
)
from weft.core.errors import ScheduleError
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem, Switch
from weft.core.schedule import Piece, Schedule
from weft.plan.choose import build
from weft.schedule.lower import lower_all
from weft.schedule.program import Fill, Post, Program, Slot, Step, Target, Wait
from weft.schedule.prove import first_exchange_members, needs_warm_up, prove
from weft.schedule.reverse import reverse
from weft.schedule.switch import switch

COUNT = 25
"""Mutants of each kind."""
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
    for judge, way, mutant in islice(mutants(kind, seed), count):
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
        peers = frozenset(range(ranks)) if near == "all" else frozenset[int]()
        programs = Programs.of(lower_all(one, Target(near=peers, collective=near == "collective")))
        prove(programs.ranks)
        inputs = [{"home x": part[None].to(getattr(torch, dtype))} for part in given_]
        for order in ORDERS:
            ends = run(programs.ranks, programs.workspaces, inputs, None, 1.0, order)
            assert all(
                torch.equal(end["home y"][0].double(), y) for end, y in zip(ends, expected, strict=True)
            )


# Programs written by hand: what random ones do not get wrong, or not alone.

PAIR = Layout.even(8, 2)
PROBLEM = Problem(batch=1, heads=1, kv_heads=1, head_dim=2, q=PAIR, kv=PAIR)
PIECE = Piece("q", Indices.span(0, 1), Indices.span(0, 4))


def slot(name: str, memory: str = "workspace", num_bytes: int = 32) -> Slot:
    return Slot(name, memory, num_bytes, "float32", PIECE, (1, 1, 1, 4, 2), unit=8)


def swap(rank: int, *ops: int) -> list[Step]:
    """For each operation in turn: fill a buffer, exchange it with the other rank, wait."""
    steps: list[Step] = []
    for op in ops:
        going, coming, peer = slot(f"out {op}"), slot(f"in {op}"), 1 - rank
        steps += [Fill(op, going), Post(op, "swap", ((peer, going),), ((peer, coming),))]
        steps += [Wait(op, "swap", peer, coming), Wait(op, "swap", peer, going, sent=True)]
    return steps


def pair(first: list[Step], second: list[Step], near: bool = False) -> list[Program]:
    targets = [Target(near=frozenset({1 - rank}) if near else frozenset()) for rank in range(2)]
    return [Program(rank, PROBLEM, targets[rank], steps) for rank, steps in enumerate((first, second))]


def test_exchanges_in_order_are_accepted() -> None:
    prove(pair(swap(0, 3, 5), swap(1, 3, 5)))


def test_ranks_that_wait_for_each_other_are_rejected() -> None:
    with pytest.raises(
        ScheduleError, match=r"Rank \d, step 2 .*; Rank \d, step 2 .*: they wait for each other"
    ):
        prove(pair(swap(0, 3, 5), swap(1, 5, 3)))


def test_exchanges_out_of_order_are_rejected() -> None:
    def late(steps: list[Step]) -> list[Step]:
        return sorted(steps, key=lambda step: isinstance(step, Wait))

    message = r"Rank 1, step 1 .*; Rank 1, step 3 .*: exchanges must be posted in the order"
    with pytest.raises(ScheduleError, match=message):
        prove(pair(late(swap(0, 3, 5)), late(swap(1, 5, 3))))


def test_a_message_without_its_other_end_is_rejected() -> None:
    with pytest.raises(ScheduleError, match=r"Rank 0, step 5 .*: rank 1 posts no other end of"):
        prove(pair(swap(0, 3, 5), swap(1, 3)))


def test_two_messages_of_one_exchange_between_two_ranks_are_rejected() -> None:
    a, b = slot("a"), slot("b")
    sender: list[Step] = [Fill(3, a), Post(3, "twice", ((1, a), (1, a)), ())]
    sender += [Wait(3, "twice", 1, a, sent=True)]
    receiver: list[Step] = [Post(3, "twice", (), ((0, b),)), Wait(3, "twice", 0, b)]
    with pytest.raises(ScheduleError, match=r"Rank 0, step 1 .*: a is not the only message"):
        prove(pair(sender, receiver))


def test_messages_of_different_sizes_are_rejected() -> None:
    going, coming = slot("going"), slot("coming", num_bytes=64)
    sender: list[Step] = [
        Fill(3, going),
        Post(3, "one", ((1, going),), ()),
        Wait(3, "one", 1, going, sent=True),
    ]
    receiver: list[Step] = [Post(3, "one", (), ((0, coming),)), Wait(3, "one", 0, coming)]
    with pytest.raises(
        ScheduleError, match=r"Rank 0, step 1 .*; Rank 1, step 0 .*: 32 bytes are sent and 64"
    ):
        prove(pair(sender, receiver))


@pytest.mark.parametrize(
    ("memory", "says"), [("window", ""), ("workspace", "not in memory that rank 1 can read")]
)
def test_what_is_read_in_place_lies_in_the_window(memory: str, says: str) -> None:
    sender, receiver = one_sided(memory)
    if not says:
        prove(pair(sender, receiver, near=True))
        return
    with pytest.raises(ScheduleError, match=says):
        prove(pair(sender, receiver, near=True))


def one_sided(memory: str = "window") -> tuple[list[Step], list[Step]]:
    going, coming = slot("going", memory), slot("coming", "peer")
    sender: list[Step] = [Fill(3, going), Post(3, "one", ((1, going),), ())]
    return sender, [Post(3, "one", (), ((0, coming),)), Wait(3, "one", 0, coming)]


def test_what_is_read_in_place_is_not_written_until_the_call_ends() -> None:
    sender, receiver = one_sided()
    with pytest.raises(ScheduleError, match=r"step 1 .*; Rank 0, step 2 .*: the first reads going while"):
        prove(pair([*sender, sender[0]], receiver, near=True))


def test_ranks_that_disagree_on_who_is_near_are_rejected() -> None:
    programs = pair(*one_sided(), near=True)
    programs[0] = replace(programs[0], target=Target())
    programs[0].steps.append(Wait(3, "one", 1, programs[0].steps[0].slot, sent=True))  # type: ignore[union-attr]
    with pytest.raises(ScheduleError, match="disagree on whether coming is read in place"):
        prove(programs)


def test_a_place_beyond_the_end_of_its_block_is_rejected() -> None:
    programs = Programs.of(pair(swap(0, 3), swap(1, 3)))
    space = programs.workspaces[1]
    last = max(space.places, key=lambda slot: space.places[slot][1])
    spaces = programs.workspaces[0], replace(space, num_bytes=space.places[last][1])
    with pytest.raises(
        ScheduleError, match=f"Rank 1: {last.name} is at byte .*, beyond the end of its block"
    ):
        prove(programs.ranks, spaces)


@pytest.mark.parametrize("spoil", ["one rank", "order", "gap"])
def test_collectives_that_do_not_fit_are_rejected(spoil: str) -> None:
    tokens = Layout.even(12, 3)
    problem = Problem(batch=1, heads=3, kv_heads=3, head_dim=2, q=tokens, kv=tokens)
    programs = lower_all(build("ulysses", problem, BlockMask.dense(3, 12)), Target(collective=True))
    prove(programs)
    at, post = next((at, post) for at, post in programs[1].exchanges() if post.collective)
    if spoil == "one rank":
        programs[1].steps[at] = post._replace(collective=False)
    elif spoil == "order":
        programs[1].steps[at] = post._replace(sends=post.sends[::-1])
    else:
        post.sends[-1][1].offset += 1
    with pytest.raises(ScheduleError, match=r"Rank \d, step \d+ .*: (not all ranks|the parts of its buffer)"):
        prove(programs)


@pytest.mark.parametrize(("tokens", "ranks", "members"), [(5, 8, 6), (8, 8, 8), (7, 1, 0)])
def test_a_group_whose_first_exchange_misses_a_rank_needs_a_warm_up(
    tokens: int, ranks: int, members: int
) -> None:
    layout = Layout.even(tokens, ranks)
    problem = Problem(batch=1, heads=2, kv_heads=2, head_dim=2, q=layout, kv=layout)
    schedule = build("ring", problem, BlockMask.dense(2, tokens))
    programs = lower_all(schedule)
    prove(programs)
    assert first_exchange_members(programs) == set(range(members))
    assert needs_warm_up(programs) == (tokens < ranks)
    near = lower_all(schedule, Target(near=frozenset(range(ranks))))
    assert first_exchange_members(near) == set()  # they need no group
    assert not needs_warm_up(near)
