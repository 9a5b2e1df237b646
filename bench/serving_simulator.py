"""Simulate the scheduling policies on synthetic arrivals: the deadlines that they would meet on many ranks.

    jobs = arrivals(latency, load=0.8, count=200, seed=0)
    simulate(jobs, elastic, latency).attained

As in the engine, a batch can be stopped at the end of a step, and one that continues on other ranks first
takes `latency.switch` seconds. Times are as predicted.
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
from weft.serve.assignment import Policy, RankAssignment
from weft.serve.batch import Batch
from weft.serve.jobs import JobShape
from weft.serve.latency import Latency
from weft.serve.model_facts import ModelFacts
from weft.serve.scheduler import POLICIES

DEADLINE_FACTOR = 3.0
"""Deadline of a job, in times what it takes alone."""

WAN = ModelFacts(
    model="wan2.1-14b", heads=40, head_dim=128, depth=40, patch=(4, 16, 16), text_tokens=0,
    params=14_000_000_000, dtype="bfloat16",
)  # fmt: skip
"""The facts of a model like Wan2.1-14B; its text is crossed, not attended to."""


def _shape(frames: int, height: int, width: int) -> JobShape:
    return JobShape(frames=frames, height=height, width=width, steps=50, guided=True)


MIX = {
    _shape(1, 480, 832): 0.4,
    _shape(1, 720, 1280): 0.4,
    _shape(81, 480, 832): 0.1,
    _shape(81, 720, 1280): 0.1,
}
"""The share of each shape among those that arrive."""


@dataclass(frozen=True)
class SimulatedJob:
    """A job, when it arrives, and when it has to be done."""

    at: float
    shape: JobShape
    deadline: float

    @property
    def is_image(self) -> bool:
        return self.shape.frames == 1


@dataclass(frozen=True)
class SimulationResult:
    """When the jobs ended, in the order of their arrival."""

    arrivals: tuple[SimulatedJob, ...]
    ended: npt.NDArray[np.float64]
    utilization: float
    """Share of the time of all ranks in which they ran a batch."""
    moves: int
    """How often a batch continued after a stop."""

    @property
    def latencies(self) -> npt.NDArray[np.float64]:
        return self.ended - [arrival.at for arrival in self.arrivals]

    @property
    def attained(self) -> float:
        """Share of jobs that were done in time."""
        return float(np.mean(self.ended <= [arrival.deadline for arrival in self.arrivals]))

    def percentile(self, q: float, *, images: bool) -> float:
        """Seconds from arrival to end, of images or of videos; NaN if there were none."""
        chosen = self.latencies[[arrival.is_image == images for arrival in self.arrivals]]
        return float(np.percentile(chosen, q)) if chosen.size else float("nan")


def arrivals(
    latency: Latency, *, load: float, count: int = 200, mix: Mapping[JobShape, float] = MIX, seed: int = 0
) -> list[SimulatedJob]:
    """Return Poisson arrivals. At a load of 1 they are the work of all ranks, with each job on one rank."""
    if load <= 0 or count < 1 or not mix:
        raise InputError(
            f"load, count and the number of shapes must be > 0, got {load:g}, {count} and {len(mix)}."
        )
    rng = np.random.default_rng(seed)
    shapes, shares = list(mix), np.array(list(mix.values()), dtype=np.float64)
    shares /= shares.sum()
    work = float(shares @ [least_work(latency, shape) for shape in shapes])
    alone = [latency.alone(shape) for shape in shapes]
    times = np.cumsum(rng.exponential(work / (load * latency.topology.ranks), count)).tolist()
    kinds = rng.choice(len(shapes), count, p=shares).tolist()
    return [
        SimulatedJob(at, shapes[kind], at + DEADLINE_FACTOR * alone[kind])
        for at, kind in zip(times, kinds, strict=True)
    ]


def least_work(latency: Latency, shape: JobShape) -> float:
    """Return the fewest rank-seconds of a job, over all numbers of ranks."""
    return min(ranks * latency.total(shape, ranks) for ranks in latency.sizes)


def bound(jobs: Sequence[SimulatedJob], latency: Latency) -> float:
    """Return an upper bound of `attained`: if work were a fluid that all ranks share at no cost.

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
    """Ranks, the batches that are not done, and the next events."""

    def __init__(self, jobs: Sequence[SimulatedJob], policy: Policy, latency: Latency) -> None:
        self.jobs, self.policy, self.latency = jobs, policy, latency
        self.ended = np.full(len(jobs), np.nan)
        self.batches: dict[str, Batch] = {}
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
                self.batches[name] = Batch(
                    id=name, jobs=[name], shape=job.shape, arrived=job.at, deadline=job.deadline
                )
            else:
                self._stepped(name)
            self._decide()

    def _after(self, seconds: float, name: str) -> None:
        heapq.heappush(self._events, (self.now + seconds, self._count, name))
        self._count += 1

    def _step_seconds(self, batch: Batch) -> float:
        return self.latency.step(batch.shape, len(batch.ranks), len(batch.jobs))

    def _stepped(self, name: str) -> None:
        """A step ended, or the decoding after the last step."""
        batch, segment = self.batches[name], self.segments[name]
        if not batch.left:
            self._free(name)
            del self.batches[name]
            self.ended[[int(job) for job in batch.jobs]] = self.now
            return
        batch.step += 1
        if not batch.left:
            self._after(self.latency.fixed(batch.shape) * len(batch.jobs), name)
        elif segment.stop:
            self._free(name)
            batch.ranks = ()
        else:
            self._after(self._step_seconds(batch), name)

    def _free(self, name: str) -> None:
        segment = self.segments.pop(name)
        self.busy += len(segment.ranks) * (self.now - segment.since)

    def _decide(self) -> None:
        world = self.latency.topology.ranks
        assignments = self.policy(list(self.batches.values()), self.now, world, self.latency)
        wanted = {each.batches[0]: each.ranks for each in assignments}
        for name, segment in self.segments.items():
            segment.stop |= wanted.get(name) != segment.ranks
        taken = {rank for segment in self.segments.values() for rank in segment.ranks}
        for each in assignments:
            if each.batches[0] not in self.segments and taken.isdisjoint(each.ranks):
                taken.update(each.ranks)
                self._start(each)

    def _start(self, assignment: RankAssignment) -> None:
        batches = [self.batches.pop(name) for name in assignment.batches]
        first = batches[0]
        self.batches[first.id] = batch = replace(
            first,
            ranks=assignment.ranks,
            began=True,
            jobs=[job for each in batches for job in each.jobs],
            arrived=min(each.arrived for each in batches),
            deadline=min(each.deadline for each in batches),
        )
        self.moves += first.began
        self.segments[first.id] = _Segment(assignment.ranks, self.now)
        self._after(first.began * self.latency.switch + self._step_seconds(batch), first.id)


def simulate(jobs: Sequence[SimulatedJob], policy: Policy, latency: Latency) -> SimulationResult:
    """Simulate until all jobs are done."""
    world = _World(jobs, policy, latency)
    world.run()
    spent = latency.topology.ranks * (world.now - jobs[0].at)
    return SimulationResult(tuple(jobs), world.ended, world.busy / spent, world.moves)


def table(
    clusters: Sequence[Topology],
    *,
    loads: Sequence[float] = (0.7, 0.8, 0.9),
    seeds: Sequence[int] = (0, 1, 2),
    count: int = 200,
    facts: ModelFacts = WAN,
    mix: Mapping[JobShape, float] = MIX,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each cluster, load and policy: means over seeds, on the same arrivals."""
    for topology in clusters:
        latency = Latency(facts, topology)
        for load in loads:
            traces = [arrivals(latency, load=load, count=count, mix=mix, seed=seed) for seed in seeds]
            most = float(np.mean([bound(jobs, latency) for jobs in traces]))
            for name, policy in POLICIES.items():
                runs = [simulate(jobs, policy, latency) for jobs in traces]
                yield {
                    "ranks": topology.ranks,
                    "load": load,
                    "policy": name,
                    "attained": float(np.mean([each.attained for each in runs])),
                    "image_p95": float(np.mean([each.percentile(95, images=True) for each in runs])),
                    "video_p95": float(np.mean([each.percentile(95, images=False) for each in runs])),
                    "utilization": float(np.mean([each.utilization for each in runs])),
                    "bound": most,
                }
