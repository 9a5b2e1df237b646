"""Evidence: the times of a timeline's attentions and messages, and what they would take elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median_low
from typing import TypeVar

import numpy as np

from weft.core.schedule import Attend, Schedule
from weft.core.timeline import Timeline
from weft.core.topology import Topology
from weft.report.replay import Replay
from weft.schedule.measure import attend_works
from weft.simulate.costs import attend_price

Key = TypeVar("Key")
MOST_SUSPECTS = 3
"""Ranks or links that are tried for each kind of cause."""


@dataclass(frozen=True)
class Cause:
    """What costs time: its kind, one of `verdict.KINDS`, and the rank, link or machine that it names."""

    kind: str
    seconds: float = 0.0
    """What a replay without it saves."""
    rank: int | None = None
    link: tuple[int, int] | None = None
    machine: int | None = None
    op: int | None = None
    """The operation of the schedule, where it is one."""
    factor: float = 1.0
    """How much more work or how much slower than the others."""


class Evidence:
    """A timeline with its replay, and the expected seconds of its attentions and messages."""

    def __init__(self, timeline: Timeline, schedule: Schedule | None, topology: Topology | None) -> None:
        self.timeline, self.schedule, self.topology = timeline, schedule, topology
        self.replay = Replay(timeline)
        self.spans = self.replay.spans
        self.attends: list[list[int]] = [[] for _ in range(timeline.ranks)]
        """Indices of spans, by rank."""
        for i, span in enumerate(self.spans):
            if span.kind == "attend":
                self.attends[span.rank].append(i)
        self.sends = [i for i, span in enumerate(self.spans) if span.kind == "send"]
        self.devices = max(1, timeline.ranks // max(1, timeline.machines))

    @cached_property
    def work(self) -> dict[int, Attend]:
        """The operation of each attend, if the schedule is known and has them all."""
        every = [i for attends in self.attends for i in attends]
        ops = self.schedule.ops if self.schedule else ()
        known = {
            i: op
            for i in every
            if 0 <= (n := self.spans[i].op) < len(ops) and isinstance(op := ops[n], Attend)
        }
        return known if len(known) == len(every) else {}

    @cached_property
    def expected(self) -> dict[int, float]:
        """Seconds of each attend at one speed for all ranks; without a schedule, those of its peers."""
        if not self.work or self.schedule is None:
            by_name: dict[str, list[float]] = defaultdict(list)
            every = [i for attends in self.attends for i in attends]
            for i in every:
                by_name[self.spans[i].name].append(self.spans[i].seconds)
            return {i: median_low(by_name[self.spans[i].name]) for i in every}
        pairs = self.pairs
        if self.topology is not None:
            price = attend_price(self.schedule, self.topology)
            return {i: price(pairs[i], op) for i, op in self.work.items()}
        took = [self.spans[i].seconds for i in pairs]
        per_call, per_pair = _line(list(pairs.values()), took)
        return {i: per_call + per_pair * count for i, count in pairs.items()}

    @cached_property
    def pairs(self) -> dict[int, int]:
        """Active token pairs of each attend; empty without a schedule."""
        works = attend_works(self.schedule) if self.schedule and self.work else {}
        return {i: works[self.spans[i].op] for i in self.work}

    @cached_property
    def nominal(self) -> dict[int, float]:
        """Seconds of each message alone on its link: a latency and its bytes."""
        return {i: self.latency[self.is_near(i)] + seconds for i, seconds in self._byte_seconds.items()}

    @cached_property
    def _byte_seconds(self) -> dict[int, float]:
        return {i: self._links[self.is_near(i)][1] * self.spans[i].num_bytes for i in self.sends}

    @cached_property
    def latency(self) -> dict[bool, float]:
        """Of a message inside a machine (True) and between machines."""
        return {near: latency for near, (latency, _) in self._links.items()}

    @cached_property
    def _links(self) -> dict[bool, tuple[float, float]]:
        if self.topology is not None:
            links = {True: self.topology.intra, False: self.topology.inter}
            half = self.topology.half_bytes
            return {
                near: (one.latency + half / one.bandwidth, 1 / one.bandwidth) for near, one in links.items()
            }
        sends = {
            near: [self.spans[i] for i in self.sends if self.is_near(i) == near] for near in (True, False)
        }
        return {
            near: _line([s.num_bytes for s in some], [s.seconds for s in some])
            for near, some in sends.items()
        }

    def machines(self, i: int) -> tuple[int, ...]:
        """Return the source and target machine of a message, if they differ."""
        ends = self.spans[i].rank // self.devices, self.spans[i].peer // self.devices
        return ends if ends[0] != ends[1] else ()

    def is_near(self, i: int) -> bool:
        return not self.machines(i)

    def kind_of(self, i: int) -> tuple[int, bool]:
        """Return a key: messages of one operation over one kind of link take equally long for each byte."""
        return self.spans[i].op, self.is_near(i)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit y = a + b x, both at least zero."""
    if len(x) > 1 and np.ptp(x) > 1e-9 * max(x):
        slope, start = np.polyfit(x, y, 1)
        if slope > 0 and start > 0:
            return float(start), float(slope)
    return 0.0, float(sum(y) / sum(x)) if sum(x) else 1.0


def most(values: Sequence[float]) -> tuple[int, float]:
    """Return the index of the largest value, and its ratio to the mean."""
    index = max(range(len(values)), key=lambda i: (values[i], -i))
    return index, values[index] / (fmean(values) or 1.0)


def worst(values: Mapping[Key, float]) -> list[Key]:
    return sorted(values, key=lambda key: -values[key])[:MOST_SUSPECTS]


def usual(values: Iterable[float]) -> float:
    """Return the low median: if half of them are slow, the others are the usual ones."""
    return median_low([*values] or [0.0])


def grouped_by(
    values: Mapping[int, float], key: Callable[[int], Key], of: Callable[[list[float]], float]
) -> dict[Key, float]:
    """Return one number for the values of each key."""
    groups: dict[Key, list[float]] = defaultdict(list)
    for i, value in values.items():
        groups[key(i)].append(value)
    return {name: of(group) for name, group in groups.items()}
