"""Admission: refuse requests whose predicted time would keep the ranks from all others.

    admission = Admission(latency, max_time=600, max_step=30)
    admission.refusal(shape)        # None, or why it is refused
    admission.step(shape, ranks=1)  # `inf` where a step is longer than one may be and more ranks are faster

A job gives up its ranks between two steps only, so the longest step bounds how long another one waits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.core.files import whole
from weft.core.topology import Topology
from weft.serve.errors import Refused
from weft.serve.jobs import Shape
from weft.serve.latency import Latency
from weft.serve.settings import Settings
from weft.serve.tasks import Task

MAX_TIME_SECONDS, MAX_STEP_SECONDS = 3600.0, 30.0
DEFAULT_FACTOR = 10.0
"""Unless the operator sets them, limits are those seconds, or so many times what the model's own default
request takes, whichever is longer."""
TIMES_ALONE = 3.0
"""A job should take no longer than so many times what it takes alone, unless its request says."""
EXTRAPOLATION_FACTOR, EXTRAPOLATION_MARGIN = 2.0, 1.5
"""A step so many times as large as all that were observed, and as the default's, may take so many times its
prediction; that is what `--max-step` bounds."""
STALE_SECONDS = 600.0
"""After which an idle server measures again: what it saw last may have been under load."""


def default_shape(facts: Mapping[str, Any]) -> Shape:
    """Of what the model makes if a request says nothing of sizes."""
    sizes = {name: facts[name] for name in ("frames", "height", "width", "steps")}
    return Shape(**sizes, guided=facts["guidance"] not in (None, 1))


LIMITS = "limits.json"
"""In the data folder: with which limits the last server admitted its jobs."""


class Admission:
    """Also the `Times` of the scheduler, which so gives no job so few ranks that a step is too long."""

    def __init__(
        self, latency: Latency, *, policy: str = "elastic", max_time: float | None = None,
        max_step: float | None = None,
    ) -> None:  # fmt: skip
        """Limits in seconds; None derives them from the model."""
        self.latency, self.policy, self.default = latency, policy, default_shape(latency.facts)
        self._time, self._step = max_time, max_step

    @classmethod
    def of(cls, settings: Settings, facts: Mapping[str, Any], memory: float) -> Admission:
        """Of a model that is loaded, by its facts and the memory of a rank."""
        topology = replace(Topology.local(settings.ranks), machines=settings.nodes.count)
        latency = Latency(facts, topology, sparse=settings.options.get("sparse"), limit=memory)
        for pace in facts.get("paces", ()):  # what warming up took
            latency.observe(Shape(**pace["shape"]), pace["ranks"], 1, pace["seconds"], warmup=True)
        return cls(latency, policy=settings.policy, max_time=settings.max_time, max_step=settings.max_step)

    @property
    def switch(self) -> float:
        return self.latency.switch

    def fixed(self, shape: Shape) -> float:
        return self.latency.fixed(shape)

    def step(self, shape: Shape, ranks: int, jobs: int = 1) -> float:
        """As the latency model's; `inf` on ranks where it exceeds the limit, if others are faster."""
        seconds = self.latency.step(shape, ranks, jobs)
        if seconds <= self.max_step or math.isinf(seconds):
            return seconds
        fastest = min(self.latency.step(shape, size, jobs) for size in self.latency.sizes)
        return seconds if seconds <= fastest else math.inf

    @property
    def max_time(self) -> float:
        """Seconds of a whole job, alone."""
        default = DEFAULT_FACTOR * self.latency.alone(self.default)
        return self._time or max(MAX_TIME_SECONDS, default if math.isfinite(default) else 0.0)

    @property
    def max_step(self) -> float:
        """Seconds of one denoising step."""
        default = DEFAULT_FACTOR * min(self.latency.step(self.default, n) for n in self.latency.sizes)
        return self._step or max(MAX_STEP_SECONDS, default if math.isfinite(default) else 0.0)

    def to_json(self) -> dict[str, Any]:
        """What `GET /v1/models` tells: the limits, and the request that the model makes by default."""
        shape, memory, seconds = self.default, self.latency.limit, self._whole(self.default)
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

    def explain(self, shape: Shape) -> dict[str, Any]:
        """What `GET /v1/plan` shows: the plan, and whether the request would be admitted."""
        step, refused = self._fastest_step(shape), self.refusal(shape)
        return {
            **self.latency.explain(shape), "step_seconds": step if math.isfinite(step) else None,
            **self.to_json(), "admitted": refused is None, "refusal": refused and refused.message,
        }  # fmt: skip

    def allowed(self, shape: Shape, deadline: float | None) -> float:
        """Seconds until a job is due: as its request says, but no less than it takes alone.

        With less it would be overdue at once, and what is overdue keeps its ranks from all others.
        """
        alone = self.latency.alone(shape)
        return TIMES_ALONE * alone if deadline is None else max(deadline, alone)

    def refusal(self, shape: Shape, *, jobs: int = 1, idle: bool = False) -> Refused | None:
        """Why a request for so many `jobs` is not admitted. An `idle` server measures again: an exception."""
        if message := self.latency.no_room(shape):
            return Refused(400, "out_of_memory", message, param="size")
        step, whole = self._fastest_step(shape), self._whole(shape, jobs)
        if self._margin(shape) * step <= self.max_step and whole <= self.max_time:
            return None
        if idle and self._is_measurement(shape, jobs):
            return None
        return self._too_long(shape, jobs, step, whole)

    def refusal_of_task(self, task: Task, *, changed: bool) -> Refused | None:
        """Why a job that an earlier server admitted cannot go on.

        Time counts only if limits have `changed` since: what was measured until now may be slow for other
        reasons, and a restart loses nothing.
        """
        if message := self.latency.no_room(task.shape, task.jobs):
            return Refused(400, "out_of_memory", message)
        return self.refusal(replace(task.shape, steps=max(1, task.left))) if changed else None

    def exceeds_step(self, shape: Shape, ranks: int, jobs: int) -> bool:
        """Whether a batch of so many would hold up others for longer than one job may."""
        return self.latency.step(shape, ranks, jobs) > self.max_step

    def differs_from(self, folder: Path) -> bool:
        """Whether the last server of `folder` had other limits or ranks; notes those of this one."""
        path = folder / LIMITS
        now = json.dumps([self._time, self._step, self.latency.topology.ranks, self.policy])
        before = None
        with suppress(OSError, ValueError):
            before = path.read_text(encoding="utf-8")
        with suppress(OSError), whole(path) as temporary:
            temporary.write_text(now, encoding="utf-8")
        return before != now

    def _sizes(self, shape: Shape) -> list[int]:
        """The numbers of ranks that the scheduler may give it."""
        if self.policy == "all":
            return [self.latency.topology.ranks]
        legal = [size for size in self.latency.sizes if math.isfinite(self.step(shape, size))]
        return legal[:1] if self.policy == "one" else legal

    def _fastest_step(self, shape: Shape) -> float:
        return min((self.latency.step(shape, size) for size in self._sizes(shape)), default=math.inf)

    def _margin(self, shape: Shape) -> float:
        latency, ranks = self.latency, self.latency.topology.ranks
        known = max(latency.observed_steps.largest, latency.predicted(self.default, ranks))
        is_known = latency.predicted(shape, ranks) <= EXTRAPOLATION_FACTOR * known
        return 1.0 if is_known else EXTRAPOLATION_MARGIN

    def _whole(self, shape: Shape, jobs: int = 1) -> float:
        """Of so many jobs: groups of equal size take one each, and then the next."""
        turns = {size: -(-jobs // (self.latency.topology.ranks // size)) for size in self._sizes(shape)}
        return min((turns[size] * self.latency.whole(shape, size) for size in turns), default=math.inf)

    def _is_measurement(self, shape: Shape, jobs: int) -> bool:
        """Whether it is no larger than the default, and nothing was measured for long.

        Without this, a server whose only observations were made under load would refuse for ever.
        """
        tokens = [math.prod(self.latency.grid(each)) * (1 + each.guided) for each in (shape, self.default)]
        is_small = jobs * tokens[0] <= tokens[1] and shape.steps <= self.default.steps
        return is_small and self.latency.seconds_since_observed() > STALE_SECONDS

    def _too_long(self, shape: Shape, jobs: int, step: float, whole: float) -> Refused:
        """The numbers, and what would be admitted."""
        reasons, hints, param = [], [], "size"
        if whole > self.max_time:
            reasons.append(f"{_words(whole)} in all, and this server admits {_words(self.max_time)}")
        if (most := self._margin(shape) * step) > self.max_step:
            error = f" (up to {_words(most)}: nothing nearly as large was seen yet)" if most > step else ""
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
        default = f"The model's default, {_of(self.default)}, takes {_words(self._whole(self.default))}."
        message = f"{_of(shape, jobs)} would take about {'; '.join(reasons)}. Ask for {hints[0]}. {default}"
        return Refused(400, "too_long", message[:1].upper() + message[1:], param=param)


def _of(shape: Shape, jobs: int = 1) -> str:
    image = "an image" if jobs == 1 else f"{jobs} images"
    frames = f"{shape.frames} frames" if shape.frames > 1 else image
    return f"{frames} of {shape.width}x{shape.height} in {shape.steps} steps"


def _words(seconds: float) -> str:
    """
    >>> _words(0.0123), _words(3.21), _words(56012)
    ('0.012 s', '3.2 s', '56,012 s')
    """
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
