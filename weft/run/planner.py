"""Planner: who computes what in attentions whose masks change, planned beside the run from what was seen.

    plan = planner.plan(place, problem, mask, step=step, topology=lambda: topology)
    attention(q, k, v, mask=mask, plan=plan)

One for each world. The first mask of a place is planned at once, by all ranks alike, from what an earlier run
has left. From then on rank 0 plans in a thread, from the masks that have been, and leaves the new plan in the
group's store; the others fetch it in threads of theirs. Whenever a mask is new, the ranks compare it, and
with it say which plans they hold: the newest that all of them hold is used from this call on. So all ranks
change at the same call, no rank waits for a plan, and a plan that is late holds later. Only plans lag, never
masks.

Where the loads of heads are known before the masks, as in training by budgets, plans are made of them, at
once, whenever they have moved: they repeat to the bit, and are the same in groups that have other masks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.core.codec import dumps, from_plain, loads, to_plain
from weft.core.errors import AgreementError
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.topology import Topology
from weft.plan.balanced import Balancer
from weft.plan.forecast import Forecast
from weft.plan.place import Choice, Entry, Place, Planned, Prepare, carried_on, key_of, planned
from weft.plan.store import Key, Store, Stored
from weft.plan.strategies import parse
from weft.plan.strategy import Strategy
from weft.run.comm import Comm
from weft.run.exchange import broadcast_json

_log = logging.getLogger("weft")
Loads = npt.NDArray[np.float64]
PLACES = 4096
"""Layers × branches × sizes whose plans are remembered."""
DRIFT = 1 / 16
"""How far the share of a head may move before its place is planned again."""
DIGITS = 15
"""Hexadecimal ones of a digest, as a number that travels in 64 bits."""
BACKLOG = 2
"""Masks of each place that may wait to be looked at; where planning is slower than the run, some are not."""
SAVE_SECONDS = 60.0
"""Between two times that plans are saved."""
_channels = count()
"""Each planner of a rank 0 has keys of its own in the group's store."""


class Planner:
    """The plans of one world, the same on all ranks.

    `store` opens what rank 0 leaves plans in; without one, first plans stay. `change` is told on the model's
    thread of a plan that will not be used again, and of the one in its place, if that was prepared.
    """

    def __init__(
        self,
        comm: Comm,
        store: Callable[[int], Any] | None,
        prepare: Prepare = lambda *_: None,
        change: Callable[[Planned, Planned | None], None] = lambda *_: None,
    ) -> None:
        self.comm, self._open, self._prepare, self._change = comm, store, prepare, change
        self.entries: dict[Any, Entry] = {}
        self.prior: dict[Key, Mapping[tuple[int, int], Stored]] = {}
        """Of an earlier run, by layer and branch; only rank 0 has their loads."""
        self.resumed: dict[str, tuple[Loads, str]] = {}
        """Of a checkpoint: the shares and the strategy of plans by loads, see `state`."""
        self._saved = Store()
        self._saved_at = -SAVE_SECONDS
        self._channel = next(_channels)
        self._numbers: dict[int, Entry] = {}
        self._count = self._published = self._asked = self._fetched = self._deleted = 0
        self._submitted = self._looked_at = 0
        self._seen: tuple[Any, ...] = ()
        self._background = ThreadPoolExecutor(
            1, thread_name_prefix="weft-plan"
        )  # its thread starts when needed
        self._choices: dict[Any, Choice] = {}
        self._forecasts: dict[Key, Forecast] = {}

    def plan(  # noqa: PLR0913 - what an attention is
        self,
        place: Place,
        problem: Problem,
        mask: BlockMask,
        *,
        step: int,
        topology: Callable[[], Topology],
        asked: str = "auto",
        loads: Loads | None = None,
    ) -> Planned:
        """Return the plan of a call. All ranks ask in the same order, each with the mask of the call."""
        key = place, problem, mask.grid, asked
        entry = self.entries.get(key)
        if entry is None or (loads is not None and _moved(entry.shares, loads)):
            entry = self._begin(key, mask, step, topology(), loads)
        elif mask is not entry.mask:
            if entry.shares is None and step < entry.step and step <= entry.began:
                entry = self._add(key, entry.again(self._count + 1, step))
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

    def save(self) -> None:
        """Leave plans and loads to runs to come: in the background, at most once a minute, never an error."""
        if self.comm.rank == 0 < len(self.entries) and time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self._saved_at = time.monotonic()
            self._look()
            self._background.submit(_logged, self._save)

    def finish(self) -> None:
        """Wait for what is being planned and saved."""
        self._look()
        self._background.submit(lambda: None).result()

    def close(self) -> None:
        """Plan no more; what is being planned is finished, and so is the thread."""
        self._background.shutdown(wait=False, cancel_futures=True)

    # On the thread of the model.

    def _begin(self, key: Any, mask: BlockMask, step: int, topology: Topology, shares: Loads | None) -> Entry:
        place, problem, _, asked = key
        balancer = Balancer(problem, mask, topology)
        if shares is not None:
            shares, strategy, why = self._by_loads(key, mask, topology, shares)
            first = strategy, balancer.assign_by(strategy, shares), why
        else:
            stored = self._earlier_run(key_of(place, problem, topology)).get((place.layer, place.branch))
            first = carried_on(stored, asked, balancer) if stored else None
        if first is None:
            if asked == "auto":
                choice = self._choice(place, problem, topology, mask)
                strategy, why = choice.strategy, choice.why
            else:
                strategy, why = parse(asked, problem.ranks), "asked for"
            first = strategy, balancer.assign(strategy).assignment, why
        plan = planned(*first, problem, mask, topology)
        entry = Entry(self._count + 1, place, problem, topology, plan, mask, step, asked, shares)
        self._compare(self._add(key, entry))
        return entry

    def _add(self, key: Any, entry: Entry) -> Entry:
        self._count = entry.number
        if old := self.entries.pop(key, None):
            self._numbers.pop(old.number, None)
            if old.plan is not entry.plan:
                self._change(old.plan, None)
        while len(self.entries) >= PLACES:
            self._numbers.pop(self.entries.pop(next(iter(self.entries))).number, None)
        self.entries[key] = self._numbers[entry.number] = entry
        return entry

    def _by_loads(
        self, key: Any, mask: BlockMask, topology: Topology, shares: Loads
    ) -> tuple[Loads, Strategy, str]:
        """Go on by a checkpoint's plan, or choose; groups with other masks, and runs that resume, alike."""
        place, problem, _, asked = key
        before, name = self.resumed.pop(_name(place, problem), (None, ""))
        if before is not None and not _moved(before, shares):
            return before, parse(name, problem.ranks), "as before"
        if asked == "auto":
            choice = Choice.of(problem, mask, topology)
            return shares, parse(str(broadcast_json(str(choice.strategy))), problem.ranks), choice.why
        return shares, parse(asked, problem.ranks), "asked for"

    def _choice(self, place: Place, problem: Problem, topology: Topology, mask: BlockMask) -> Choice:
        """Choose for attentions of one size: the best for one layer is a good start for the others."""
        kind = place.model, place.sparsity, problem, mask.grid
        if kind not in self._choices:
            self._choices[kind] = Choice.of(problem, mask, topology)
        return self._choices[kind]

    def _earlier_run(self, key: Key) -> Mapping[tuple[int, int], Stored]:
        """Return the plans of an earlier run, by layer and branch: rank 0 reads them for all ranks."""
        if key not in self.prior and self._open is not None:
            plans = self._saved.get(key) if self.comm.rank == 0 else ()
            bare = [replace(each, steps=(), loads=each.loads[:0]) for each in plans]
            message = broadcast_json(to_plain(bare), group=getattr(self.comm, "group", None))
            plans = plans or from_plain(message)
            self.prior[key] = {(each.layer, each.branch): each for each in plans}
        return self.prior.get(key, {})

    def _compare(self, entry: Entry) -> None:
        """Compare a new mask over the ranks, and take the newest plan of its place that all of them hold."""
        if self.comm.size == 1:
            return
        mine = int(entry.mask.digest[:DIGITS], 16)
        numbers = [entry.number, mine, entry.newest, self._published, self._fetched, self._channel]
        rows = self.comm.gather_numbers(numbers)
        for at, what in ((0, "attention"), (1, "mask")):
            if odd := [rank for rank, row in enumerate(rows) if row[at] != rows[0][at]]:
                raise AgreementError(
                    f"Ranks {odd} have another {what} than rank 0: step {entry.step}, {entry.place}.",
                    hint="Make masks that are the same on all ranks, from equal or exchanged inputs.",
                )
        if (old := entry.use(min(row[2] for row in rows))) is not None:
            self._change(old, entry.plan)
        if self._open is None or entry.shares is not None:
            return
        if self.comm.rank == 0:
            fetched = min(row[4] for row in rows[1:])
            self._look()
            if self._submitted - self._looked_at <= BACKLOG * len(self.entries):
                self._submitted += 1
                self._seen = entry, entry.mask, entry.step, entry.plan, fetched
        elif rows[0][3] > self._asked:
            self._channel = rows[0][5]
            self._background.submit(_logged, self._fetch, self._asked, rows[0][3])
            self._asked = rows[0][3]

    def _look(self) -> None:
        """Have the last mask looked at. Its call is under way: what runs it is there to be prepared anew."""
        if self._seen:
            self._background.submit(_logged, self._observe, *self._seen)
            self._seen = ()

    # On the planner's thread.

    @cached_property
    def _store(self) -> Any:
        assert self._open is not None
        return self._open(self._channel)

    def _observe(self, entry: Entry, mask: BlockMask, step: int, plan: Planned, fetched: int) -> None:
        """Rank 0: judge the plan that a mask was computed by, and publish the next one."""
        self._looked_at += 1
        key = entry.key
        if key not in self._forecasts:
            plans = self.prior.get(key, {}).items()
            before = {layer: dict(zip(each.steps, each.loads, strict=True)) for layer, each in plans}
            self._forecasts[key] = Forecast(before)
        choice = partial(self._choice, entry.place, entry.problem, entry.topology)
        draft = entry.observe(mask, step, plan, self._forecasts[key], choice)
        if draft is not None:
            strategy, assignment, why = draft
            made = entry.hold(entry.newest + 1, draft, self._prepare)
            facts = entry.number, made.version, made.schedule.digest
            message = dumps([*facts, str(strategy), assignment.packed(), why])
            self._store.set(str(self._published + 1), message)
            self._published += 1
        for number in range(self._deleted + 1, fetched + 1):
            self._store.delete_key(str(number))
            self._deleted = number

    def _fetch(self, after: int, until: int) -> None:
        """Other ranks: make schedules of what rank 0 has planned."""
        for number in range(after + 1, until + 1):
            message = self._store.get(str(number))
            self._fetched = number
            place, version, digest, strategy, assignment, why = loads(message)
            entry = self._numbers.get(place)
            if entry and version == entry.newest + 1:  # not forgotten, and all before it could be held
                draft = parse(strategy, entry.problem.ranks), assignment, why
                entry.hold(version, draft, self._prepare, digest)

    def _save(self) -> None:
        by_key: dict[Key, list[Stored]] = {}
        for entry in list(self.entries.values()):
            if entry.loads:
                by_key.setdefault(entry.key, []).append(entry.stored())
        for key, plans in by_key.items():
            self._saved.put(key, plans)


def _name(place: Place, problem: Problem) -> str:
    return f"layer {place.layer}, {problem.heads} heads on {problem.ranks} ranks"


def _moved(planned: Loads | None, now: Loads) -> bool:
    return planned is None or len(planned) != len(now) or bool(np.abs(planned - now).max() > DRIFT)


def _logged(what: Callable[..., None], *args: Any) -> None:
    try:
        what(*args)
    except Exception:  # the plan in force stays in force
        _log.warning("No new plan could be made", exc_info=True)
