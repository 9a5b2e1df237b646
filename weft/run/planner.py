"""Planner: plan attentions whose masks change, in the background, from the masks of earlier steps.

    plan = planner.plan(place, problem, mask, step=step, topology=lambda: topology)
    attention(q, k, v, mask=mask, plan=plan)

All ranks plan the first mask of an attention alike, from what an earlier run has saved, if any. From then on
a thread of rank 0 plans from the masks so far and publishes its plans in the group's store; others fetch
them. Whenever a mask is new, the ranks compare it and use the newest plan that all of them hold: they change
at the same call, and never wait for a plan. If the share of keys that each head computes is known before the
mask (budgets in training), plans follow from the shares alone, without a thread: runs repeat to the bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from typing import Any, ParamSpec

import numpy as np
import numpy.typing as npt

from weft.core.codec import dumps, from_plain, loads, to_plain
from weft.core.errors import AgreementError
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.topology import Topology
from weft.plan.balanced import Balancer
from weft.plan.forecast import Forecast
from weft.plan.place import AttentionId, Entry, Planned, Prepare, StrategyChoice, key_of, planned, resume
from weft.plan.plan_store import PlanKey, PlanStore, StoredPlan
from weft.plan.strategies import parse
from weft.plan.strategy import Strategy
from weft.run.comm import Comm
from weft.run.exchange import broadcast_json

_log = logging.getLogger("weft")
Args = ParamSpec("Args")
Shares = npt.NDArray[np.float64]  # by head, of the keys that it computes
MAX_ENTRIES = 4096
"""Largest number of attentions (layers × branches × sizes) whose plans are held."""
LOAD_DRIFT = 1 / 16
"""Largest change of a head's share of keys (1 is dense) before its attention is planned again."""
DIGEST_DIGITS = 15
"""Hexadecimal digits of a digest that are sent as one number of 64 bits."""
MAX_BACKLOG = 2
"""Masks that may wait for rank 0's thread, for each attention on average; further ones are skipped."""
SAVE_SECONDS = 60.0
"""Shortest time between two saves of the plans."""
_channels = count()
"""Numbers of planners, as prefixes of their keys in the group's store."""

EntryKey = tuple[AttentionId, Problem, tuple[int, ...], str]
"""An attention, its problem, the grid of its masks, and the strategy that the caller requested."""


class Planner:
    """The plans of one world, the same on all ranks.

    `store` opens the store in which rank 0 publishes plans; without one, first plans stay. `prepare` runs on
    the planner's thread, `change` on the model's, both with a plan and its replacement (None: it is evicted).
    """

    def __init__(
        self,
        comm: Comm,
        store: Callable[[int], Any] | None,
        prepare: Prepare = lambda _old, _new: None,
        change: Callable[[Planned, Planned | None], None] = lambda _old, _new: None,
    ) -> None:
        self.comm, self._open, self._prepare, self._change = comm, store, prepare, change
        self.entries: dict[EntryKey, Entry] = {}
        self.prior: dict[PlanKey, Mapping[tuple[int, int], StoredPlan]] = {}
        """Plans of an earlier run, by layer and branch; only rank 0 has their loads."""
        self.resumed: dict[str, tuple[Shares, str]] = {}
        """The `state` of a checkpoint: shares and strategies."""
        self._saved = PlanStore()
        self._saved_at = -SAVE_SECONDS
        self._channel = next(_channels)
        self._numbers: dict[int, Entry] = {}
        self._count = self._published = self._requested = self._fetched = self._deleted = 0
        self._submitted = self._observed = 0
        self._pending: tuple[Entry, BlockMask, int, Planned, int] | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="weft-plan")
        self._choices: dict[tuple[str, str, Problem, tuple[int, ...]], StrategyChoice] = {}
        self._forecasts: dict[PlanKey, Forecast] = {}

    def plan(  # noqa: PLR0913 - what identifies an attention
        self,
        place: AttentionId,
        problem: Problem,
        mask: BlockMask,
        *,
        step: int,
        topology: Callable[[], Topology],
        strategy: str = "auto",
        shares: Shares | None = None,
    ) -> Planned:
        """Return the plan of a call. All ranks call it in the same order, each with the mask of the call."""
        key = place, problem, mask.grid, strategy
        entry = self.entries.get(key)
        if entry is None or (shares is not None and _has_moved(entry.shares, shares)):
            entry = self._begin(key, mask, step, topology(), shares)
        elif mask is not entry.mask:
            if entry.shares is None and step < entry.step and step <= entry.began:  # another run of the model
                entry = self._add(key, entry.again(self._count + 1, step))
            entry.mask, entry.step = mask, step
            self._compare(entry)
        return entry.plan

    def state(self) -> dict[str, tuple[list[float], str]]:
        """Return the shares and strategies of plans made of shares, for a checkpoint: see `resumed`."""
        return {
            _name(entry.place, entry.problem): (entry.shares.tolist(), str(entry.plan.strategy))
            for entry in self.entries.values()
            if entry.shares is not None
        }

    def save(self) -> None:
        """Save plans and loads for later runs: in the background, at most once a minute, never an error."""
        if self.comm.rank == 0 < len(self.entries) and time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self._saved_at = time.monotonic()
            self._submit_pending()
            self._background.submit(_logged, self._save)

    def finish(self) -> None:
        """Wait until all submitted planning and saving is done."""
        self._submit_pending()
        self._background.submit(lambda: None).result()

    def close(self) -> None:
        """End the thread once it has finished the plan that it is making."""
        self._background.shutdown(wait=False, cancel_futures=True)

    def _begin(
        self, key: EntryKey, mask: BlockMask, step: int, topology: Topology, shares: Shares | None
    ) -> Entry:
        place, problem, _, requested = key
        balancer = Balancer(problem, mask, topology)
        if shares is not None:
            shares, strategy, why = self._by_shares(key, mask, topology, shares)
            first = strategy, balancer.assign_by(strategy, shares), why
        else:
            stored = self._earlier_run(key_of(place, problem, topology)).get((place.layer, place.branch))
            first = resume(stored, requested, balancer) if stored else None
        if first is None:
            if requested == "auto":
                choice = self._choice(place, problem, topology, mask)
                strategy, why = choice.strategy, choice.why
            else:
                strategy, why = parse(requested, problem.ranks), "requested"
            first = strategy, balancer.assign(strategy).assignment, why
        plan = planned(*first, problem, mask, topology)
        entry = Entry(self._count + 1, place, problem, topology, plan, mask, step, requested, shares)
        self._compare(self._add(key, entry))
        return entry

    def _add(self, key: EntryKey, entry: Entry) -> Entry:
        self._count = entry.number
        if old := self.entries.pop(key, None):
            self._numbers.pop(old.number, None)
            if old.plan is not entry.plan:
                self._change(old.plan, None)
        while len(self.entries) >= MAX_ENTRIES:
            self._numbers.pop(self.entries.pop(next(iter(self.entries))).number, None)
        self.entries[key] = self._numbers[entry.number] = entry
        return entry

    def _by_shares(
        self, key: EntryKey, mask: BlockMask, topology: Topology, shares: Shares
    ) -> tuple[Shares, Strategy, str]:
        """Return a checkpoint's shares and strategy, or choose: rank 0 of the job does it for all groups."""
        place, problem, _, requested = key
        before, name = self.resumed.pop(_name(place, problem), (None, ""))
        if before is not None and not _has_moved(before, shares):
            return before, parse(name, problem.ranks), "as before"
        if requested == "auto":
            choice = StrategyChoice.of(problem, mask, topology)
            return shares, parse(str(broadcast_json(str(choice.strategy))), problem.ranks), choice.why
        return shares, parse(requested, problem.ranks), "requested"

    def _choice(
        self, place: AttentionId, problem: Problem, topology: Topology, mask: BlockMask
    ) -> StrategyChoice:
        """Choose once for attentions of one size: the best for one layer is a good start for the others."""
        kind = place.model, place.sparsity, problem, mask.grid
        if kind not in self._choices:
            self._choices[kind] = StrategyChoice.of(problem, mask, topology)
        return self._choices[kind]

    def _earlier_run(self, key: PlanKey) -> Mapping[tuple[int, int], StoredPlan]:
        """Return the plans of an earlier run, by layer and branch: rank 0 reads them for all ranks."""
        if key not in self.prior and self._open is not None:
            plans = self._saved.get(key) if self.comm.rank == 0 else ()
            bare = [replace(each, steps=(), loads=each.loads[:0]) for each in plans]
            message = broadcast_json(to_plain(bare), group=getattr(self.comm, "group", None))
            plans = plans or from_plain(message)
            self.prior[key] = {(each.layer, each.branch): each for each in plans}
        return self.prior.get(key, {})

    def _compare(self, entry: Entry) -> None:
        """Compare a new mask over the ranks, and use the newest plan that all of them hold for it."""
        if self.comm.size == 1:
            return
        digest = int(entry.mask.digest[:DIGEST_DIGITS], 16)
        numbers = [entry.number, digest, entry.newest, self._published, self._fetched, self._channel]
        rows = self.comm.all_gather_ints(numbers)
        for at, what in ((0, "attention"), (1, "mask")):
            if odd := [rank for rank, row in enumerate(rows) if row[at] != rows[0][at]]:
                raise AgreementError(
                    f"Ranks {odd} have another {what} than rank 0: step {entry.step}, {entry.place}.",
                    hint="Masks must be the same on all ranks: make them from inputs that all ranks share.",
                )
        if (old := entry.use(min(row[2] for row in rows))) is not None:
            self._change(old, entry.plan)
        if self._open is None or entry.shares is not None:
            return
        if self.comm.rank == 0:
            fetched = min(row[4] for row in rows[1:])
            self._submit_pending()
            if self._submitted - self._observed <= MAX_BACKLOG * len(self.entries):
                self._submitted += 1
                self._pending = entry, entry.mask, entry.step, entry.plan, fetched
        elif rows[0][3] > self._requested:
            self._channel = rows[0][5]
            self._background.submit(_logged, self._fetch, self._requested, rows[0][3])
            self._requested = rows[0][3]

    def _submit_pending(self) -> None:
        """Observe the last mask in the background: its call has begun, so its executor exists."""
        if self._pending is not None:
            self._background.submit(_logged, self._observe, *self._pending)
            self._pending = None

    # On the planner's thread.

    @cached_property
    def _store(self) -> Any:
        assert self._open is not None
        return self._open(self._channel)

    def _observe(self, entry: Entry, mask: BlockMask, step: int, plan: Planned, fetched: int) -> None:
        """On rank 0, evaluate the plan that a mask was computed by, and publish a better one, if any."""
        self._observed += 1
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
            identity = entry.number, made.version, made.schedule.digest
            message = dumps([*identity, str(strategy), assignment.packed(), why])
            self._store.set(str(self._published + 1), message)
            self._published += 1
        for number in range(self._deleted + 1, fetched + 1):
            self._store.delete_key(str(number))
            self._deleted = number

    def _fetch(self, after: int, until: int) -> None:
        """On other ranks, build the schedules of plans that rank 0 has published."""
        for number in range(after + 1, until + 1):
            message = self._store.get(str(number))
            self._fetched = number
            entry_number, version, digest, strategy, assignment, why = loads(message)
            entry = self._numbers.get(entry_number)
            if entry and version == entry.newest + 1:  # not evicted, and no version is missing before it
                draft = parse(strategy, entry.problem.ranks), assignment, why
                entry.hold(version, draft, self._prepare, digest)

    def _save(self) -> None:
        by_key: dict[PlanKey, list[StoredPlan]] = {}
        for entry in list(self.entries.values()):
            if entry.loads:
                by_key.setdefault(entry.key, []).append(entry.stored())
        for key, plans in by_key.items():
            self._saved.put(key, plans)


def _name(place: AttentionId, problem: Problem) -> str:
    return f"layer {place.layer}, {problem.heads} heads on {problem.ranks} ranks"


def _has_moved(before: Shares | None, now: Shares) -> bool:
    return before is None or len(before) != len(now) or bool(np.abs(before - now).max() > LOAD_DRIFT)


def _logged(job: Callable[Args, None], *args: Args.args, **kwargs: Args.kwargs) -> None:
    try:
        job(*args, **kwargs)
    except Exception:  # the current plan stays in use
        _log.warning("No new plan could be made", exc_info=True)
