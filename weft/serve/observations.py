"""Observations: observed durations, and estimates of durations that were not observed.

    steps = Observations(overhead=0.05)
    steps.add(key, PredictedCost(0.026, ranks=2), seconds=0.041, steps=5)
    steps.estimate(other, PredictedCost(1.39, ranks=2))

The closed form of the planner predicts a cost in seconds. Observed durations are modeled as a line over it: a
constant (launching kernels, waiting for messages, opening a file) and a slope (how fast this machine is now).
The line is fitted to medians of recent observations; similar costs have more weight. Warm-up steps may run
under another load than later ones, so they only determine the ratio of constant and slope.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

WINDOW_STEPS = 20
"""Most recent steps of a key that count."""
MAX_KEYS = 64
HALF_LIFE_STEPS = 200
"""Later steps of other keys that halve the weight of an observation: the load of a machine changes."""
MIN_FRESHNESS = 1e-6
COST_WEIGHT = 1 / 2
"""Weight of an observation at twice the cost."""
RIDGE = 0.01
"""Weight of the prior slope: it decides if all observations are of one cost."""

MIN_SLOPE = 1 / 4
"""Of the prior slope. Loads that change can make small steps look as slow as large ones; a line without a
slope would then let any size through admission."""


class WeightedPoint(NamedTuple):
    """A predicted and an observed duration."""

    ranks: int
    x: float
    y: float
    weight: float = 1.0


class PredictedCost(NamedTuple):
    """Seconds by the closed form, and the number of ranks."""

    seconds: float
    ranks: int = 1


class RecentDurations(NamedTuple):
    """Recent observations of one key."""

    cost: PredictedCost
    times: tuple[float, ...]
    at: int
    """Number of all steps at the last of them."""
    warmup: bool

    @property
    def seconds(self) -> float:
        return median(self.times)


class Observations:
    """One thread adds, any thread estimates. `overhead` as in `fit_line`."""

    def __init__(self, overhead: float) -> None:
        self.overhead = overhead
        self._recent: dict[Hashable, RecentDurations] = {}
        self.steps = 0
        """All observed steps, without warm-ups."""

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recent

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def largest(self) -> float:
        """Largest cost that was observed."""
        return max((each.cost.seconds for each in self._recent.values()), default=0.0)

    def add(
        self, key: Hashable, cost: PredictedCost, seconds: float, *, steps: int = 1, warmup: bool = False
    ) -> None:
        """Note that `steps` took `seconds` each. Other observations of a key replace those of its warm-up."""
        if not (seconds > 0 and math.isfinite(seconds) and steps > 0):
            return
        before = self._recent.get(key)
        if warmup and before is not None and not before.warmup:
            return
        self.steps += 0 if warmup else steps
        earlier = before.times if before and before.warmup == warmup else ()
        times = (*earlier, *(seconds,) * min(steps, WINDOW_STEPS))[-WINDOW_STEPS:]
        # A new dictionary, since other threads iterate over the old one.
        recent = {name: entry for name, entry in self._recent.items() if name != key}
        while len(recent) >= MAX_KEYS:
            del recent[next(iter(recent))]
        self._recent = {**recent, key: RecentDurations(cost, times, self.steps, warmup)}

    def estimate(self, key: Hashable, cost: PredictedCost) -> float:
        """Estimate a duration: by the median of its key if that was observed, else by the line."""
        recent = self._recent
        line = self._line(recent.values(), cost)
        if (own := recent.get(key)) is None or own.warmup:
            return line
        return math.exp(_blend(math.log(line), math.log(own.seconds), self._weight(own)))

    def _weight(self, recent: RecentDurations) -> float:
        """Return between 0 and 1 how many there are, and how recent."""
        age = (self.steps - recent.at) / HALF_LIFE_STEPS
        return len(recent.times) / WINDOW_STEPS * max(0.5**age, MIN_FRESHNESS)

    def _line(self, recent: Iterable[RecentDurations], cost: PredictedCost) -> float:
        points: dict[bool, list[WeightedPoint]] = {True: [], False: []}
        known = 0.0
        for each in recent:
            far = abs(math.log2(each.cost.seconds / cost.seconds))
            weight = self._weight(each)
            known += 0.0 if each.warmup else weight
            point = WeightedPoint(each.cost.ranks, each.cost.seconds, each.seconds, weight * COST_WEIGHT**far)
            points[each.warmup].append(point)
        warmups, real = points[True], points[False]
        if warmups and real:
            line = fit_line(warmups, self.overhead)
            level = math.log(_mean_ratio([point._replace(x=line(point.x, point.ranks)) for point in real]))
            # A warm-up is slower than steps are later, or as fast; if steps are slower, waiting may be why.
            level = _blend(0.0, min(level, level / 2), known)
            warmups = [point._replace(y=point.y * math.exp(level)) for point in warmups]
        both = warmups + real
        return fit_line(both, self.overhead)(*cost) if both else cost.seconds


def _blend(prior: float, value: float, weight: float) -> float:
    """Pull `value` to `prior` while few observations support it: one may be a slow moment."""
    share = weight / (weight + 1 / WINDOW_STEPS)
    return prior + share * (value - prior)


@dataclass(frozen=True)
class DurationLine:
    """A constant for each number of ranks, and one slope, which is the speed of the machine."""

    constants: Mapping[int, float]
    slope: float

    def __call__(self, x: float, ranks: int) -> float:
        near = min(self.constants, key=lambda each: (abs(math.log(each / ranks)), each))
        return self.constants[near] + self.slope * x


def fit_line(points: Sequence[WeightedPoint], overhead: float) -> DurationLine:
    """Fit the line of least *relative* errors. No constant is below 0, nor the slope below `MIN_SLOPE`.

    Points of one x do not determine both constant and slope. Then the closed form is right, unless more than
    `overhead` seconds would be constant: so much is not spent beside computing.

    >>> points = [(1, 1.0, 2.0), (1, 9.0, 18.0), (2, 1.0, 3.0), (2, 9.0, 19.0)]
    >>> line = fit_line([WeightedPoint(*point) for point in points], 0)
    >>> round(line(4.0, 1)), round(line(4.0, 2))
    (8, 9)
    """
    ratio, total = _mean_ratio(points), sum(point.weight for point in points)
    priors = [point._replace(y=max(point.y - overhead, min(point.x, point.y))) for point in points]
    prior, ridge = _mean_ratio(priors), RIDGE * total / ratio**2
    groups = [_Sums.of(points, ranks) for ranks in sorted({point.ranks for point in points})]
    slope = math.inf
    for _ in range(len(groups) + 1):  # each iteration clamps at least one more constant to 0
        free = [group for group in groups if group.constant(slope) > 0 or math.isinf(slope)]
        across = sum(group.xy - group.x * group.y / group.one * (group in free) for group in groups)
        within = sum(group.xx - group.x**2 / group.one * (group in free) for group in groups)
        slope = max(MIN_SLOPE * prior, (across + ridge * prior) / (within + ridge))
    return DurationLine({group.ranks: max(0.0, group.constant(slope)) for group in groups}, slope)


class _Sums(NamedTuple):
    """Sums of 1, x, y, x² and x y over points on one number of ranks, weighted by 1 / y²."""

    ranks: int
    one: float
    x: float
    y: float
    xx: float
    xy: float

    @classmethod
    def of(cls, points: Iterable[WeightedPoint], ranks: int) -> _Sums:
        rows = [(p.weight / p.y**2, p.x, p.y) for p in points if p.ranks == ranks]
        terms = [(w, w * x, w * y, w * x * x, w * x * y) for w, x, y in rows]
        return cls(ranks, *map(sum, zip(*terms, strict=True)))

    def constant(self, slope: float) -> float:
        """Return the best constant for a slope."""
        return (self.y - slope * self.x) / self.one


def _mean_ratio(points: Sequence[WeightedPoint]) -> float:
    """Return the geometric mean of y / x."""
    total = sum(point.weight for point in points)
    return math.exp(sum(point.weight * math.log(point.y / point.x) for point in points) / total)
