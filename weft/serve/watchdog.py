"""Watchdog: running batches whose ranks must be replaced."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from weft.serve.batch import Batch

if TYPE_CHECKING:
    from weft.serve.dispatch import Dispatch

SILENCE_SECONDS = 60.0
SILENCE_FACTOR = 20.0
"""A batch is stuck if it sends nothing for so long, and for so many times its step or its decoding."""
CANCEL_SECONDS = 5.0
"""Limit of the time that a batch without jobs takes to end its step."""
MAX_REPLACEMENTS, REPLACEMENT_SECONDS = 8, 600.0
"""Maximum number of cancelled batches whose ranks are replaced in this time while other jobs run. Further
batches finish their step, which `--max-step` bounds."""


class Overdue(NamedTuple):
    """The rank to kill, why, and whether other jobs count it as a loss of theirs."""

    leader: int
    reason: str
    blamed: bool


def overdue(dispatch: Dispatch) -> Overdue | None:
    """Return a batch that makes no step, or that was cancelled and whose step does not end soon."""
    now = time.monotonic()
    is_shared = any(batch.jobs and batch.leader is not None for batch in dispatch.batches.values())
    for batch in dispatch.batches.values():
        if batch.leader is None:
            continue
        step = step_seconds(dispatch, batch)
        if not batch.jobs and batch.dropped is not None and batch.ranks:
            left = step - (now - batch.last_message)
            is_late = left > CANCEL_SECONDS or now - batch.dropped > CANCEL_SECONDS
            if is_late and (not is_shared or _may_replace(dispatch.replaced, batch.id, now)):
                reason = f"batch {batch.id} was cancelled and its step takes too long"
                return Overdue(batch.leader, reason, blamed=False)
        slowest = max(step, len(batch.members) * dispatch.latency.fixed(batch.shape))
        if now - batch.last_message > max(SILENCE_SECONDS, SILENCE_FACTOR * slowest):
            return Overdue(batch.leader, f"batch {batch.id} made no step", blamed=True)
    return None


def _may_replace(replaced: dict[str, float], id: str, now: float) -> bool:
    """Note a cancelled batch. A client that cancels repeatedly must not stop the steps of others."""
    for old in [each for each, when in replaced.items() if now - when > REPLACEMENT_SECONDS]:
        del replaced[old]
    if len(replaced) < MAX_REPLACEMENTS:
        replaced.setdefault(id, now)
    return id in replaced


def step_seconds(dispatch: Dispatch, batch: Batch) -> float:
    """Predict the step that runs, or decoding, where a step may not fit in memory."""
    jobs = len(batch.members)
    if batch.step >= batch.shape.steps:
        return jobs * dispatch.latency.fixed(batch.shape)
    return dispatch.latency.step(batch.shape, len(batch.ranks), jobs)
