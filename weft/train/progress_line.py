"""ProgressLine: the status of a training run, updated in place on a terminal, else printed periodically."""

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

WINDOW = 50
"""Steps that speed and remaining time are averaged over."""
TERMINAL_SECONDS, FILE_SECONDS = 0.2, 30.0
"""Between two updates."""
BAR_COLUMNS = 16


class ProgressLine:
    def __init__(self, total: int, console: Console | None = None) -> None:
        self.total = total
        self.console = console or Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._steps: deque[tuple[float, dict[str, Any]]] = deque(maxlen=WINDOW)
        self._blocks: dict[Any, dict[str, Any]] = {}
        self._validation: float | None = None
        self._shown, self._stale = -math.inf, False
        self._bar: Progress | None = None

    def update(self, record: dict[str, Any]) -> None:
        """Add a record, and refresh the line if it is due."""
        match record["kind"]:
            case "step":
                self._steps.append((time.monotonic(), record))
                self._stale = True
                interval = TERMINAL_SECONDS if self.console.is_terminal else FILE_SECONDS
                if time.monotonic() - self._shown >= interval:
                    self._show()
            case "sparsity":
                self._blocks[record.get("layer")] = record
            case "validation":
                self._validation = record.get("loss")
            case "note":
                self.print(str(record.get("text", "")))
            case "sample":
                self.print(f"step {record['step']}: {record.get('file')}")
            case "end":
                self.stop()

    def print(self, text: str) -> None:
        """Print above the line."""
        self.console.print(text)

    def stop(self) -> None:
        """Show the last state and release the terminal."""
        if self._stale:
            self._show()
        if self._bar:
            self._bar.stop()
            self._bar = None
        self._steps.clear()

    def line(self) -> str:
        """Return the text after the latest step."""
        now, record = self._steps[-1]
        steps = [step for _, step in self._steps]
        seconds = sum(step.get("seconds") or 0.0 for step in steps) or math.inf
        samples, tokens = (
            sum(step.get(name) or 0 for step in steps) / seconds for name in ("samples", "tokens")
        )
        done = record["step"] - steps[0]["step"]
        # Wall time, which includes validation and checkpoints; the first step has only its own time.
        pace = (now - self._steps[0][0]) / done if done > 0 else record.get("seconds") or 0.0
        held_out = "" if self._validation is None else f" (validation {self._validation:.4f})"
        texts = [
            f"step {record['step']}/{self.total}",
            *([f"loss {record['loss']:.4f}{held_out}"] if record.get("loss") is not None else []),
            *([f"{samples:,.{1 if samples < 100 else 0}f} samples/s"] if samples else []),
            *([f"{tokens:,.0f} tokens/s"] if tokens else []),
            f"{clock(pace * max(0, self.total - record['step']))} left",
            *self._modes(),
        ]
        return " · ".join(texts)

    def short_line(self, columns: int) -> str:
        """Return the line without the facts for which there is no room; no number is cut."""
        texts = self.line().split(" · ")
        for least in ("tokens/s", "samples/s", "blocks", "loss"):
            if len(" · ".join(texts)) > columns:
                texts = [text for text in texts if least not in text]
        return " · ".join(texts)

    def _modes(self) -> list[str]:
        sparse = [block for block in self._blocks.values() if block.get("mode") == "sparse"]
        if not sparse:
            return [f"{len(self._blocks)} blocks dense"] if self._blocks else []
        shares = [fmean(shares) for block in sparse if (shares := block.get("density"))]
        density = f", density {fmean(shares):.2f}" if shares else ""
        return [f"{len(sparse)} of {len(self._blocks)} blocks sparse{density}"]

    def _show(self) -> None:
        self._shown, self._stale = time.monotonic(), False
        if not self.console.is_terminal:
            self.print(self.line())
            return
        self._bar = self._bar or self._start_bar()
        [task] = self._bar.task_ids
        step = self._steps[-1][1]["step"]
        text = self.short_line(self.console.width - BAR_COLUMNS - 2)
        self._bar.update(task, completed=step, description=text, refresh=True)

    def _start_bar(self) -> Progress:
        text = TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        # No refresh thread: a fork would copy its lock. No hidden cursor: kill -9 would leave it hidden.
        bar = Progress(BarColumn(BAR_COLUMNS), text, console=self.console, auto_refresh=False)
        bar.add_task("", total=self.total)
        bar.start()
        self.console.show_cursor(show=True)
        return bar
