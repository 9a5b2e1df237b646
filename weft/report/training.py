"""A training run as its log tells it: read from `log.jsonl`, cut off or not, and summed up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.files import parse_json, read_bytes

LOG = "log.jsonl"
MAX_BYTES = 1 << 30
RATES = ("samples", "tokens")
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reading:
    """What was known of one attention layer at a step; numbers that were not are NaN."""

    step: int
    sparse: bool
    sparsity: FloatArray
    """[heads]: the share of keys that hold little of the mass."""
    density: FloatArray
    """[heads]: the share that is computed."""
    coverage: float
    recall: float
    keys: float
    """The mass of as many predicted keys as are critical, as a share of the mass that is asked for."""


@dataclass(frozen=True, eq=False)
class Run:
    """The records of one run, in order of steps."""

    name: str
    facts: Mapping[str, Any]
    step: FloatArray
    values: Mapping[str, FloatArray]
    """By name, a number for each of the steps: loss, seconds, and samples and tokens a second."""
    validation: FloatArray
    """[times, (step, loss)]."""
    layers: Mapping[str, tuple[Reading, ...]]
    resumed: tuple[int, ...]
    finished: bool
    unreadable: int
    """Lines that are no records: at most the last one, cut off, in a log that is as it should be."""

    @property
    def last(self) -> int:
        return int(self.step[-1])

    @property
    def total(self) -> int:
        total = self.facts.get("total")
        return total if total and _is_count(total) else self.last

    @property
    def window(self) -> int:
        """How many steps are averaged, in curves and in the last numbers."""
        return max(1, min(50, len(self.step) // 20))

    @property
    def now(self) -> dict[str, Reading]:
        """The latest of each layer."""
        return {layer: readings[-1] for layer, readings in self.layers.items()}

    @cached_property
    def changes(self) -> list[tuple[int, int]]:
        """(step, layers that are sparse from then on), where that changes."""
        turns: dict[int, int] = {}
        for readings in self.layers.values():
            before = False
            for one in readings:
                turns[one.step] = turns.get(one.step, 0) + one.sparse - before
                before = one.sparse
        count, found = 0, []
        for step in sorted(turns):
            count += turns[step]
            found += [(step, count)] * bool(turns[step])
        return found

    @property
    def dense_until(self) -> int:
        """The last step in which all layers are known to be dense; what a layer turned to is read later."""
        known: list[int] = []
        for readings in self.layers.values():
            modes = [one.sparse for one in readings]
            if True in modes:
                known.append(readings[modes.index(True) - 1].step if modes.index(True) else 0)
        return min(known, default=self.last)

    def over_time(self, name: str) -> tuple[FloatArray, FloatArray]:
        """(steps, [layers, steps]): a number of each layer as it was known then."""
        steps = np.array(sorted({one.step for some in self.layers.values() for one in some}), float)
        rows = [_held(steps, some, name) for some in self.layers.values()]
        return steps, np.array(rows).reshape(len(rows), len(steps))


def read(path: Path) -> Run:
    """A run's folder, or its log."""
    log = path / LOG if path.is_dir() else path
    lines = read_bytes(log, limit=MAX_BYTES).splitlines()
    records = list(_records(lines))
    by_step = {one["step"]: one for one in records if one["kind"] == "step"}
    if not by_step:
        raise InputError(f"{log} has no step yet.", hint="Look again when the run has made some.")
    steps = [by_step[step] for step in sorted(by_step)]
    runs = [one for one in records if one["kind"] == "run"]
    values = {n: np.array([_number(one.get(n)) for one in steps]) for n in ("loss", *RATES, "seconds")}
    seconds = np.where(values["seconds"] > 0, values["seconds"], math.nan)
    with np.errstate(over="ignore"):
        rates = {name: values[name] / seconds for name in RATES}
    held_out = {one["step"]: _number(one.get("loss")) for one in records if one["kind"] == "validation"}
    return Run(
        name=log.resolve().parent.name,
        facts=_facts(runs[-1]) if runs else {},
        step=np.array(sorted(by_step), float),
        values=values | rates,
        validation=np.array(sorted(held_out.items()), float).reshape(-1, 2),
        layers=_layers(records),
        resumed=tuple(one["step"] for one in runs[1:] if one["step"]),  # else it began anew
        finished=records[-1]["kind"] == "end",
        unreadable=len(lines) - len(records),
    )


def finite(values: FloatArray) -> FloatArray:
    return values[np.isfinite(values)]


def mean(values: Sequence[float] | FloatArray) -> float:
    """Of those that are finite; NaN if none is."""
    known = finite(np.asarray(values, float))
    return float(known.mean()) if known.size else math.nan


def median(values: FloatArray) -> float:
    """As `mean`; a step that compiles something does not count."""
    known = finite(values)
    return float(np.median(known)) if known.size else math.nan


def share(one: Reading) -> float:
    """Of a layer's attention that is computed."""
    return mean(one.density) if one.sparse else 1.0


def _records(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = parse_json(line, LOG)
        except InputError:
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str) and _is_count(record.get("step")):
            yield record


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _facts(run: dict[str, Any]) -> dict[str, Any]:
    """What is known of a run, of which whatever is of another type is not."""
    kinds = {"recipe": dict, "ranks": int, "parameters": int, "torch": str, "total": int}
    facts = {name: run[name] for name, kind in kinds.items() if isinstance(run.get(name), kind)}
    if recipe := facts.get("recipe"):
        facts["recipe"] = {name: part for name, part in recipe.items() if isinstance(part, dict)}
    return facts


def _layers(records: Sequence[dict[str, Any]]) -> dict[str, tuple[Reading, ...]]:
    layers: dict[Any, dict[int, Reading]] = {}
    for one in records:
        if one["kind"] == "sparsity":
            layers.setdefault(_layer(one.get("layer")), {})[one["step"]] = Reading(
                one["step"],
                one.get("mode") == "sparse",
                _numbers(one.get("sparsity")),
                _numbers(one.get("density")),
                _number(one.get("coverage")),
                _number(one.get("recall")),
                _number(one.get("keys")),
            )
    if all(isinstance(layer, int) for layer in layers):
        layers = dict(sorted(layers.items()))
    return {str(layer): tuple(some[step] for step in sorted(some)) for layer, some in layers.items()}


def _layer(value: Any) -> int | str:
    return value if _is_count(value) else str(value)


def _held(steps: FloatArray, readings: Sequence[Reading], name: str) -> FloatArray:
    """A layer's number at each step: that of the latest reading, NaN before the first."""
    values = [share(one) if name == "share" else mean(np.atleast_1d(getattr(one, name))) for one in readings]
    place = np.searchsorted([one.step for one in readings], steps, side="right")
    return np.array([math.nan, *values])[place]


def _number(value: Any) -> float:
    """JSON has no NaN: it is a word there. What is no number is NaN, too."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _numbers(value: Any) -> FloatArray:
    return np.array([_number(one) for one in value] if isinstance(value, list) else [_number(value)], float)
