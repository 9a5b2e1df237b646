"""Place: an attention of a model whose masks change; its plan in force, the next one, and how they did."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.indices import IntArray
from weft.core.mask import AnyMask, BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.assignment import Assignment
from weft.plan.balance import ratio, step_ratio
from weft.plan.balanced import Balancer
from weft.plan.choose import build, candidates, choose
from weft.plan.counts import head_loads
from weft.plan.forecast import Forecast
from weft.plan.store import Key, Stored
from weft.plan.strategies import parse
from weft.plan.strategy import Strategy

STEPS = 1024
"""Of a place that are remembered."""
MOVED = 0.1
"""How far the density or the spread of a place's masks moves, until other strategies are looked up again."""
WORTH = 1.02
"""How much faster another strategy must be: changing costs a new program on all ranks."""


Draft = tuple[Strategy, Assignment, str]
"""What a plan is made of: who computes what by which strategy, and why that one."""


class Place(NamedTuple):
    """An attention of a model, as its plans are kept for it."""

    model: str
    layer: int
    branch: int
    sparsity: str


@dataclass(frozen=True, eq=False)
class Planned:
    """A schedule that serves any mask of a place, and what it was made of."""

    schedule: Schedule
    strategy: Strategy
    assignment: Assignment
    version: int = 0
    why: str = ""
    """Of the strategy."""


class Judged(NamedTuple):
    """A step of a place: by the plan in force, and by the first one of the run (static)."""

    step: int
    imbalance: float
    """The slowest rank's work over the mean; in a ring, of each of its steps."""
    imbalance_static: float
    seconds: float
    """Predicted."""
    seconds_static: float
    moved: float
    """The share of the blocks that changed their rank since the step before."""


@dataclass(eq=False)
class Entry:
    """A place on one rank: what was planned for it and what was seen of it."""

    number: int
    place: Place
    problem: Problem
    topology: Topology
    plan: Planned
    mask: BlockMask
    step: int
    asked: str = "auto"
    shares: npt.NDArray[np.float64] | None = None
    """The loads that the plan was made of, if they were known before the mask."""
    judged: deque[Judged] = field(default_factory=lambda: deque(maxlen=STEPS))
    loads: dict[int, IntArray] = field(default_factory=dict[int, IntArray])
    """Of heads, by step."""

    def __post_init__(self) -> None:
        self.first = self.start = self.last = self.plan
        self.held = {self.plan.version: self.plan}
        self.began = self.step
        self._looked = (0.0, 0.0)

    @property
    def why(self) -> str:
        return self.plan.why

    @property
    def newest(self) -> int:
        return max(list(self.held))  # a copy: the planner's thread adds to it

    @property
    def key(self) -> Key:
        """What its plans are stored under, with those of the model's other layers."""
        return key_of(self.place, self.problem, self.topology)

    def stored(self) -> Stored:
        """Return what the next run begins with: the first plan by the strategy in force, and all loads."""
        loads = sorted(self.loads.items())
        return Stored(
            layer=self.place.layer,
            branch=self.place.branch,
            strategy=str(self.start.strategy),
            assignment=self.start.assignment.packed(),
            steps=tuple(step for step, _ in loads),
            loads=np.array([each for _, each in loads], dtype=np.int64).reshape(-1, self.problem.heads),
        )

    def again(self, number: int, step: int) -> Entry:
        """Return this place in another run, which begins as this one did."""
        rest = self.place, self.problem, self.topology
        return Entry(number, *rest, self.start, self.mask, step, self.asked)

    def use(self, version: int) -> Planned | None:
        """Change to a newer plan, and return the one that it takes the place of."""
        old = self.plan
        if version > old.version:
            self.plan = self.held[version]
            if self.plan.strategy != self.start.strategy:
                self.start = self.plan
        for stale in [each for each in list(self.held) if each < version]:
            del self.held[stale]
        return old if self.plan is not old else None

    def hold(self, version: int, draft: Draft) -> None:
        """Have a plan ready, to be used once all ranks have it."""
        self.held[version] = planned(*draft, self.problem, self.mask, self.topology, version)

    def observe(self, mask: BlockMask, step: int, plan: Planned, forecast: Forecast) -> Draft | None:
        """Judge the plan that a mask was computed by, and return the next one, if it is another."""
        layer = self.place.layer, self.place.branch
        before = max((each for each in self.loads if each < step), default=step - 1)
        self.loads[step] = head_loads(mask)
        while len(self.loads) > STEPS:
            del self.loads[next(iter(self.loads))]
        forecast.observe(layer, step, self.loads[step])
        balancer = Balancer(self.problem, mask, self.topology)
        self.judged.append(self._judge(balancer, step, plan))
        now = self.held[self.newest]
        if now.strategy.balance != "balanced":
            return None
        assignment = balancer.renew(now.strategy, now.assignment, forecast.expected(layer, 2 * step - before))
        is_due = self.asked == "auto" and self._has_moved(balancer)
        if is_due and (other := _better(balancer, now.strategy, assignment)):
            return other
        return None if assignment is now.assignment else (now.strategy, assignment, now.why)

    def _judge(self, balancer: Balancer, step: int, plan: Planned) -> Judged:
        imbalance, seconds = _judge(balancer, plan)
        static = (imbalance, seconds) if plan is self.first else _judge(balancer, self.first)
        last, self.last = self.last.assignment, plan
        return Judged(step, imbalance, static[0], seconds, static[1], plan.assignment.moved(last))

    def _has_moved(self, balancer: Balancer) -> bool:
        """Whether masks have become others than those by which strategies were last looked up."""
        heads = balancer.row_loads.sum(axis=1)
        now = float(heads.sum()), ratio(heads)
        if all(abs(new - old) <= MOVED * old for new, old in zip(now, self._looked, strict=True)):
            return False
        self._looked = now
        return True


def key_of(place: Place, problem: Problem, topology: Topology) -> Key:
    shape = problem.heads, problem.q.size, problem.kv.size, problem.ranks
    return Key(model=place.model, shape=shape, sparsity=place.sparsity, topology=topology.name)


def chosen(problem: Problem, mask: BlockMask, topology: Topology) -> tuple[Strategy, str]:
    """Choose a strategy for masks that begin with this one."""
    found = choose(problem, mask, topology)
    strategy = found.ranked[0].strategy
    if strategy.balance == "none":  # the first mask may have nothing to balance, later ones will
        strategy = replace(strategy, balance="balanced")
    return strategy, found.why()


def carried_on(stored: Stored, asked: str, balancer: Balancer) -> Draft | None:
    """Return what an earlier run began with, if it fits, made even for the first mask of this one."""
    try:
        strategy = parse(stored.strategy, balancer.problem.ranks)
    except InputError:  # of another version of weft
        return None
    if strategy.balance != "balanced" or asked not in ("auto", stored.strategy):
        return None
    if not stored.assignment.fits(balancer.problem, balancer.mask, strategy):
        return None
    return strategy, balancer.renew(strategy, stored.assignment), "as in an earlier run"


def planned(
    strategy: Strategy,
    assignment: Assignment,
    why: str,
    problem: Problem,
    mask: BlockMask,
    topology: Topology,
    version: int = 0,
) -> Planned:
    """Build a plan for every mask that is on the grid of this one."""
    schedule = build(str(strategy), problem, AnyMask.like(mask), topology, assignment=assignment)
    return Planned(schedule, strategy, assignment, version, why)


def _better(balancer: Balancer, now: Strategy, assignment: Assignment) -> Draft | None:
    """Look up by closed forms whether another strategy is worth changing to."""
    problem, topology = balancer.problem, balancer.topology
    taken = now.estimate(problem, topology, balancer.cost_of(now, assignment))
    ways = [
        way
        for each in candidates(problem, balancer.mask, topology)
        if each.balance == "balanced" and not each.costly
        for way in each.tuned(topology)
    ]
    times = [way.estimate(problem, topology, balancer.assign(way)) for way in ways]
    best = int(np.argmin(times))
    if times[best] * WORTH > taken or ways[best] == now:
        return None
    why = f"{ways[best]} is {taken / times[best] - 1:.1%} ahead of {now} on the masks of this layer."
    return ways[best], balancer.assign(ways[best]).assignment, why


def _judge(balancer: Balancer, plan: Planned) -> tuple[float, float]:
    cost = balancer.cost_of(plan.strategy, plan.assignment)
    return step_ratio(cost.seconds), plan.strategy.estimate(balancer.problem, balancer.topology, cost)
