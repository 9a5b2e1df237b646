"""Admission: refuse requests whose predicted time would block the ranks for all others.

    admission = Admission(latency, max_time=600, max_step=30)
    admission.refusal(shape)        # None, or why it is refused
    admission.step(shape, ranks=1)  # `inf` if a step exceeds the limit and more ranks are faster

A job gives up its ranks between two steps only, so the longest step bounds how long another one waits.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from weft.core.files import whole
from weft.core.topology import Topology
from weft.serve.api_error import APIError
from weft.serve.batch import Batch
from weft.serve.jobs import JobShape, JsonObject
from weft.serve.latency import Latency
from weft.serve.model_facts import ModelFacts
from weft.serve.settings import ServerSettings

MAX_TIME_SECONDS, MAX_STEP_SECONDS = 3600.0, 30.0
DEFAULT_FACTOR = 10.0
"""Default limits: those seconds, or so many times the model's default request, if that is longer."""
DEADLINE_FACTOR = 3.0
"""Default deadline, in times what the job takes alone."""
EXTRAPOLATION_FACTOR, EXTRAPOLATION_MARGIN = 2.0, 1.5
"""A step that is so many times the largest observed one, and the default's, may take so many times its
prediction; `--max-step` bounds that time."""
STALE_SECONDS = 600.0
"""Age of the last observation after which an idle server measures again: it may have been under load."""


LIMITS_FILE = "limits.json"
"""In the data folder: the limits of the last server."""


class Admission:
    """Also the `Times` of the scheduler, which so gives no job so few ranks that a step is too long."""

    def __init__(
        self, latency: Latency, *, policy: str = "elastic", max_time: float | None = None,
        max_step: float | None = None,
    ) -> None:  # fmt: skip
        """Limits are in seconds; None derives them from the model."""
        self.latency, self.policy, self.default = latency, policy, latency.facts.default
        self._time, self._step = max_time, max_step

    @classmethod
    def of(cls, settings: ServerSettings, facts: ModelFacts, memory: float) -> Admission:
        """Return the admission of a model, by its facts and the memory of a rank."""
        topology = replace(Topology.local(settings.ranks), machines=settings.nodes.count)
        latency = Latency(facts, topology, sparse=settings.options.sparse, limit=memory)
        for pace in facts.paces:
            latency.observe(pace.shape, pace.ranks, 1, pace.seconds, warmup=True)
        return cls(latency, policy=settings.policy, max_time=settings.max_time, max_step=settings.max_step)

    @property
    def switch(self) -> float:
        return self.latency.switch

    def fixed(self, shape: JobShape) -> float:
        return self.latency.fixed(shape)

    def step(self, shape: JobShape, ranks: int, jobs: int = 1) -> float:
        """Return the seconds of a step; `inf` if it exceeds the limit and others are faster."""
        seconds = self.latency.step(shape, ranks, jobs)
        if seconds <= self.max_step or math.isinf(seconds):
            return seconds
        fastest = min(self.latency.step(shape, size, jobs) for size in self.latency.sizes)
        return seconds if seconds <= fastest else math.inf

    @property
    def max_time(self) -> float:
        """Limit of the seconds of a job, alone."""
        default = DEFAULT_FACTOR * self.latency.alone(self.default)
        return self._time or max(MAX_TIME_SECONDS, default if math.isfinite(default) else 0.0)

    @property
    def max_step(self) -> float:
        """Limit of the seconds of a denoising step."""
        default = DEFAULT_FACTOR * min(self.latency.step(self.default, n) for n in self.latency.sizes)
        return self._step or max(MAX_STEP_SECONDS, default if math.isfinite(default) else 0.0)

    def to_json(self) -> JsonObject:
        """Return what `GET /v1/models` shows: the limits, and the default request of the model."""
        shape, memory, seconds = self.default, self.latency.limit, self._total(self.default)
        return {
            "limits": {
                "max_time_seconds": self.max_time, "max_step_seconds": self.max_step,
                "memory_bytes_per_rank": int(memory) if math.isfinite(memory) else None,
            },
            "default": {
                "size": f"{shape.width}x{shape.height}", "num_frames": shape.frames,
                "num_inference_steps": shape.steps, "seconds": seconds if math.isfinite(seconds) else None,
            },
        }  # fmt: skip

    def explain(self, shape: JobShape) -> JsonObject:
        """Return what `GET /v1/plan` shows: the plan, and whether the request would be admitted."""
        step, refused = self._fastest_step(shape), self.refusal(shape)
        return {
            **self.latency.explain(shape), "step_seconds": step if math.isfinite(step) else None,
            **self.to_json(), "admitted": refused is None, "refusal": refused and refused.message,
        }  # fmt: skip

    def allowed(self, shape: JobShape, deadline: float | None) -> float:
        """Return the seconds until a job is due: as requested, but no less than it takes alone.

        With less it would be overdue at once, and overdue jobs block their ranks for all others.
        """
        alone = self.latency.alone(shape)
        return DEADLINE_FACTOR * alone if deadline is None else max(deadline, alone)

    def refusal(self, shape: JobShape, *, jobs: int = 1, idle: bool = False) -> APIError | None:
        """Return why a request for `jobs` jobs is refused. An `idle` server may admit it to measure."""
        if message := self.latency.no_room(shape):
            return APIError(400, "out_of_memory", message, param="size")
        step, total = self._fastest_step(shape), self._total(shape, jobs)
        if self._margin(shape) * step <= self.max_step and total <= self.max_time:
            return None
        if idle and self._is_measurement(shape, jobs):
            return None
        return self._too_long(shape, jobs, step, total)

    def refusal_of_batch(self, batch: Batch, *, changed: bool) -> APIError | None:
        """Return why a batch that an earlier server admitted cannot continue, or None.

        Time counts only if limits have `changed` since: measurements may be slow for other reasons, and a
        restart loses nothing.
        """
        if message := self.latency.no_room(batch.shape, len(batch.jobs)):
            return APIError(400, "out_of_memory", message)
        return self.refusal(replace(batch.shape, steps=max(1, batch.left))) if changed else None

    def exceeds_step(self, shape: JobShape, ranks: int, jobs: int) -> bool:
        """Return whether a step of a batch of so many jobs exceeds the limit."""
        return self.latency.step(shape, ranks, jobs) > self.max_step

    def differs_from(self, folder: Path) -> bool:
        """Return whether the last server of `folder` had other limits or ranks; save those of this one."""
        path = folder / LIMITS_FILE
        now = json.dumps([self._time, self._step, self.latency.topology.ranks, self.policy])
        before = None
        with suppress(OSError, ValueError):
            before = path.read_text(encoding="utf-8")
        with suppress(OSError), whole(path) as temporary:
            temporary.write_text(now, encoding="utf-8")
        return before != now

    def _sizes(self, shape: JobShape) -> list[int]:
        """Return the numbers of ranks that the policy may assign."""
        if self.policy == "all":
            return [self.latency.topology.ranks]
        legal = [size for size in self.latency.sizes if math.isfinite(self.step(shape, size))]
        return legal[:1] if self.policy == "one" else legal

    def _fastest_step(self, shape: JobShape) -> float:
        return min((self.latency.step(shape, size) for size in self._sizes(shape)), default=math.inf)

    def _margin(self, shape: JobShape) -> float:
        latency, ranks = self.latency, self.latency.topology.ranks
        known = max(latency.observed_steps.largest, latency.predicted(self.default, ranks))
        is_known = latency.predicted(shape, ranks) <= EXTRAPOLATION_FACTOR * known
        return 1.0 if is_known else EXTRAPOLATION_MARGIN

    def _total(self, shape: JobShape, jobs: int = 1) -> float:
        """Return the seconds of so many jobs: groups of equal size take one each, and then the next."""
        turns = {size: -(-jobs // (self.latency.topology.ranks // size)) for size in self._sizes(shape)}
        return min((turns[size] * self.latency.total(shape, size) for size in turns), default=math.inf)

    def _is_measurement(self, shape: JobShape, jobs: int) -> bool:
        """Return whether it is no larger than the default, and nothing was measured for long.

        Without this, a server whose only observations were made under load would refuse forever.
        """
        tokens = [math.prod(self.latency.grid(each)) * (1 + each.guided) for each in (shape, self.default)]
        is_small = jobs * tokens[0] <= tokens[1] and shape.steps <= self.default.steps
        return is_small and self.latency.seconds_since_observed() > STALE_SECONDS

    def _too_long(self, shape: JobShape, jobs: int, step: float, total: float) -> APIError:
        """Return the refusal: the times, the limits, and what would be admitted."""
        reasons, hints, param = [], [], "size"
        if total > self.max_time:
            reasons.append(f"{_words(total)} in all, and this server admits {_words(self.max_time)}")
        if (most := self._margin(shape) * step) > self.max_step:
            error = (
                f" (up to {_words(most)}: nothing nearly as large was observed yet)" if most > step else ""
            )
            reasons.append(f"{_words(step)} for each step{error}, and it admits {_words(self.max_step)}")
            hints.append("a smaller size or fewer frames")
        elif jobs > 1:
            hints.append("fewer images, fewer steps or a smaller size")
            param = "n"
        elif (steps := int((self.max_time - self.fixed(shape)) / step)) >= 1:
            hints.append(f"{steps} steps or fewer, or a smaller size")
            param = "num_inference_steps"
        else:
            hints.append("a smaller size or fewer frames")
        default = f"The model's default, {_of(self.default)}, takes {_words(self._total(self.default))}."
        message = f"{_of(shape, jobs)} would take about {'; '.join(reasons)}. Ask for {hints[0]}. {default}"
        return APIError(400, "too_long", message[:1].upper() + message[1:], param=param)


def _of(shape: JobShape, jobs: int = 1) -> str:
    image = "an image" if jobs == 1 else f"{jobs} images"
    frames = f"{shape.frames} frames" if shape.frames > 1 else image
    return f"{frames} of {shape.width}x{shape.height} in {shape.steps} steps"


def _words(seconds: float) -> str:
    """
    >>> _words(0.0123), _words(3.21), _words(56012)
    ('0.012 s', '3.2 s', '56,012 s')
    """
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
