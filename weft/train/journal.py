"""The journal of a training run: one JSON line a record, TensorBoard's scalars, and a line on the screen.

`log.jsonl` is the truth: it is what resuming goes on from and what `weft report` draws. Only rank 0 has one.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.errors import InputError
from weft.core.files import parse_json, whole, writing
from weft.train.live import Live, mean

if TYPE_CHECKING:
    from io import FileIO

    from torch.utils.tensorboard import SummaryWriter

NAME = "log.jsonl"
HINT = "What is in it stays; resume when there is room."


class Journal:
    """Writes what happens in a run to a folder, and shows it if it is to be `live`."""

    def __init__(self, folder: Path | str, *, total: int, live: bool = False) -> None:
        self.path, self.total = Path(folder) / NAME, total
        self.live = Live(total) if live else None
        self._board: SummaryWriter | None = None
        self._boarding, self._purge = True, None
        if self.path.exists() and not self.path.is_file():  # a pipe would block
            raise InputError(f"{self.path} is not a regular file.", hint="Remove it, or give another --out.")
        with writing(self.path, hint=HINT):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _reopened(self.path)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a record; it is in the file when this returns, whole or not at all."""
        known = {"total": self.total} if kind == "run" else {}
        record = {"kind": kind, "step": step, "time": round(time.time(), 3)} | known | plain(values)
        with writing(self.path, hint=HINT):
            _append(self._file, encode(record))
        self._scalars(record)
        if self.live:
            self.live.hear(record)

    def rewind(self, step: int) -> int:
        """Move the records after a step to `log.jsonl.1`, .2 and so on; returns how many there were."""
        self.close()
        with writing(self.path, hint=HINT):
            lines = self.path.read_bytes().splitlines(keepends=True)
            late = [_step(line) > step for line in lines]
            if any(late):
                spare = (self.path.with_name(f"{NAME}.{n}") for n in count(1))
                # What is moved is safe in its new place before it leaves the old one.
                _replace(next(path for path in spare if not path.exists()), lines, late)
                _replace(self.path, lines, [not moved for moved in late])
            self._file = _reopened(self.path)
        self._purge = step + 1
        return sum(late)

    def has(self, kind: str, step: int) -> bool:
        """Whether there is such a record."""
        lines = self.path.read_bytes().splitlines()
        return any(_record(line).get("kind") == kind for line in lines if _step(line) == step)

    def close(self) -> None:
        """Leave the terminal in order and TensorBoard's file complete."""
        if self.live:
            self.live.stop()
        if self._board:
            self._board.close()
            self._board = None
        self._file.close()

    def _scalars(self, record: dict[str, Any]) -> None:
        """The numbers of a record for TensorBoard: lists by their mean, layers by their own names."""
        found = {name: mean(value) for name, value in record.items() if name not in ("step", "time", "layer")}
        found = {name: value for name, value in found.items() if value is not None}
        if record["kind"] == "run" or not found or not self._boarding:
            return
        try:
            self._board = self._board or _writer(self.path.with_name("tensorboard"), self._purge)
            where = f"{record['kind']}/{record['layer']}" if "layer" in record else record["kind"]
            for name, value in found.items():
                self._board.add_scalar(f"{where}/{name}", value, record["step"], record["time"])
        except (ImportError, OSError) as error:
            self._boarding = False
            if self.live:
                reason = error if isinstance(error, OSError) else "pip install 'weft[train]'"
                self.live.say(f"without TensorBoard ({reason}); all numbers are in {self.path}")


def plain(value: Any) -> Any:
    """As JSON has it: arrays, tensors and dataclasses as lists, numbers and dicts, others by their name."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if listed := getattr(value, "tolist", None):
        return plain(listed())
    return value if value is None or isinstance(value, str | int | float) else str(value)


def encode(record: Any) -> bytes:
    """A line of the log. Python reads a float back to the bit; NaN and infinity are words, JSON has none."""
    return json.dumps(_worded(record), allow_nan=False).encode() + b"\n"


def _worded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _worded(one) for name, one in value.items()}
    return [_worded(one) for one in value] if isinstance(value, list) else value


def _append(file: FileIO, line: bytes) -> None:
    """All of a line, or nothing: half of one would spoil the next."""
    before, rest = os.fstat(file.fileno()).st_size, line
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(before)
        raise


def _reopened(path: Path) -> FileIO:
    """Without a buffer, which a fork would write twice and a kill not at all; a cut last line is removed."""
    file = path.open("ab", buffering=0)
    found = path.read_bytes()
    whole_lines = found.rfind(b"\n") + 1
    if rest := found[whole_lines:]:
        if _step(rest) == -math.inf:
            file.truncate(whole_lines)
        else:
            _append(file, b"\n")
    return file


def _step(line: bytes) -> float:
    """Of a record; before everything if there is none."""
    step = _record(line).get("step")
    return step if isinstance(step, int | float) else -math.inf


def _record(line: bytes) -> dict[str, Any]:
    """Of a line that anything may have happened to; empty if it is none."""
    try:
        record = parse_json(line, NAME)
    except InputError:
        return {}
    return record if isinstance(record, dict) else {}


def _replace(path: Path, lines: list[bytes], wanted: list[bool]) -> None:
    with whole(path) as temporary, temporary.open("wb") as file:
        file.write(b"".join(line for line, keep in zip(lines, wanted, strict=True) if keep))
        file.flush()
        os.fsync(file.fileno())


def _writer(folder: Path, purge: int | None) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard reads files in the order of their names, which begin with the second that they were made in.
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    while int(time.time()) <= max(seconds, default=0):
        time.sleep(0.05)
    return SummaryWriter(str(folder), purge_step=purge)
