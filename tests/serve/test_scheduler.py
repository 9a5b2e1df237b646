"""The policies: what they may never do, what they are for, and that nothing starves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import InputError
from weft.serve.assignment import RankAssignment, groups, sizes
from weft.serve.batch import Batch
from weft.serve.jobs import JobShape
from weft.serve.scheduler import MAX_JOBS, POLICIES, STARVATION_FACTOR, elastic, one_rank

IMAGE = JobShape(frames=1, height=480, width=832, steps=20, guided=False)
LARGE = JobShape(frames=1, height=720, width=1280, steps=10, guided=True)
VIDEO = JobShape(frames=81, height=480, width=832, steps=50, guided=True)
ONE_RANK = {IMAGE: 0.1, LARGE: 0.5, VIDEO: 8.0}


@dataclass
class Fake:
    """Steps that scale by Amdahl's law, and batches that share a part of their step."""

    serial: float = 0.02
    shared: float = 0.0
    switch: float = 0.1
    least: int = 1
    asked: int = 0

    def step(self, shape: JobShape, ranks: int, jobs: int = 1) -> float:
        self.asked += 1
        if ranks < self.least:
            return inf
        alone = ONE_RANK[shape] * (self.serial + (1 - self.serial) / ranks)
        return alone * (self.shared + (1 - self.shared) * jobs)

    def fixed(self, shape: JobShape) -> float:
        return ONE_RANK[shape] / 2

    def whole(self, shape: JobShape, ranks: int) -> float:
        return shape.steps * self.step(shape, ranks) + self.fixed(shape)


def task(name: str, shape: JobShape = IMAGE, *, left: int | None = None, **fields: object) -> Batch:
    step = 0 if left is None else shape.steps - left
    defaults = {"jobs": [name], "step": step, "arrived": 0.0, "deadline": 100.0}
    return Batch(id=name, shape=shape, **{**defaults, **fields})  # type: ignore[arg-type]


def applied(tasks: Sequence[Batch], runs: Sequence[RankAssignment]) -> list[Batch]:
    """The tasks once an engine has done as it was told; a batch is one task from then on."""
    by_id = {each.id: replace(each, ranks=()) for each in tasks}
    for run in runs:
        begun = [by_id.pop(name) for name in run.batches]
        by_id[run.batches[0]] = replace(
            begun[0],
            ranks=run.ranks,
            began=True,
            jobs=[job for each in begun for job in each.jobs],
            arrived=min(each.arrived for each in begun),
            deadline=min(each.deadline for each in begun),
        )
    return list(by_id.values())


def check_legal(runs: Sequence[RankAssignment], tasks: Sequence[Batch], world: int) -> None:
    by_id = {each.id: each for each in tasks}
    ranks = [rank for run in runs for rank in run.ranks]
    names = [name for run in runs for name in run.batches]
    assert len(ranks) == len(set(ranks)), "a rank is given twice"
    assert len(names) == len(set(names)), "a task is given twice"
    for run in runs:
        assert run.ranks in groups(world)
        batch = [by_id[name] for name in run.batches]
        assert len({each.shape for each in batch}) == 1
        assert len(batch) == 1 or not any(each.began for each in batch)
        assert len(batch) == 1 or sum(len(each.jobs) for each in batch) <= MAX_JOBS


WORLDS = st.sampled_from([1, 2, 3, 5, 6, 7, 8, 13, 16, 64])
NEW = st.builds(
    lambda shape, arrived, allowed, priority, done: {
        "shape": shape, "arrived": arrived, "deadline": arrived + allowed, "priority": priority,
        "left": max(shape.steps - done, 1), "began": bool(done),
    },
    st.sampled_from(list(ONE_RANK)), st.floats(-500, 0), st.floats(0.1, 800), st.integers(-2, 2),
    st.sampled_from([0, 0, 0, 3]),
)  # fmt: skip
FAKES = st.builds(
    Fake, serial=st.sampled_from([0.0, 0.02, 0.3]), shared=st.sampled_from([0.0, 0.4]),
    least=st.sampled_from([1, 1, 2]),
)  # fmt: skip


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Batch], int, Fake, str]:
    """Tasks of which some run, as a policy left them a while ago, and others came since."""
    world, fake = draw(WORLDS), draw(FAKES)
    fake.least = min(fake.least, world)
    policy = draw(st.sampled_from(list(POLICIES)))
    asks = draw(st.lists(NEW, max_size=16))
    early = [task(f"a{at:02}", **ask) for at, ask in enumerate(asks)]
    late = [task(f"b{at:02}", **ask) for at, ask in enumerate(draw(st.lists(NEW, max_size=6)))]
    before = applied(early, POLICIES[policy](early, -5.0, world, fake)) if draw(st.booleans()) else early
    ended = draw(st.integers(0, 3))
    moved = [
        replace(each, step=min(each.step + 2, each.shape.steps)) if each.ranks else each for each in before
    ]
    return moved[ended:] + late, world, fake, policy


@given(situations())
@settings(max_examples=100, deadline=None)
def test_what_a_policy_gives_can_be_given(situation: tuple[list[Batch], int, Fake, str]) -> None:
    tasks, world, fake, policy = situation
    check_legal(POLICIES[policy](tasks, 0.0, world, fake), tasks, world)


@given(situations())
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_who_runs_stays_while_nothing_changes(situation: tuple[list[Batch], int, Fake, str]) -> None:
    """First come, first served at once. Elastic comes to rest when it is asked again, so that nobody is moved
    to and fro for ever; of a dozen tasks up to one situation in a hundred is not at rest at once.
    """
    tasks, world, fake, policy = situation
    fake.shared = 0.0  # no batches: tasks that became one are a change
    answers = []
    for _ in range(5):
        runs = POLICIES[policy](tasks, 0.0, world, fake)
        answers.append({run.batches[0]: run.ranks for run in runs})
        tasks = applied(tasks, runs)
    rest = answers[-2] if policy == "elastic" else answers[0]
    assert answers[-1] == rest


@given(situations(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_the_order_of_tasks_does_not_matter(
    situation: tuple[list[Batch], int, Fake, str], chance: random.Random
) -> None:
    tasks, world, fake, policy = situation
    mixed = chance.sample(tasks, len(tasks))
    assert set(POLICIES[policy](mixed, 0.0, world, fake)) == set(POLICIES[policy](tasks, 0.0, world, fake))


@given(situations())
@settings(max_examples=100, deadline=None)
def test_no_rank_is_idle_that_a_waiting_task_could_use(
    situation: tuple[list[Batch], int, Fake, str],
) -> None:
    """It may only wait if its first step there would end after others do: then it gets more."""
    tasks, world, fake, _ = situation
    runs = elastic(tasks, 0.0, world, fake)
    by_id = {each.id: each for each in tasks}
    free = world - sum(len(run.ranks) for run in runs)
    largest = max((size for size in sizes(world) if size <= free), default=0)
    seated = {name for run in runs for name in run.batches}
    waiting = [each for each in tasks if each.id not in seated]
    if not largest or not waiting:
        return
    ends = [
        by_id[run.batches[0]].left * fake.step(by_id[run.batches[0]].shape, len(run.ranks), len(run.batches))
        for run in runs
    ]
    assert all(fake.step(each.shape, largest, len(each.jobs)) > min(ends) for each in waiting)


@given(situations())
@settings(max_examples=60, deadline=None)
def test_fifos_stop_nothing(situation: tuple[list[Batch], int, Fake, str]) -> None:
    tasks, world, fake, policy = situation
    if policy != "elastic":
        runs = {run.batches[0]: run.ranks for run in POLICIES[policy](tasks, 0.0, world, fake)}
        assert all(runs[each.id] == each.ranks for each in tasks if each.ranks)


@given(st.lists(NEW, min_size=2, max_size=12), WORLDS)
@settings(max_examples=60, deadline=None)
def test_a_priority_passes(asks: list[dict[str, object]], world: int) -> None:
    tasks = [task(f"{at:02}", **{**ask, "shape": IMAGE, "left": 5}) for at, ask in enumerate(asks)]
    tasks = [each for each in tasks if -each.arrived < STARVATION_FACTOR * (each.deadline - each.arrived)]
    seated = {name for run in elastic(tasks, 0.0, world, Fake()) for name in run.batches}
    least = min((each.priority for each in tasks if each.id in seated), default=0)
    assert all(each.priority <= least for each in tasks if each.id not in seated)


def test_groups_are_neighbours() -> None:
    assert sizes(1) == [1]
    assert sizes(8) == [1, 2, 4, 8]
    assert groups(5) == [(0,), (1,), (2,), (3,), (4,), (0, 1), (2, 3), (0, 1, 2, 3), (0, 1, 2, 3, 4)]
    with pytest.raises(InputError, match="world must be >= 1, got 0"):
        groups(0)


def test_a_lone_video_has_all_ranks() -> None:
    runs = elastic([task("v", VIDEO, deadline=1e4)], 0.0, 8, Fake(serial=0.3))
    assert runs == [RankAssignment(("v",), tuple(range(8)))]


def test_small_images_go_side_by_side() -> None:
    images = [task(f"{at}") for at in range(8)]
    runs = elastic(images, 0.0, 8, Fake(serial=0.5))
    assert sorted(run.ranks for run in runs) == [(rank,) for rank in range(8)]


def test_more_images_than_ranks_are_batches_where_that_saves_time() -> None:
    images = [task(f"{at:02}") for at in range(20)]
    runs = elastic(images, 0.0, 2, Fake(serial=0.5, shared=0.5))
    assert sorted(len(run.batches) for run in runs) == [8, 8]
    assert all(len(run.batches) == 1 for run in elastic(images, 0.0, 2, Fake(serial=0.5)))


def test_no_batch_makes_a_member_late() -> None:
    fake = Fake(serial=0.5, shared=0.4)
    tight = fake.whole(IMAGE, 1) * 1.1
    runs = elastic([task("0", deadline=tight), task("1", deadline=50.0)], 0.0, 1, fake)
    assert runs == [RankAssignment(("0",), (0,))]


def test_an_image_passes_between_two_steps_of_a_video() -> None:
    fake = Fake()
    video = task("v", VIDEO, ranks=tuple(range(8)), began=True, deadline=300.0)
    image = task("i", deadline=3 * fake.whole(IMAGE, 8))
    runs = {run.batches[0]: run.ranks for run in elastic([video, image], 0.0, 8, fake)}
    assert runs["i"]
    assert runs.get("v") != video.ranks


def test_what_can_not_be_in_time_waits_for_what_can() -> None:
    lost, fine = task("a", deadline=0.5), task("b", deadline=2.5)
    assert elastic([lost, fine], 0.0, 1, Fake()) == [RankAssignment(("b",), (0,))]


def test_what_is_late_goes_first_where_that_costs_nobody_its_deadline() -> None:
    lost, fine = task("a", deadline=0.5), task("b", deadline=50.0)
    assert elastic([lost, fine], 0.0, 1, Fake()) == [RankAssignment(("a",), (0,))]


def test_what_fits_nowhere_is_left_out() -> None:
    assert elastic([task("a")], 0.0, 4, Fake(least=8)) == []


def test_the_longest_is_given_up_where_not_all_can_be_in_time() -> None:
    fake = Fake(serial=0.0)
    both = fake.whole(IMAGE, 1) + fake.whole(LARGE, 1)
    large, small = task("a", LARGE, deadline=both - 1.0), task("b", deadline=both - 0.9)
    assert elastic([large, small], 0.0, 1, fake) == [RankAssignment(("b",), (0,))]
    assert elastic([large, replace(small, deadline=both + 2)], 0.0, 1, fake) == [RankAssignment(("a",), (0,))]


def test_who_waited_long_goes_first() -> None:
    old = task("old", VIDEO, arrived=-400.0, deadline=-300.0, priority=-5)
    new = [task(f"{at}", deadline=2.5, priority=5) for at in range(4)]
    assert "old" in {name for run in elastic([old, *new], 0.0, 2, Fake()) for name in run.batches}
    young = replace(old, arrived=-150.0, deadline=-50.0)
    assert "old" not in {name for run in elastic([young, *new], 0.0, 2, Fake()) for name in run.batches}


def test_who_waited_long_leaves_ranks_to_those_who_can_be_in_time() -> None:
    old = task("old", VIDEO, arrived=-4000.0, deadline=-3000.0, ranks=tuple(range(8)), began=True)
    new = task("new", deadline=2.5)
    runs = {run.batches[0]: run.ranks for run in elastic([old, new], 0.0, 8, Fake(serial=0.0))}
    assert {name: len(ranks) for name, ranks in runs.items()} == {"old": 4, "new": 4}
    alone = elastic([old, new], 0.0, 8, Fake(serial=0.0, least=8))
    assert [run.batches for run in alone] == [("old",)]  # it fits on all ranks only, and may not starve


def test_the_last_to_come_is_given_up_among_equals() -> None:
    tasks = [task(f"{at}", arrived=at / 100, deadline=at / 100 + 5.0) for at in range(8)]
    first = elastic(tasks, 0.08, 1, Fake())
    assert [run.batches[0] for run in first] == ["0"]


def test_among_those_who_waited_long_who_runs_ends() -> None:
    old = [task(f"{at}", LARGE, arrived=at - 100.0, deadline=at - 90.0) for at in range(3)]
    running = replace(old[2], step=old[2].shape.steps - 4, ranks=(0,), began=True)
    assert elastic([*old[:2], running], 0.0, 1, Fake()) == [RankAssignment(("2",), (0,))]


def test_a_move_has_to_pay() -> None:
    begun = task("v", VIDEO, left=30, ranks=(0,), began=True, deadline=1e4)
    near = replace(begun, step=begun.shape.steps - 1)
    assert [run.ranks for run in elastic([begun], 0.0, 2, Fake())] == [(0, 1)]
    assert [run.ranks for run in elastic([near], 0.0, 2, Fake())] == [(0,)]


def test_fewer_ranks_have_to_leave_time_for_the_move() -> None:
    """Or a task would be on fewer ranks, then late, then on more again."""
    fake = Fake(serial=0.3, switch=0.3)
    begun = task("a", left=10, ranks=(0, 1), began=True, deadline=1.2)  # on one rank it takes 1.05 s more
    runs = elastic([begun, task("b", deadline=1.3)], 0.0, 2, fake)
    assert RankAssignment(("a",), (0, 1)) in runs


def test_what_is_decoded_stays() -> None:
    ending = task("e", LARGE, left=0, ranks=(0, 1, 2, 3), began=True, deadline=1.0)
    urgent = [task(f"{at}", deadline=2.0, priority=9) for at in range(4)]
    runs = {run.batches[0]: run.ranks for run in elastic([ending, *urgent], 0.0, 4, Fake())}
    assert runs == {"e": (0, 1, 2, 3)}


def test_too_large_for_a_rank_gets_as_few_as_it_fits_on() -> None:
    fake = Fake(least=4)
    runs = elastic([task("0", LARGE), task("1", LARGE)], 0.0, 8, fake)
    assert sorted(run.ranks for run in runs) == [(0, 1, 2, 3), (4, 5, 6, 7)] or len(runs[0].ranks) == 8
    assert [run.ranks for run in one_rank([task("0")], 0.0, 8, fake)] == [(0, 1, 2, 3)]


def test_what_is_decoded_on_one_rank_goes_on_there_though_its_steps_would_not_fit() -> None:
    ends = task("e", LARGE, left=0, ranks=(0,), began=True)
    runs = {run.batches[0]: run.ranks for run in elastic([ends, task("0"), task("1")], 0.0, 4, Fake(least=2))}
    assert runs == {"e": (0,), "0": (2, 3)}


def test_a_latency_is_asked_once_for_each_shape_and_size() -> None:
    """So that 200 tasks are scheduled in milliseconds."""
    shapes = list(ONE_RANK)
    tasks = [task(f"{at:03}", shapes[at % 3], deadline=30.0 + at) for at in range(200)]
    fake = Fake()
    assert elastic(tasks, 0.0, 64, fake)
    assert fake.asked <= 3 * MAX_JOBS * len(sizes(64))
