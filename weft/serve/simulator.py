"""The policies of the scheduler on made-up arrivals: what they would attain on more ranks than one has.

    jobs = arrivals(latency, load=0.8, count=200, seed=0)
    simulate(jobs, elastic, latency).attained

A segment goes as the engine's do: it can be stopped at the end of a step, and one that goes on elsewhere
first takes `latency.switch` seconds. Times are as predicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.topology import Topology
from weft.serve.jobs import Shape
from weft.serve.latency import Latency
from weft.serve.scheduler import POLICIES
from weft.serve.tasks import Grant, Policy, Task

SLO = 3.0  # times what a job takes alone

WAN = {
    "model": "wan2.1-14b", "heads": 40, "head_dim": 128, "depth": 40, "patch": [4, 16, 16],
    "text_tokens": 0, "params": 14_000_000_000, "dtype": "bfloat16",
}  # fmt: skip
"""The facts of a model like Wan2.1-14B; its text is crossed, not attended to."""


def _shape(frames: int, height: int, width: int) -> Shape:
    return Shape(frames=frames, height=height, width=width, steps=50, guided=True)


MIX = {
    _shape(1, 480, 832): 0.4,
    _shape(1, 720, 1280): 0.4,
    _shape(81, 480, 832): 0.1,
    _shape(81, 720, 1280): 0.1,
}
"""The share of each shape among those that arrive."""


@dataclass(frozen=True)
class Arrival:
    """A job, and when it has to be done."""

    at: float
    shape: Shape
    deadline: float

    @property
    def is_image(self) -> bool:
        return self.shape.frames == 1


@dataclass(frozen=True)
class Outcome:
    """What became of the arrivals, in their order."""

    arrivals: tuple[Arrival, ...]
    ended: npt.NDArray[np.float64]
    utilisation: float
    """The share of the time of all ranks that segments had."""
    moves: int
    """How often a task went on after a stop."""

    @property
    def latencies(self) -> npt.NDArray[np.float64]:
        return self.ended - [arrival.at for arrival in self.arrivals]

    @property
    def attained(self) -> float:
        """The share of jobs that were done in time."""
        return float(np.mean(self.ended <= [arrival.deadline for arrival in self.arrivals]))

    def percentile(self, q: float, *, images: bool) -> float:
        """Seconds from arrival to end, of images or of videos; NaN if there were none."""
        chosen = self.latencies[[arrival.is_image == images for arrival in self.arrivals]]
        return float(np.percentile(chosen, q)) if chosen.size else float("nan")


def arrivals(
    latency: Latency, *, load: float, count: int = 200, mix: Mapping[Shape, float] = MIX, seed: int = 0
) -> list[Arrival]:
    """A Poisson stream. At a load of 1 it brings the work that all ranks could do, each job on one rank."""
    if load <= 0 or count < 1 or not mix:
        raise InputError(
            f"load={load:g}, count={count}, {len(mix)} shapes bring no jobs.", hint="Each is above 0."
        )
    rng = np.random.default_rng(seed)
    shapes, shares = list(mix), np.array(list(mix.values()), dtype=np.float64)
    shares /= shares.sum()
    work = float(shares @ [least_work(latency, shape) for shape in shapes])
    alone = [latency.alone(shape) for shape in shapes]
    times = np.cumsum(rng.exponential(work / (load * latency.topology.ranks), count)).tolist()
    kinds = rng.choice(len(shapes), count, p=shares).tolist()
    return [Arrival(at, shapes[kind], at + SLO * alone[kind]) for at, kind in zip(times, kinds, strict=True)]


def least_work(latency: Latency, shape: Shape) -> float:
    """The rank-seconds of a job on as many ranks as spend fewest."""
    return min(ranks * latency.whole(shape, ranks) for ranks in latency.sizes)


def bound(jobs: Sequence[Arrival], latency: Latency) -> float:
    """What no scheduler can exceed: the share in time if work were a fluid that all ranks share at no cost.

    In no span of time can more be done than all ranks do; of jobs that do not fit, parts count as parts. Such
    work is a polymatroid, so taking the smallest jobs first, each as far as it fits, is best.
    """
    work = np.array([least_work(latency, job.shape) for job in jobs])
    starts, ends = np.array([job.at for job in jobs]), np.array([job.deadline for job in jobs])
    begin, end = np.unique(starts), np.unique(ends)
    spare = latency.topology.ranks * (end[None] - begin[:, None])
    done = 0.0
    for at in np.argsort(work, kind="stable").tolist():
        around = spare[: np.searchsorted(begin, starts[at], "right"), np.searchsorted(end, ends[at]) :]
        fits = min(work[at], max(float(around.min()), 0.0))
        around -= fits
        done += float(fits / work[at])
    return done / len(jobs)


@dataclass
class _Segment:
    """Some steps of a batch on some ranks."""

    ranks: tuple[int, ...]
    since: float
    stop: bool = False


class _World:
    """Ranks, the tasks that are not done, and what happens next."""

    def __init__(self, jobs: Sequence[Arrival], policy: Policy, latency: Latency) -> None:
        self.jobs, self.policy, self.latency = jobs, policy, latency
        self.ended = np.full(len(jobs), np.nan)
        self.tasks: dict[str, Task] = {}
        self.members: dict[str, list[int]] = {}
        self.segments: dict[str, _Segment] = {}
        self.now = self.busy = 0.0
        self.moves = 0
        self._events = [(job.at, at, f"{at:06}") for at, job in enumerate(jobs)]
        self._count = len(jobs)

    def run(self) -> None:
        while self._events:
            self.now, number, name = heapq.heappop(self._events)
            if number < len(self.jobs):
                job = self.jobs[number]
                self.members[name] = [number]
                self.tasks[name] = Task(
                    id=name, shape=job.shape, left=job.shape.steps, arrived=job.at, deadline=job.deadline
                )
            else:
                self._stepped(name)
            self._decide()

    def _after(self, seconds: float, name: str) -> None:
        heapq.heappush(self._events, (self.now + seconds, self._count, name))
        self._count += 1

    def _step_seconds(self, name: str) -> float:
        task = self.tasks[name]
        return self.latency.step(task.shape, len(task.ranks), task.jobs)

    def _stepped(self, name: str) -> None:
        """A step ended, or all of it."""
        task, segment = self.tasks[name], self.segments[name]
        if not task.left:
            self._free(name)
            del self.tasks[name]
            self.ended[self.members[name]] = self.now
            return
        task = self.tasks[name] = replace(task, left=task.left - 1)
        if not task.left:
            self._after(self.latency.fixed(task.shape) * task.jobs, name)
        elif segment.stop:
            self._free(name)
            self.tasks[name] = replace(task, ranks=())
        else:
            self._after(self._step_seconds(name), name)

    def _free(self, name: str) -> None:
        segment = self.segments.pop(name)
        self.busy += len(segment.ranks) * (self.now - segment.since)

    def _decide(self) -> None:
        world = self.latency.topology.ranks
        runs = self.policy(list(self.tasks.values()), self.now, world, self.latency)
        wanted = {run.tasks[0]: run.ranks for run in runs}
        for name, segment in self.segments.items():
            segment.stop |= wanted.get(name) != segment.ranks
        taken = {rank for segment in self.segments.values() for rank in segment.ranks}
        for run in runs:
            if run.tasks[0] not in self.segments and taken.isdisjoint(run.ranks):
                taken.update(run.ranks)
                self._start(run)

    def _start(self, run: Grant) -> None:
        tasks = [self.tasks.pop(name) for name in run.tasks]
        first = tasks[0]
        self.moves += first.began
        self.members[first.id] = [number for task in tasks for number in self.members[task.id]]
        self.tasks[first.id] = replace(
            first,
            ranks=run.ranks,
            began=True,
            jobs=len(self.members[first.id]),
            arrived=min(task.arrived for task in tasks),
            deadline=min(task.deadline for task in tasks),
        )
        self.segments[first.id] = _Segment(run.ranks, self.now)
        self._after(first.began * self.latency.switch + self._step_seconds(first.id), first.id)


def simulate(jobs: Sequence[Arrival], policy: Policy, latency: Latency) -> Outcome:
    """Until all jobs are done."""
    world = _World(jobs, policy, latency)
    world.run()
    spent = latency.topology.ranks * (world.now - jobs[0].at)
    return Outcome(tuple(jobs), world.ended, world.busy / spent, world.moves)


def table(
    clusters: Sequence[Topology],
    *,
    loads: Sequence[float] = (0.7, 0.8, 0.9),
    seeds: Sequence[int] = (0, 1, 2),
    count: int = 200,
    facts: Mapping[str, Any] = WAN,
    mix: Mapping[Shape, float] = MIX,
) -> Iterator[dict[str, Any]]:
    """A row for each cluster, load and policy: means over seeds, on the same arrivals for every policy."""
    for topology in clusters:
        latency = Latency(facts, topology)
        for load in loads:
            traces = [arrivals(latency, load=load, count=count, mix=mix, seed=seed) for seed in seeds]
            most = float(np.mean([bound(jobs, latency) for jobs in traces]))
            for name, policy in POLICIES.items():
                found = [simulate(jobs, policy, latency) for jobs in traces]
                yield {
                    "ranks": topology.ranks,
                    "load": load,
                    "policy": name,
                    "attained": float(np.mean([each.attained for each in found])),
                    "image_p95": float(np.mean([each.percentile(95, images=True) for each in found])),
                    "video_p95": float(np.mean([each.percentile(95, images=False) for each in found])),
                    "utilisation": float(np.mean([each.utilisation for each in found])),
                    "bound": most,
                }
