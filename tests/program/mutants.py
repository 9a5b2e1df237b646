"""Programs of random schedules, whether they compute attention, and ways to spoil them.

A mutation takes the programs of all ranks with their workspaces and changes one thing, or returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tests.cases import random_case
from tests.program.interpreter import ORDERS, StuckError, run
from tests.run.dense import Truth
from tests.schedule.partitions import random_schedule
from weft.core.schedule import Schedule
from weft.program.lower import lower
from weft.program.slots import Slot
from weft.program.steps import Copy, Fill, Post, Program, Step, Target, Wait, accesses
from weft.program.workspace import Workspace, assign
from weft.schedule.reverse import reverse

Rng = np.random.Generator
Mutation = Callable[[Rng, "Programs"], "Programs | None"]
NEARS = ("none", "all", "half", "collective", "landing")
"""Which peers read messages in place; or none, and exchanges between all ranks are collectives."""
WAYS = ("forward", "saving", "backward")
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1}
"""Of errors over the largest gradient: what is spoiled is NaN, or wrong by more."""


@dataclass(frozen=True)
class Programs:
    """The programs of all ranks in one direction, and the places of their slots."""

    ranks: tuple[Program, ...]
    workspaces: tuple[Workspace, ...]

    @staticmethod
    def of(programs: Sequence[Program]) -> Programs:
        return Programs(tuple(programs), tuple(assign(program) for program in programs))

    def with_steps(self, rank: int, steps: list[Step]) -> Programs:
        """In the memory that the slots had before."""
        ranks = list(self.ranks)
        ranks[rank] = replace(ranks[rank], steps=steps)
        return replace(self, ranks=tuple(ranks))

    def with_place(self, rank: int, slot: Slot, place: tuple[int, int]) -> Programs:
        spaces = list(self.workspaces)
        end = place[1] + slot.num_bytes if place[0] == 0 else 0
        size = max(spaces[rank].num_bytes, end)
        spaces[rank] = replace(spaces[rank], places={**spaces[rank].places, slot: place}, num_bytes=size)
        return replace(self, workspaces=tuple(spaces))


class Subject:
    """A schedule and its backward, to be lowered for transports of all kinds."""

    def __init__(self, schedule: Schedule, near: str = "none", keep: str = "auto") -> None:
        self.schedule, self.near, self.reversed = schedule, near, reverse(schedule, keep=keep)

    def near_of(self, rank: int) -> frozenset[int]:
        peers = frozenset(range(self.schedule.problem.ranks)) - {rank}
        if self.near == "half":
            return frozenset(peer for peer in peers if peer % 2 == rank % 2)
        return peers if self.near in ("all", "landing") else frozenset()

    def lower(self, way: str) -> Programs:
        schedule = self.reversed if way == "backward" else self.schedule
        programs: list[Program] = []
        for rank in range(schedule.problem.ranks):
            kept = {piece.tensor for piece in self.reversed.kept[rank]} if self.reversed.kept else set[str]()
            save = {"q"} | (kept & {"kv"}) if way == "saving" else ()
            target = Target(
                self.near_of(rank), self.near == "collective", frozenset(save), self.near == "landing"
            )
            programs.append(lower(schedule, rank, target))
        return Programs.of(programs)


class Judge:
    """Runs a subject's programs in bad orders and compares with dense attention."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        problem, mask = subject.schedule.attention
        self.truth = Truth.of(problem, mask)

    @cached_property
    def sound(self) -> dict[str, Programs]:
        return {way: self.subject.lower(way) for way in WAYS}

    @cached_property
    def saved(self) -> list[dict[str, Tensor]]:
        return self.run(self.sound["saving"], self.inputs, "early", 0)

    @cached_property
    def inputs(self) -> list[dict[str, Tensor]]:
        shards = [self.truth.inputs(rank) for rank in range(self.truth.problem.ranks)]
        return [{"home q": q[None], "home kv": torch.stack([k, v])} for q, k, v in shards]

    def run(
        self, programs: Programs, inputs: list[dict[str, Tensor]], order: str, seed: int
    ) -> list[dict[str, Tensor]]:
        return run(
            programs.ranks, programs.workspaces, inputs, self.truth.mask, self.truth.scale, order, seed
        )

    def is_wrong(self, way: str, programs: Programs, seed: int = 0) -> bool:
        """Whether a result differs from dense attention in some order that was tried."""
        try:
            return any(not self.error(way, programs, order, seed) <= self.tolerance for order in ORDERS)
        except StuckError:
            return True

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.truth.problem.dtype] * self.truth.size

    def error(self, way: str, programs: Programs, order: str, seed: int) -> float:
        worst = 0.0
        saved = self.saved if way == "backward" else self.run(programs, self.inputs, order, seed)
        if way != "backward":
            worst = self.truth.output_error([end["home o"][0] for end in saved])
        if way == "forward":
            return worst
        grads = programs if way == "backward" else self.sound["backward"]
        given = [
            end | own | {"home do": self.truth.slope(rank)[None]}
            for rank, (end, own) in enumerate(zip(saved, self.inputs, strict=True))
        ]
        ends = self.run(grads, given, order, seed)
        try:
            found = self.truth.gradient_error([(end["home dq"][0], *end["home dkv"]) for end in ends])
        except AssertionError:  # a padded row has a gradient
            return np.inf
        return max(worst, found)


def mutants(kind: str, seed: int = 0) -> Iterator[tuple[Judge, str, Programs]]:
    """Endlessly many corruptions of one kind, of programs of all kinds, each with its judge and direction."""
    rng = np.random.default_rng([seed, sorted(KINDS).index(kind)])
    while True:
        judge = Judge(random_subject(rng))
        for way in WAYS:
            if mutant := KINDS[kind](rng, judge.sound[way]):
                yield judge, way, mutant


def random_subject(rng: Rng) -> Subject:
    while True:
        dtype = str(rng.choice(["float64", "float64", "float32", "bfloat16"]))
        case = random_case(rng, max_tokens=47, max_ranks=5, dtype=dtype)
        schedule = case.schedule if rng.random() < 0.7 else random_schedule(rng, case)
        if case.problem.ranks > 1 and schedule.ops:
            return Subject(schedule, str(rng.choice(NEARS)), str(rng.choice(["all", "none", "auto"])))


def drop_wait(rng: Rng, programs: Programs) -> Programs | None:
    return with_step(rng, programs, lambda step: isinstance(step, Wait), lambda _, rest: rest)


def delay_wait(rng: Rng, programs: Programs) -> Programs | None:
    return move(rng, programs, lambda step: isinstance(step, Wait), 1)


def delay_release(rng: Rng, programs: Programs) -> Programs | None:
    """A sent-wait to the end, so that the buffer is written again before."""
    return with_step(
        rng, programs, lambda step: isinstance(step, Wait) and step.sent, lambda step, rest: [*rest, step]
    )


def hasten_wait(rng: Rng, programs: Programs) -> Programs | None:
    return move(rng, programs, lambda step: isinstance(step, Wait), -1)


def hasten_post(rng: Rng, programs: Programs) -> Programs | None:
    return move(rng, programs, is_post, -1)


def delay_post(rng: Rng, programs: Programs) -> Programs | None:
    return move(rng, programs, is_post, 1)


def delay_copy(rng: Rng, programs: Programs) -> Programs | None:
    return move(rng, programs, is_copy, 1)


def hasten_copy(rng: Rng, programs: Programs) -> Programs | None:
    return move(rng, programs, is_copy, -1)


def drop_fill(rng: Rng, programs: Programs) -> Programs | None:
    return with_step(rng, programs, lambda step: isinstance(step, Fill), lambda _, rest: rest)


def delay_step(rng: Rng, programs: Programs) -> Programs | None:
    return move(rng, programs, lambda _: True, 1)


def overlap_slots(rng: Rng, programs: Programs) -> Programs | None:
    """Any two slots of a workspace in the same bytes."""
    rank = int(rng.integers(len(programs.ranks)))
    places = programs.workspaces[rank].places
    slots = [slot for slot in places if slot.num_bytes]
    if len(slots) < 2:
        return None
    a, b = rng.choice(len(slots), 2, replace=False)
    number, start = places[slots[a]]
    if number:  # a result may be too small
        return programs.with_place(rank, slots[a], places[slots[b]]) if not places[slots[b]][0] else None
    return programs.with_place(rank, slots[b], (number, start))


def swap_slots(rng: Rng, programs: Programs) -> Programs | None:
    """Two slots of block 0 that change places."""
    rank = int(rng.integers(len(programs.ranks)))
    places = programs.workspaces[rank].places
    slots = [slot for slot, (number, _) in places.items() if slot.num_bytes and not number]
    if len(slots) < 2:
        return None
    a, b = rng.choice(len(slots), 2, replace=False)
    swapped = programs.with_place(rank, slots[a], places[slots[b]])
    return swapped.with_place(rank, slots[b], places[slots[a]])


def reuse_sent(rng: Rng, programs: Programs) -> Programs | None:
    """A slot that is first written while a message is under way, in the bytes of that message."""
    found: list[tuple[int, Slot, tuple[int, int]]] = []
    for rank, (program, space) in enumerate(zip(programs.ranks, programs.workspaces, strict=True)):
        steps = program.steps
        first: dict[Slot, int] = {}
        for at, step in enumerate(steps):
            for slot in accesses(step)[1]:
                first.setdefault(slot.root, at)
        for at, post in program.exchanges():
            for peer, slot in post.sends:
                waits = [
                    i
                    for i, step in enumerate(steps)
                    if isinstance(step, Wait) and step.sent and (step.op, step.peer) == (post.op, peer)
                ]
                number, start = space.places.get(slot.root, (-1, 0))
                found += [
                    (rank, other, (0, start))
                    for other, when in first.items()
                    if waits and at < when < waits[0] and number == 0 and other in space.places
                ]
    if not found:
        return None
    return programs.with_place(*found[int(rng.integers(len(found)))])


KINDS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        drop_wait,
        delay_wait,
        delay_release,
        hasten_wait,
        hasten_post,
        delay_post,
        delay_copy,
        hasten_copy,
        drop_fill,
        delay_step,
        overlap_slots,
        swap_slots,
        reuse_sent,
    )
}


def is_post(step: Step) -> bool:
    return isinstance(step, Post)


def is_copy(step: Step) -> bool:
    return isinstance(step, Copy) and len(step.segments) > 0


def pick(rng: Rng, programs: Programs, wanted: Callable[[Step], bool]) -> tuple[int, int] | None:
    """Any step of that kind, on any rank."""
    found = [
        (rank, at)
        for rank, program in enumerate(programs.ranks)
        for at, step in enumerate(program.steps)
        if wanted(step)
    ]
    return found[int(rng.integers(len(found)))] if found else None


def with_step(
    rng: Rng,
    programs: Programs,
    wanted: Callable[[Step], bool],
    change: Callable[[Step, list[Step]], list[Step]],
) -> Programs | None:
    """`change` makes a step and those after it into others."""
    if (found := pick(rng, programs, wanted)) is None:
        return None
    rank, at = found
    steps = programs.ranks[rank].steps
    return programs.with_steps(rank, steps[:at] + change(steps[at], steps[at + 1 :]))


def move(rng: Rng, programs: Programs, wanted: Callable[[Step], bool], way: int) -> Programs | None:
    """A step to another point, near or far, before (-1) or after (1) its own."""
    if (found := pick(rng, programs, wanted)) is None:
        return None
    rank, at = found
    steps = programs.ranks[rank].steps
    room = at if way < 0 else len(steps) - 1 - at
    if not room:
        return None
    distance = min(int(rng.geometric(0.3)), room) if rng.random() < 0.7 else int(rng.integers(1, room + 1))
    rest = steps[:at] + steps[at + 1 :]
    to = at + way * distance
    return programs.with_steps(rank, [*rest[:to], steps[at], *rest[to:]])
