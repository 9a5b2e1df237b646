"""Forecast: the loads of a layer's heads in its next step, from the steps before and from an earlier run.

Loads are compared as logarithms less their mean, since a factor that all heads share balances nothing. How
far a change goes on, and how far an earlier run is to be trusted, is estimated from all layers together:
nothing here is fitted to a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.core.indices import IntArray

Logs = npt.NDArray[np.float64]
MIN_SIGMAS = 3.0
"""Standard deviations by which an earlier run must show a change before it is believed."""
LOAD_SCALE = 1 << 24
"""Of expected loads: they are relative to each other, and planners take integers."""


class StepLoads(NamedTuple):
    """What a layer's heads did in a step."""

    step: int
    loads: Logs


class Forecast:
    """Loads [heads] by layer; `prior` are those of an earlier run, by layer and step."""

    def __init__(self, prior: Mapping[Any, Mapping[int, IntArray]] | None = None) -> None:
        self._prior = {
            layer: {step: _logs(loads) for step, loads in steps.items()}
            for layer, steps in (prior or {}).items()
        }
        self._history: dict[Hashable, deque[StepLoads]] = {}

    def observe(self, layer: Hashable, step: int, loads: IntArray) -> None:
        history = self._history.setdefault(layer, deque(maxlen=3))
        if history and step <= history[-1].step:  # another run, or a repeated step
            history.clear()
        history.append(StepLoads(step, _logs(loads)))

    def expected(self, layer: Hashable, step: int) -> IntArray:
        """Return the loads of a step to come, of a layer that has been observed."""
        history, prior = self._history[layer], self._prior.get(layer, {})
        last = history[-1]
        trend = self._trend()
        logs = last.loads
        if len(history) > 1:
            logs = logs + trend * (last.loads - history[-2].loads)
        if step in prior and last.step in prior:
            weight, correlation = self._trust(step, last.step, trend)
            missed = prior[last.step] - last.loads
            logs = (1 - weight) * logs + weight * (prior[step] - correlation * missed)
        return _loads(logs)

    def _trend(self) -> float:
        """Return the share of the last change that the next one repeats."""
        full = (tuple(history) for history in self._history.values() if len(history) == 3)
        return _slope(
            [(third.loads - second.loads, second.loads - first.loads) for first, second, third in full]
        )

    def _trust(self, step: int, last: int, trend: float) -> tuple[float, float]:
        """Return the weight of the earlier run, and how much of its error in one step is left in the next.

        It is weighed by variances: of what its error in the last step leaves unknown, against the change that
        it shows (beyond what that error explains), or, if it shows none, the change that was last seen.
        """
        errors: list[Logs] = []
        pairs: list[tuple[Logs, Logs]] = []
        shown: list[Logs] = []
        changes: list[Logs] = []
        for layer, history in self._history.items():
            prior, now = self._prior.get(layer, {}), history[-1]
            if now.step != last or not {step, last} <= prior.keys():
                continue
            errors.append(prior[last] - now.loads)
            shown.append(prior[step] - prior[last])
            if len(history) > 1:
                before = history[-2]
                changes.append(now.loads - before.loads)
                if before.step in prior:
                    pairs.append((errors[-1], prior[before.step] - before.loads))
        error, change, correlation = _mean_square(errors), _mean_square(shown), _slope(pairs)
        signal = change - 2 * error * (1 - correlation)
        if signal < MIN_SIGMAS * sqrt(2 / sum(each.size for each in shown)) * change:
            signal = _mean_square(changes) * (1 - trend**2)
        unknown = _mean_square([now - correlation * before for now, before in pairs]) if pairs else error
        return (signal / (signal + unknown) if signal + unknown else 0.0), correlation


def _logs(loads: IntArray) -> Logs:
    logs = np.log(np.maximum(loads, 1))
    return logs - logs.mean()


def _loads(logs: Logs) -> IntArray:
    return np.maximum(1, np.rint(np.exp(logs - logs.max()) * LOAD_SCALE)).astype(np.int64)


def _slope(pairs: list[tuple[Logs, Logs]]) -> float:
    """Return the share of the second of each pair that is in the first, by least squares, from 0 to 1."""
    size = sum(float(before @ before) for _, before in pairs)
    along = sum(float(after @ before) for after, before in pairs)
    return min(1.0, max(0.0, along / size)) if size else 0.0


def _mean_square(some: list[Logs]) -> float:
    return sum(float(each @ each) for each in some) / max(1, sum(each.size for each in some))
