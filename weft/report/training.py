"""Read a training log (`log.jsonl`, possibly truncated) and aggregate it."""

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
MAX_LINE = 1 << 20
RATES = ("samples", "tokens")
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reading:
    """The logged sparsity record of one attention layer at one step; missing numbers are NaN."""

    step: int
    sparse: bool
    sparsity: FloatArray
    """[heads]: share of keys that hold little of the attention mass."""
    density: FloatArray
    """[heads]: share of the tiles that is computed."""
    coverage: float
    recall: float
    keys: float
    """Attention mass of the predicted critical keys over the required mass."""


@dataclass(frozen=True, eq=False)
class Run:
    """The records of one run, in order of steps."""

    name: str
    facts: Mapping[str, Any]
    step: FloatArray
    values: Mapping[str, FloatArray]
    """Series by name, one number per step: loss, seconds, samples and tokens per second."""
    validation: FloatArray
    """[validations, 2]: the step and the held-out loss."""
    layers: Mapping[str, tuple[Reading, ...]]
    resumed: tuple[int, ...]
    finished: bool
    wall: float
    """Seconds from the start to the last record, without the time between a stop and its resumption."""
    unreadable: int
    """Number of unreadable lines; in an intact log at most the last line, truncated."""

    @property
    def last(self) -> int:
        return int(self.step[-1])

    @property
    def total(self) -> int:
        total = self.facts.get("total")
        return total if total and _is_count(total) else self.last

    @property
    def every(self) -> int:
        """Steps from one logged step to the next; more than 1 in a log that has not all of them."""
        return int(np.median(np.diff(self.step))) if len(self.step) > 1 else 1

    @property
    def steps(self) -> str:
        return "steps" if self.every == 1 else "logged steps"

    @property
    def window(self) -> int:
        """Number of steps averaged in running means and in the final figures."""
        return max(1, min(50, len(self.step) // 20))

    @property
    def now(self) -> dict[str, Reading]:
        """Latest reading of each layer."""
        return {layer: readings[-1] for layer, readings in self.layers.items()}

    @cached_property
    def changes(self) -> list[tuple[int, int]]:
        """Return (step, number of sparse layers) at each change."""
        deltas: dict[int, int] = {}
        for readings in self.layers.values():
            was_sparse = False
            for reading in readings:
                deltas[reading.step] = deltas.get(reading.step, 0) + reading.sparse - was_sparse
                was_sparse = reading.sparse
        count, changes = 0, []
        for step in sorted(deltas):
            count += deltas[step]
            changes += [(step, count)] * bool(deltas[step])
        return changes

    @property
    def dense_until(self) -> int:
        """Return the last logged step at which all layers were dense; 0 if there is none."""
        last_dense: list[int] = []
        for readings in self.layers.values():
            modes = [reading.sparse for reading in readings]
            if True in modes:
                last_dense.append(readings[modes.index(True) - 1].step if modes.index(True) else 0)
        return min(last_dense, default=self.last)

    def over_time(self, name: str) -> tuple[FloatArray, FloatArray]:
        """Return (steps, [layers, steps]): field `name` of each layer's latest reading at each step."""
        steps = np.array(sorted({r.step for readings in self.layers.values() for r in readings}), float)
        rows = [_held(steps, readings, name) for readings in self.layers.values()]
        return steps, np.array(rows).reshape(len(rows), len(steps))


def read(path: Path) -> Run:
    """Read a run from its folder or from its log file."""
    log = path / LOG if path.is_dir() else path
    lines = read_bytes(log, limit=MAX_BYTES).splitlines()
    records = list(_records(lines))
    by_step = {record["step"]: record for record in records if record["kind"] == "step"}
    if not by_step:
        raise InputError(f"{log} has no step yet.", hint="Try again when the run has logged a step.")
    steps = [by_step[step] for step in sorted(by_step)]
    runs = [record for record in records if record["kind"] == "run"]
    values = {n: np.array([_number(step.get(n)) for step in steps]) for n in ("loss", *RATES, "seconds")}
    seconds = np.where(values["seconds"] > 0, values["seconds"], math.nan)
    with np.errstate(over="ignore"):
        rates = {name: values[name] / seconds for name in RATES}
    held_out = {r["step"]: _number(r.get("loss")) for r in records if r["kind"] == "validation"}
    return Run(
        name=log.resolve().parent.name
        if log.name == LOG
        else log.name.removesuffix(".jsonl").removesuffix(".log"),
        facts=_facts(runs[-1]) if runs else {},
        step=np.array(sorted(by_step), float),
        values=values | rates,
        validation=np.array(sorted(held_out.items()), float).reshape(-1, 2),
        layers=_layers(records),
        resumed=tuple(run["step"] for run in runs[1:] if run["step"]),  # step 0: restarted, not resumed
        finished=records[-1]["kind"] == "end",
        wall=_wall(records),
        unreadable=len(lines) - len(records),
    )


def is_log(path: Path) -> bool:
    """Whether a path is the log of a training run, by any name, or a folder with one."""
    if path.is_dir():
        return (path / LOG).is_file()
    if not path.is_file() or path.suffix != ".jsonl":
        return path.name == LOG
    with path.open("rb") as file:
        return next(_records([file.readline(MAX_LINE)]), None) is not None


def _wall(records: Sequence[dict[str, Any]]) -> float:
    """Add up the time of each start of a run; NaN for a log without times."""
    seconds, begin, last = 0.0, math.nan, math.nan
    for record in records:
        time = _number(record.get("time"))
        if record["kind"] == "run" or math.isnan(begin):
            seconds += 0.0 if math.isnan(last) else last - begin
            begin = time
        last = time
    seconds += last - begin
    return seconds if 0 < seconds < math.inf else math.nan


def finite(values: FloatArray) -> FloatArray:
    return values[np.isfinite(values)]


def mean(values: Sequence[float] | FloatArray) -> float:
    """Return the mean of the finite values; NaN if there is none."""
    known = finite(np.asarray(values, float))
    return float(known.mean()) if known.size else math.nan


def median(values: FloatArray) -> float:
    """Return the median of the finite values; unlike `mean`, slow compiling steps hardly affect it."""
    known = finite(values)
    return float(np.median(known)) if known.size else math.nan


def share(reading: Reading) -> float:
    """Return the share of a layer's tiles that is computed, averaged over heads; 1 if it is dense."""
    return mean(reading.density) if reading.sparse else 1.0


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
    """Return the known fields of a run's header record, without those of an unexpected type."""
    kinds = {"recipe": dict, "ranks": int, "parameters": int, "torch": str, "total": int}
    facts = {name: run[name] for name, kind in kinds.items() if isinstance(run.get(name), kind)}
    if recipe := facts.get("recipe"):
        facts["recipe"] = {name: section for name, section in recipe.items() if isinstance(section, dict)}
    return facts


def _layers(records: Sequence[dict[str, Any]]) -> dict[str, tuple[Reading, ...]]:
    layers: dict[Any, dict[int, Reading]] = {}
    for record in records:
        if record["kind"] == "sparsity":
            layers.setdefault(_layer(record.get("layer")), {})[record["step"]] = Reading(
                record["step"],
                record.get("mode") == "sparse",
                _numbers(record.get("sparsity")),
                _numbers(record.get("density")),
                _number(record.get("coverage")),
                _number(record.get("recall")),
                _number(record.get("keys")),
            )
    if all(isinstance(layer, int) for layer in layers):
        layers = dict(sorted(layers.items()))
    return {str(layer): tuple(by_step[n] for n in sorted(by_step)) for layer, by_step in layers.items()}


def _layer(value: Any) -> int | str:
    return value if _is_count(value) else str(value)


def _held(steps: FloatArray, readings: Sequence[Reading], name: str) -> FloatArray:
    """Return field `name` of a layer's latest reading at each step; NaN before its first reading."""
    values = [share(r) if name == "share" else mean(np.atleast_1d(getattr(r, name))) for r in readings]
    index = np.searchsorted([reading.step for reading in readings], steps, side="right")
    return np.array([math.nan, *values])[index]


def _number(value: Any) -> float:
    """Return a logged value as a float; NaN for "nan" (JSON has no NaN) and for anything not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _numbers(value: Any) -> FloatArray:
    return np.array([_number(item) for item in value] if isinstance(value, list) else [_number(value)], float)
