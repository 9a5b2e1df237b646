"""Place: an attention of a model whose masks change, with its current and next plan and their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.core.errors import AgreementError, InputError
from weft.core.indices import IntArray
from weft.core.mask import AnyMask, BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.assignment import Assignment, AssignmentCost
from weft.plan.balance import ratio, step_ratio
from weft.plan.balanced import Balancer
from weft.plan.choose import Candidate, build, candidates, choose
from weft.plan.counts import head_loads
from weft.plan.forecast import Forecast
from weft.plan.plan_store import PlanKey, StoredPlan
from weft.plan.strategies import parse
from weft.plan.strategy import Strategy

MAX_STEPS = 1024
"""Of a place that are remembered."""
MASK_DRIFT = 0.1
"""How far the density or the spread of a place's masks moves, until other strategies are looked up again."""
MIN_SPEEDUP = 1.02
"""How much faster another strategy must be: changing costs a new program on all ranks."""


Draft = tuple[Strategy, Assignment, str]
"""The decisions of a plan: the assignment, its strategy, and the reason for it."""


class AttentionId(NamedTuple):
    """The key of an attention of a model, under which its plans are stored."""

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
    executors: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """Prepared for it, by the calls that the plan before it serves."""


Prepare = Callable[[Planned, Planned], None]
"""Makes ready to run by a plan in place of another; called on the planner's thread."""


class StepReport(NamedTuple):
    """Results of one step of a place with the current plan, and with the first plan of the run (static)."""

    step: int
    imbalance: float
    """The slowest rank's work over the mean; in a ring, of each of its steps."""
    imbalance_static: float
    seconds: float
    """Predicted."""
    seconds_static: float
    moved: float
    """The share of the blocks that changed their rank since the step before."""


@dataclass(frozen=True)
class StrategyChoice:
    """The strategy that was chosen for masks of one size, why, and what closed forms are wrong by."""

    strategy: Strategy
    why: str
    errors: Mapping[Strategy, float]
    """Times of strategies that were simulated, over their closed forms."""

    @staticmethod
    def of(problem: Problem, mask: BlockMask, topology: Topology) -> StrategyChoice:
        """Choose for a sequence of masks that begins with this one, among balanced plans."""
        plan = choose(problem, mask, topology)
        left_out = {name for name, _ in plan.left_out}
        options: dict[Strategy, Candidate] = {}
        for option in sorted(plan.ranked, key=lambda each: each.strategy.balance == "balanced"):
            # Equal plans share a name: on a balanced mask, that of the plan without a balance.
            balanced = _balanced(option.strategy)
            if balanced == option.strategy or str(balanced) not in left_out:
                options[balanced] = option
        options = options or {_balanced(plan.ranked[0].strategy): plan.ranked[0]}
        errors = {each: option.seconds / option.estimate for each, option in options.items()}
        return StrategyChoice(min(options, key=lambda each: options[each].seconds), plan.why(), errors)

    def estimate(self, strategy: Strategy, balancer: Balancer, cost: AssignmentCost) -> float:
        """Return seconds by the closed form, corrected; what was not simulated is taken for the worst."""
        error = self.errors.get(strategy, max(self.errors.values()))
        return error * _estimate(strategy, balancer, cost)

    def better(self, balancer: Balancer, now: Strategy, assignment: Assignment) -> Draft | None:
        """Look up whether another strategy is worth changing to on a mask."""
        taken = self.estimate(now, balancer, balancer.cost_of(now, assignment))
        times = {
            other: self.estimate(other, balancer, balancer.assign(other))
            for each in candidates(balancer.problem, balancer.mask, balancer.topology)
            if each.balance == "balanced" and not each.costly
            for other in each.tuned(balancer.topology)
        }
        best = min(times, key=lambda other: times[other])
        if times[best] * MIN_SPEEDUP > taken or best == now:
            return None
        why = f"{best} is {taken / times[best] - 1:.1%} ahead of {now} on the masks of this layer."
        return best, balancer.assign(best).assignment, why


ChooseStrategy = Callable[[BlockMask], StrategyChoice]
"""Makes the choice for attentions of one size, from a first mask of theirs, or remembers it."""


@dataclass(eq=False)
class Entry:
    """A place on one rank: what was planned for it and what was seen of it."""

    number: int
    place: AttentionId
    problem: Problem
    topology: Topology
    plan: Planned
    mask: BlockMask
    step: int
    requested: str = "auto"
    shares: npt.NDArray[np.float64] | None = None
    """The loads that the plan was made of, if they were known before the mask."""
    judged: deque[StepReport] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    loads: dict[int, IntArray] = field(default_factory=dict[int, IntArray])
    """Of heads, by step."""

    def __post_init__(self) -> None:
        self.first = self.start = self.last = self.plan
        self.held = {self.plan.version: self.plan}
        self.began = self.step
        self._looked = (0.0, 0.0)

    @property
    def newest(self) -> int:
        return max(list(self.held))  # a copy: the planner's thread adds to it

    @property
    def key(self) -> PlanKey:
        """What its plans are stored under, with those of the model's other layers."""
        return key_of(self.place, self.problem, self.topology)

    def stored(self) -> StoredPlan:
        """Return what the next run begins with: the first plan by the strategy in force, and all loads."""
        loads = sorted(self.loads.items())
        return StoredPlan(
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
        return Entry(number, *rest, self.start, self.mask, step, self.requested)

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

    def hold(self, version: int, draft: Draft, prepare: Prepare, digest: str = "") -> Planned:
        """Have a plan ready, to be used once all ranks have it; `digest` is that of rank 0's schedule."""
        plan = planned(*draft, self.problem, self.mask, self.topology, version)
        if digest not in ("", plan.schedule.digest):
            raise AgreementError(f"This rank makes another schedule than rank 0 of one plan: {self.place}.")
        prepare(self.plan, plan)
        self.held[version] = plan
        return plan

    def observe(
        self, mask: BlockMask, step: int, plan: Planned, forecast: Forecast, choice: ChooseStrategy
    ) -> Draft | None:
        """Judge the plan that a mask was computed by, and return the next one, if it is another."""
        layer = self.place.layer, self.place.branch
        before = max((each for each in self.loads if each < step), default=step - 1)
        self.loads[step] = head_loads(mask)
        while len(self.loads) > MAX_STEPS:
            del self.loads[next(iter(self.loads))]
        forecast.observe(layer, step, self.loads[step])
        balancer = Balancer(self.problem, mask, self.topology)
        self.judged.append(self._judge(balancer, step, plan, choice))
        now = self.held[self.newest]
        if now.strategy.balance != "balanced":
            return None
        assignment = balancer.renew(now.strategy, now.assignment, forecast.expected(layer, 2 * step - before))
        is_due = self.requested == "auto" and self._has_moved(balancer)
        if is_due and (other := choice(mask).better(balancer, now.strategy, assignment)):
            return other
        return None if assignment is now.assignment else (now.strategy, assignment, now.why)

    def _judge(self, balancer: Balancer, step: int, plan: Planned, choice: ChooseStrategy) -> StepReport:
        estimate = choice(balancer.mask).estimate if self.requested == "auto" else _estimate
        results: dict[Planned, tuple[float, float]] = {}
        for each in {plan, self.first}:
            cost = balancer.cost_of(each.strategy, each.assignment)
            results[each] = step_ratio(cost.seconds), estimate(each.strategy, balancer, cost)
        last, self.last = self.last.assignment, plan
        (now, seconds), (static, seconds_static) = results[plan], results[self.first]
        return StepReport(step, now, static, seconds, seconds_static, plan.assignment.moved(last))

    def _has_moved(self, balancer: Balancer) -> bool:
        """Whether masks have become others than those by which strategies were last looked up."""
        heads = balancer.row_loads.sum(axis=1)
        now = float(heads.sum()), ratio(heads)
        if all(abs(new - old) <= MASK_DRIFT * old for new, old in zip(now, self._looked, strict=True)):
            return False
        self._looked = now
        return True


def key_of(place: AttentionId, problem: Problem, topology: Topology) -> PlanKey:
    shape = problem.heads, problem.q.size, problem.kv.size, problem.ranks
    return PlanKey(model=place.model, shape=shape, sparsity=place.sparsity, topology=topology.name)


def _balanced(strategy: Strategy) -> Strategy:
    return replace(strategy, balance="balanced")


def resume(stored: StoredPlan, requested: str, balancer: Balancer) -> Draft | None:
    """Return what an earlier run began with, if it fits, made even for the first mask of this one."""
    try:
        strategy = parse(stored.strategy, balancer.problem.ranks)
    except InputError:  # of another version of weft
        return None
    if strategy.balance != "balanced" or requested not in ("auto", stored.strategy):
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


def _estimate(strategy: Strategy, balancer: Balancer, cost: AssignmentCost) -> float:
    return strategy.estimate(balancer.problem, balancer.topology, cost)
