"""Planner: who computes what in attentions whose masks change, planned beside the run from what was seen.

    plan = planner.plan(place, problem, mask, step=step, topology=topology)
    attention(q, k, v, mask=mask, plan=plan)

One for each world. The first mask of a place is planned at once, by all ranks alike. From then on rank 0 plans
in a thread, from the masks that have been, and leaves the new assignment in the group's store; the others
fetch it in threads of theirs. Whenever a mask is new, the ranks compare it, and with it say which assignments
they hold: the newest that all of them hold is used from this call on. So all ranks change at the same call, no
rank waits for a plan, and a plan that is late holds later. Only assignments lag; masks never do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from weft.core.codec import dumps, loads
from weft.core.errors import AgreementError
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
from weft.plan.store import Store, Stored
from weft.plan.strategies import parse
from weft.plan.strategy import Strategy
from weft.run.comm import Comm

_log = logging.getLogger("weft")
PLACES = 4096
"""Layers × branches × sizes whose plans are remembered."""
STALE = 1.05
"""The imbalance of a stored assignment on the first mask of a run from which one is made anew."""
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
    strategy: str
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
class _Entry:
    """A place on one rank."""

    number: int
    place: Place
    problem: Problem
    topology: Topology
    first: Planned
    held: dict[int, Planned]
    why: str
    mask: BlockMask
    step: int
    plan: Planned = field(init=False)
    judged: list[Judged] = field(default_factory=list[Judged])
    loads: dict[int, Any] = field(default_factory=dict[int, Any])

    def __post_init__(self) -> None:
        self.plan = self.first

    @property
    def newest(self) -> int:
        return max(list(self.held))  # a copy: the planner's thread adds to it


class Planner:
    """The plans of one world, the same on all ranks; `store` is where rank 0 leaves assignments."""

    def __init__(self, comm: Comm, store: Callable[[], Any], *, prior: Store | None = None) -> None:
        self.comm, self.prior = comm, prior
        self.entries: dict[Any, _Entry] = {}
        self._numbers: dict[int, _Entry] = {}
        self._count = 0
        self._strategies: dict[Any, tuple[Strategy, str]] = {}
        self._open_store = store
        self._thread: ThreadPoolExecutor | None = None
        self._published = self._fetched = 0
        self._forecasts: dict[str, Forecast] = {}
        self._stored: dict[Any, Stored] = {}

    def plan(
        self,
        place: Place,
        problem: Problem,
        mask: BlockMask,
        *,
        step: int,
        topology: Topology,
        asked: str = "auto",
    ) -> Planned:
        """Return the plan of a call. All ranks ask in the same order, each with the mask of the call."""
        key = place, problem, mask.grid, asked
        entry = self.entries.get(key)
        if entry is None:
            entry = self._begin(key, mask, step, topology)
        elif mask is not entry.mask:
            entry.mask, entry.step = mask, step
            self._renew(entry)
        return entry.plan

    # On the thread of the model.

    def _begin(self, key: Any, mask: BlockMask, step: int, topology: Topology) -> _Entry:
        place, problem, _, asked = key
        strategy, why = self._strategy(place, problem, mask, topology, asked)
        balancer = Balancer(problem, mask, topology)
        stored = self._stored.get(place)
        assignment = stored.assignment if stored and stored.strategy == str(strategy) else None
        if assignment is not None and assignment.fits(problem, mask, strategy):
            if ratio(balancer.cost_of(strategy, assignment).seconds.sum(axis=2)) > STALE:
                assignment = None
        if assignment is None:
            assignment = balancer.assign(strategy).assignment
        first = _planned(strategy, assignment, problem, mask, topology)
        self._count += 1
        number = self._count
        entry = _Entry(number, place, problem, topology, first, {0: first}, why, mask, step)
        while len(self.entries) >= PLACES:
            gone = self.entries.pop(next(iter(self.entries)))
            self._numbers.pop(gone.number)
        self.entries[key] = self._numbers[number] = entry
        if self.comm.size > 1:
            self._compare(entry)
            if self.comm.rank == 0:
                self._in_background(self._observe, entry, mask, step)
        return entry

    def _strategy(
        self, place: Place, problem: Problem, mask: BlockMask, topology: Topology, asked: str
    ) -> tuple[Strategy, str]:
        """Choose once for attentions of one size: what is best for one layer is a good start for the others."""
        if asked != "auto":
            return parse(asked, problem.ranks), "asked for"
        kind = place.model, place.sparsity, problem, mask.grid
        if kind not in self._strategies:
            found = choose(problem, mask, topology)
            strategy = found.ranked[0].strategy
            if strategy.balance == "none":  # the first mask may have nothing to balance, later ones will
                strategy = replace(strategy, balance="balanced")
            self._strategies[kind] = strategy, found.why()
        return self._strategies[kind]

    def _renew(self, entry: _Entry) -> None:
        """A new mask: take the newest assignment that all ranks hold, and have the next one planned."""
        if self.comm.size == 1:
            return
        newest = self._compare(entry)
        entry.plan = entry.held[newest]
        for old in [version for version in list(entry.held) if version < newest]:
            del entry.held[old]
        if self.comm.rank == 0:
            self._in_background(self._observe, entry, entry.mask, entry.step)

    def _compare(self, entry: _Entry) -> int:
        """Return the newest version that every rank holds, if all of them have the same mask."""
        mine = int(entry.mask.digest[:DIGITS], 16)
        rows = self.comm.gather_numbers([entry.number, mine, entry.newest, self._published])
        for at, what in ((0, "attention"), (1, "mask")):
            if odd := [rank for rank, row in enumerate(rows) if row[at] != rows[0][at]]:
                raise AgreementError(
                    f"Ranks {odd} have another {what} than rank 0 in layer {entry.place.layer}, step {entry.step}.",
                    hint="All ranks make the same masks, from the same inputs or from what they have exchanged.",
                )
        published = rows[0][3]
        if self.comm.rank and published > self._fetched:
            self._in_background(self._fetch, self._fetched, published)
            self._fetched = published
        return min(row[2] for row in rows)

    def _in_background(self, what: Callable[..., None], *args: Any) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-plan")
            self._store = self._open_store()
        self._thread.submit(_logged, what, *args)

    # On the planner's thread.

    def _observe(self, entry: _Entry, mask: BlockMask, step: int) -> None:
        """Rank 0: judge the plan in force, and make the next one."""
        place, problem, topology, now = entry.place, entry.problem, entry.topology, entry.held[entry.newest]
        forecast = self._forecasts.setdefault(place.sparsity, Forecast(self._prior_loads()))
        entry.loads[step] = head_loads(mask)
        forecast.observe((place.layer, place.branch), step, entry.loads[step])
        strategy, balancer = parse(now.strategy, problem.ranks), Balancer(problem, mask, topology)
        entry.judged.append(_judge(balancer, step, entry.plan, entry.first))
        if strategy.balance != "balanced":
            return
        steps = sorted(entry.loads)
        following = step + (steps[-1] - steps[-2] if len(steps) > 1 else 1)
        expected = forecast.expected((place.layer, place.branch), following)
        assignment = balancer.renew(strategy, now.assignment, expected)
        if assignment is now.assignment:
            return
        version = now.version + 1
        planned = _planned(strategy, assignment, problem, mask, topology, version)
        number = self._published + 1
        self._store.set(str(number), dumps([entry.number, version, now.strategy, assignment]))
        entry.held[version] = planned
        self._published = number

    def _fetch(self, after: int, until: int) -> None:
        """Other ranks: make schedules of what rank 0 has planned."""
        for number in range(after + 1, until + 1):
            place, version, strategy, assignment = loads(self._store.get(str(number)))
            entry = self._numbers.get(place)
            if entry is None:  # forgotten in the meantime
                continue
            entry.held[version] = _planned(
                parse(strategy, entry.problem.ranks),
                assignment,
                entry.problem,
                entry.mask,
                entry.topology,
                version,
            )

    def _prior_loads(self) -> dict[Any, Any]:
        return {
            (place.layer, place.branch): dict(zip(stored.steps, stored.loads, strict=True))
            for place, stored in self._stored.items()
        }

    def finish(self) -> None:
        """Wait for what is being planned; for tests, and before plans are saved."""
        if self._thread is not None:
            self._thread.submit(lambda: None).result()


def _planned(
    strategy: Strategy,
    assignment: Assignment,
    problem: Problem,
    mask: BlockMask,
    topology: Topology,
    version: int = 0,
) -> Planned:
    schedule = build(str(strategy), problem, AnyMask.like(mask), topology, assignment=assignment)
    return Planned(schedule, str(strategy), assignment, version)


def _judge(balancer: Balancer, step: int, now: Planned, first: Planned) -> Judged:
    found: list[float] = []
    for plan in (now, first):
        strategy = parse(plan.strategy, balancer.problem.ranks)
        cost = balancer.cost_of(strategy, plan.assignment)
        found += [
            ratio(cost.seconds.sum(axis=2)),
            strategy.estimate(balancer.problem, balancer.topology, cost),
        ]
    return Judged(step, found[0], found[2], found[1], found[3])


def _logged(what: Callable[..., None], *args: Any) -> None:
    try:
        what(*args)
    except Exception:  # the plan in force stays in force
        _log.warning("No new plan could be made", exc_info=True)
