"""Planner: who computes what in attentions whose masks change, planned beside the run from what was seen.

    plan = planner.plan(place, problem, mask, step=step, topology=lambda: topology)
    attention(q, k, v, mask=mask, plan=plan)

One for each world. The first mask of a place is planned at once, by all ranks alike. From then on rank 0
plans in a thread, from the masks that have been, and leaves the new assignment in the group's store; the
others fetch it in threads of theirs. Whenever a mask is new, the ranks compare it, and with it say which
assignments they hold: the newest that all of them hold is used from this call on. So all ranks change at the
same call, no rank waits for a plan, and a plan that is late holds later. Only assignments lag, never masks.

Where the loads of heads are known before the masks, as in training by budgets, plans are made of them, at
once, whenever they have moved: they repeat to the bit, and are the same in groups that have other masks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.core.codec import dumps, loads
from weft.core.errors import AgreementError
from weft.core.indices import IntArray
from weft.core.mask import AnyMask, BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.assignment import Assignment
from weft.plan.balance import ratio
from weft.plan.balanced import Balancer
from weft.plan.choose import build, choose
from weft.plan.counts import head_loads
from weft.plan.forecast import Forecast
from weft.plan.strategies import parse
from weft.plan.strategy import Strategy
from weft.run.comm import Comm
from weft.run.exchange import broadcast_json

_log = logging.getLogger("weft")
PLACES = 4096
"""Layers × branches × sizes whose plans are remembered."""
STALE = 1.05
"""The imbalance of an earlier run's assignment on the first mask of this one, from which one is made anew."""
DRIFT = 1 / 16
"""How far the share of a head may move before its place is planned again."""
DIGITS = 15
"""Hexadecimal ones of a digest, as a number that travels in 64 bits."""


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


class Judged(NamedTuple):
    """A step of a place: max / mean of the ranks' work, and predicted seconds, as planned and as at first."""

    step: int
    imbalance: float
    imbalance_static: float
    seconds: float
    seconds_static: float


@dataclass(eq=False)
class Entry:
    """A place on one rank: what was planned for it and what was seen of it."""

    number: int
    place: Place
    problem: Problem
    topology: Topology
    plan: Planned
    why: str
    mask: BlockMask
    step: int
    shares: npt.NDArray[np.float64] | None = None
    """The loads that the plan was made of, if they were known before the mask."""
    judged: list[Judged] = field(default_factory=list[Judged])
    loads: dict[int, IntArray] = field(default_factory=dict[int, IntArray])

    def __post_init__(self) -> None:
        self.first = self.plan
        self.held = {self.plan.version: self.plan}

    @property
    def newest(self) -> int:
        return max(list(self.held))  # a copy: the planner's thread adds to it

    def planned(self, strategy: Strategy, assignment: Assignment, version: int) -> Planned:
        return _planned(strategy, assignment, self.problem, self.mask, self.topology, version)


class Planner:
    """The plans of one world, the same on all ranks.

    `store` opens what rank 0 leaves assignments in; without one, first plans stay. `evict` is told of plans
    that will not be used again.
    """

    def __init__(
        self,
        comm: Comm,
        store: Callable[[], Any] | None,
        evict: Callable[[Planned], None] = lambda _: None,
    ) -> None:
        self.comm, self._evict = comm, evict
        self.entries: dict[Any, Entry] = {}
        self.prior: dict[Place, Any] = {}
        """Of an earlier run: see `weft.plan.store.Stored`."""
        self.resumed: dict[str, tuple[npt.NDArray[np.float64], str]] = {}
        """Of a checkpoint: the shares and the strategy of plans by loads, see `state`."""
        self._store_of = store
        self._numbers: dict[int, Entry] = {}
        self._count = self._published = self._fetched = 0
        self._strategies: dict[Any, tuple[Strategy, str]] = {}
        self._forecasts: dict[str, Forecast] = {}

    def plan(  # noqa: PLR0913 - what an attention is
        self,
        place: Place,
        problem: Problem,
        mask: BlockMask,
        *,
        step: int,
        topology: Callable[[], Topology],
        asked: str = "auto",
        loads: npt.NDArray[np.float64] | None = None,
    ) -> Planned:
        """Return the plan of a call. All ranks ask in the same order, each with the mask of the call."""
        key = place, problem, mask.grid, asked
        entry = self.entries.get(key)
        if entry is None or (loads is not None and _moved(entry.shares, loads)):
            entry = self._begin(key, mask, step, topology(), loads)
        elif mask is not entry.mask:
            entry.mask, entry.step = mask, step
            self._compare(entry)
        return entry.plan

    def state(self) -> dict[str, tuple[list[float], str]]:
        """Return what plans by loads were made of, to go on by the same ones."""
        return {
            _name(entry.place, entry.problem): (entry.shares.tolist(), str(entry.plan.strategy))
            for entry in self.entries.values()
            if entry.shares is not None
        }

    def finish(self) -> None:
        """Wait for what is being planned: for tests, and before plans are saved."""
        if "_background" in vars(self):
            self._background.submit(lambda: None).result()

    # On the thread of the model.

    def _begin(
        self,
        key: Any,
        mask: BlockMask,
        step: int,
        topology: Topology,
        shares: npt.NDArray[np.float64] | None,
    ) -> Entry:
        place, problem, *_ = key
        before, name = self.resumed.pop(_name(place, problem), (None, ""))
        if before is not None and shares is not None and not _moved(before, shares):
            shares, strategy, why = before, parse(name, problem.ranks), "as before"
        else:
            strategy, why = self._strategy(key, mask, topology, known=shares is not None)
        balancer = Balancer(problem, mask, topology)
        if shares is not None:
            assignment = balancer.assign_by(strategy, shares)
        else:
            assignment = self._earlier(place, strategy, balancer) or balancer.assign(strategy).assignment
        planned = _planned(strategy, assignment, problem, mask, topology)
        self._count += 1
        while len(self.entries) >= PLACES:
            self._numbers.pop(self.entries.pop(next(iter(self.entries))).number, None)
        entry = Entry(self._count, place, problem, topology, planned, why, mask, step, shares)
        if key in self.entries:
            self._evict(self.entries[key].plan)
        self.entries[key] = self._numbers[entry.number] = entry
        self._compare(entry)
        return entry

    def _strategy(
        self, key: Any, mask: BlockMask, topology: Topology, *, known: bool
    ) -> tuple[Strategy, str]:
        """Choose for attentions of one size: the best for one layer is a good start for the others."""
        place, problem, grid, asked = key
        if asked != "auto":
            return parse(asked, problem.ranks), "asked for"
        kind = place.model, place.sparsity, problem, grid
        if kind not in self._strategies or known:
            found = choose(problem, mask, topology)
            strategy, why = found.ranked[0].strategy, found.why()
            if strategy.balance == "none":  # the first mask may have nothing to balance, later ones will
                strategy = replace(strategy, balance="balanced")
            if known:  # groups with other masks, and runs that resume, plan alike
                strategy = parse(str(broadcast_json(str(strategy))), problem.ranks)
            self._strategies[kind] = strategy, why
        return self._strategies[kind]

    def _earlier(self, place: Place, strategy: Strategy, balancer: Balancer) -> Assignment | None:
        """Return what an earlier run ended with, if it still fits."""
        stored = self.prior.get(place)
        if stored is None or stored.strategy != str(strategy):
            return None
        if not stored.assignment.fits(balancer.problem, balancer.mask, strategy):
            return None
        cost = balancer.cost_of(strategy, stored.assignment)
        return None if ratio(cost.seconds.sum(axis=2)) > STALE else stored.assignment

    def _compare(self, entry: Entry) -> None:
        """Compare a new mask over the ranks, and take the newest plan of its place that all of them hold."""
        if self.comm.size == 1:
            return
        mine = int(entry.mask.digest[:DIGITS], 16)
        rows = self.comm.gather_numbers([entry.number, mine, entry.newest, self._published])
        for at, what in ((0, "attention"), (1, "mask")):
            if odd := [rank for rank, row in enumerate(rows) if row[at] != rows[0][at]]:
                raise AgreementError(
                    f"Ranks {odd} have another {what} than rank 0: step {entry.step}, {entry.place}.",
                    hint="Make masks that are the same on all ranks, from equal or exchanged inputs.",
                )
        newest = min(row[2] for row in rows)
        if newest > entry.plan.version:
            self._evict(entry.plan)
            entry.plan = entry.held[newest]
        for old in [version for version in list(entry.held) if version < newest]:
            del entry.held[old]
        if self.comm.rank and rows[0][3] > self._fetched:
            self._background.submit(_logged, self._fetch, self._fetched, rows[0][3])
            self._fetched = rows[0][3]
        elif not self.comm.rank and entry.shares is None and self._store_of is not None:
            self._background.submit(_logged, self._observe, entry, entry.mask, entry.step)

    # On the planner's thread.

    @cached_property
    def _background(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="weft-plan")

    @cached_property
    def _store(self) -> Any:
        assert self._store_of is not None
        return self._store_of()

    def _observe(self, entry: Entry, mask: BlockMask, step: int) -> None:
        """Rank 0: judge the plan in force, and make the next one."""
        place, now = entry.place, entry.held[entry.newest]
        forecast = self._forecasts.setdefault(place.sparsity, Forecast(self._prior_loads(place.sparsity)))
        entry.loads[step] = head_loads(mask)
        forecast.observe((place.layer, place.branch), step, entry.loads[step])
        balancer = Balancer(entry.problem, mask, entry.topology)
        entry.judged.append(_judge(balancer, step, entry.plan, entry.first))
        if now.strategy.balance != "balanced":
            return
        last = sorted(entry.loads)[-2:]
        expected = forecast.expected(
            (place.layer, place.branch), 2 * step - last[0] if last[1:] else step + 1
        )
        assignment = balancer.renew(now.strategy, now.assignment, expected)
        if assignment is not now.assignment:
            version = now.version + 1
            message = dumps([entry.number, version, str(now.strategy), assignment])
            self._store.set(str(self._published + 1), message)
            entry.held[version] = entry.planned(now.strategy, assignment, version)
            self._published += 1

    def _fetch(self, after: int, until: int) -> None:
        """Other ranks: make schedules of what rank 0 has planned."""
        for number in range(after + 1, until + 1):
            place, version, strategy, assignment = loads(self._store.get(str(number)))
            if entry := self._numbers.get(place):  # not forgotten in the meantime
                parsed = parse(strategy, entry.problem.ranks)
                entry.held[version] = entry.planned(parsed, assignment, version)

    def _prior_loads(self, sparsity: str) -> dict[Any, Any]:
        return {
            (place.layer, place.branch): dict(zip(stored.steps, stored.loads, strict=True))
            for place, stored in self.prior.items()
            if place.sparsity == sparsity
        }


def _name(place: Place, problem: Problem) -> str:
    return f"layer {place.layer}, {problem.heads} heads on {problem.ranks} ranks"


def _moved(planned: npt.NDArray[np.float64] | None, now: npt.NDArray[np.float64]) -> bool:
    return planned is None or len(planned) != len(now) or bool(np.abs(planned - now).max() > DRIFT)


def _planned(
    strategy: Strategy,
    assignment: Assignment,
    problem: Problem,
    mask: BlockMask,
    topology: Topology,
    version: int = 0,
) -> Planned:
    schedule = build(str(strategy), problem, AnyMask.like(mask), topology, assignment=assignment)
    return Planned(schedule, strategy, assignment, version)


def _judge(balancer: Balancer, step: int, now: Planned, first: Planned) -> Judged:
    numbers: list[float] = []
    for plan in (now, first):
        cost = balancer.cost_of(plan.strategy, plan.assignment)
        seconds = plan.strategy.estimate(balancer.problem, balancer.topology, cost)
        numbers += [ratio(cost.seconds.sum(axis=2)), seconds]
    return Judged(step, numbers[0], numbers[2], numbers[1], numbers[3])


def _logged(what: Callable[..., None], *args: Any) -> None:
    try:
        what(*args)
    except Exception:  # the plan in force stays in force
        _log.warning("No new plan could be made", exc_info=True)
