"""The live line of a training run: in place on a terminal, else one line now and then."""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from weft.core.units import clock

RECENT = 50
"""Steps that speed and time left are taken from."""
IN_PLACE, LINES = 0.2, 30.0
"""Seconds between two states of the line on a terminal, and in a file."""


class Live:
    """A line about a run under way: in place on a terminal, else one now and then."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.total = total
        self.console = console or Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._steps: deque[tuple[float, dict[str, Any]]] = deque(maxlen=RECENT)
        self._blocks: dict[Any, dict[str, Any]] = {}
        self._validation: float | None = None
        self._shown, self._stale = -math.inf, False
        self._bar: Progress | None = None

    def hear(self, record: dict[str, Any]) -> None:
        """Take a record in, and show what has changed if it is time."""
        match record["kind"]:
            case "step":
                self._steps.append((time.monotonic(), record))
                self._stale = True
                if time.monotonic() - self._shown >= (IN_PLACE if self.console.is_terminal else LINES):
                    self._show()
            case "sparsity":
                self._blocks[record.get("layer")] = record
            case "validation":
                self._validation = record.get("loss")
            case "note":
                self.say(str(record.get("text", "")))
            case "sample":
                self.say(f"step {record['step']}: {record.get('file')}")
            case "end":
                self.stop()

    def say(self, text: str) -> None:
        """Words that stay, above the line."""
        self.console.print(text)

    def stop(self) -> None:
        """Leave the line as it is at last."""
        if self._stale:
            self._show()
        if self._bar:
            self._bar.stop()
            self._bar = None
        self._steps.clear()

    def line(self) -> str:
        """What the line says after the latest step."""
        moment, record = self._steps[-1]
        values = [one for _, one in self._steps]
        spent = sum(one.get("seconds") or 0.0 for one in values) or math.inf
        samples, tokens = (
            sum(one.get(name) or 0 for one in values) / spent for name in ("samples", "tokens")
        )
        first, before = self._steps[0][0], values[0]["step"]
        done = record["step"] - before
        # By the clock, which also counts validation and checkpoints; the first step has only its own time.
        pace = (moment - first) / done if done > 0 else record.get("seconds") or 0.0
        held_out = "" if self._validation is None else f" (validation {self._validation:.4f})"
        parts = [
            f"step {record['step']}/{self.total}",
            *([f"loss {record['loss']:.4f}{held_out}"] if record.get("loss") is not None else []),
            *([f"{samples:,.{1 if samples < 100 else 0}f} samples/s"] if samples else []),
            *([f"{tokens:,.0f} tokens/s"] if tokens else []),
            f"{clock(pace * max(0, self.total - record['step']))} left",
            *self._modes(),
        ]
        return " · ".join(parts)

    def _modes(self) -> list[str]:
        sparse = [one for one in self._blocks.values() if one.get("mode") == "sparse"]
        if not sparse:
            return [f"{len(self._blocks)} blocks dense"] if self._blocks else []
        shares = [share for one in sparse if (share := mean(one.get("density"))) is not None]
        density = f", density {fmean(shares):.2f}" if shares else ""
        return [f"{len(sparse)} of {len(self._blocks)} blocks sparse{density}"]

    def _show(self) -> None:
        self._shown, self._stale = time.monotonic(), False
        if not self.console.is_terminal:
            self.say(self.line())
            return
        self._bar = self._bar or self._begun()
        [task] = self._bar.task_ids
        step = self._steps[-1][1]["step"]
        self._bar.update(task, completed=step, description=self.line(), refresh=True)

    def _begun(self) -> Progress:
        words = TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        # No thread of its own: a fork would copy its lock. The cursor stays, or kill -9 would take it along.
        bar = Progress(BarColumn(16), words, console=self.console, auto_refresh=False)
        bar.add_task("", total=self.total)
        bar.start()
        self.console.show_cursor(show=True)
        return bar


def mean(value: Any) -> float | None:
    """Of a number or of those in a list; None if there is none."""
    if isinstance(value, list):
        numbers = [one for one in value if isinstance(one, int | float)]
        return fmean(numbers) if numbers else None
    return float(value) if isinstance(value, int | float) else None
