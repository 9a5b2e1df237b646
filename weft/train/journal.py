"""Journal of a training run: a JSON line per record, scalars for TensorBoard, and a progress line.

`log.jsonl` is authoritative: resuming appends to it, and `weft report` draws it. Only rank 0 writes.
"""

from __future__ import annotations

import json
import math
import os
import time
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from weft.core.errors import InputError
from weft.core.files import parse_json, whole, writing
from weft.core.install import install_command
from weft.train.progress_line import ProgressLine

if TYPE_CHECKING:
    from io import FileIO

    from torch.utils.tensorboard import SummaryWriter

NAME = "log.jsonl"
HINT = "Its records are unaffected; resume when there is room."


class Journal:
    """Write the records of a run to its folder, and show them with `live`."""

    def __init__(self, folder: Path | str, *, total: int, live: bool = False) -> None:
        self.path, self.total = Path(folder) / NAME, total
        self.live = ProgressLine(total) if live else None
        self._board: SummaryWriter | None = None
        self._uses_board, self._purge = True, None
        if self.path.exists() and not self.path.is_file():  # opening a pipe would block
            raise InputError(f"{self.path} is not a regular file.", hint="Remove it, or give another --out.")
        with writing(self.path, hint=HINT):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _reopened(self.path)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a record of JSON values to the file, all of it or nothing."""
        record = {"kind": kind, "step": step, "time": round(time.time(), 3)}
        record |= ({"total": self.total} if kind == "run" else {}) | values
        with writing(self.path, hint=HINT):
            _append(self._file, encode(record))
        self._scalars(record)
        if self.live:
            self.live.update(record)

    def rewind(self, step: int) -> int:
        """Move the records after a step to `log.jsonl.1`, .2 and so on; return their number."""
        self.close()
        with writing(self.path, hint=HINT):
            lines = self.path.read_bytes().splitlines(keepends=True)
            late = [_step(line) > step for line in lines]
            if any(late):
                names = (self.path.with_name(f"{NAME}.{n}") for n in count(1))
                # Written to the new file before they are removed from the old one.
                _replace(next(path for path in names if not path.exists()), lines, late)
                _replace(self.path, lines, [not is_late for is_late in late])
            self._file = _reopened(self.path)
        self._purge = step + 1
        return sum(late)

    def has(self, kind: str, step: int) -> bool:
        """Return whether there is a record of this kind and step."""
        lines = self.path.read_bytes().splitlines()
        return any(_record(line).get("kind") == kind for line in lines if _step(line) == step)

    def close(self) -> None:
        """Restore the terminal and complete TensorBoard's file."""
        if self.live:
            self.live.stop()
        if self._board:
            self._board.close()
            self._board = None
        self._file.close()

    def _scalars(self, record: dict[str, Any]) -> None:
        """Write the numbers of a record to TensorBoard, the mean of a list, with layers by name."""
        numbers = {
            name: mean(value) for name, value in record.items() if name not in ("step", "time", "layer")
        }
        if record["kind"] == "run" or not self._uses_board:
            return
        try:
            tag = f"{record['kind']}/{record['layer']}" if "layer" in record else record["kind"]
            for name, value in numbers.items():
                if value is not None:
                    self._board = self._board or _writer(self.path.with_name("tensorboard"), self._purge)
                    self._board.add_scalar(f"{tag}/{name}", value, record["step"], record["time"])
        except (ImportError, OSError) as error:
            self._uses_board = False
            if self.live:
                reason = error if isinstance(error, OSError) else install_command("train")
                self.live.print(f"without TensorBoard ({reason}); all numbers are in {self.path}")


def mean(value: Any) -> float | None:
    """Return a number, or the mean of those in a list; None without any."""
    if isinstance(value, list):
        numbers = [item for item in value if isinstance(item, int | float)]
        return fmean(numbers) if numbers else None
    return float(value) if isinstance(value, int | float) else None


def encode(record: Any) -> bytes:
    """Return a line of the log; floats round-trip exactly, NaN and infinity become strings."""
    return json.dumps(_finite(record), allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _append(file: FileIO, line: bytes) -> None:
    """Append all of a line or nothing: a partial one would corrupt the next."""
    before, rest = os.fstat(file.fileno()).st_size, line
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(before)
        raise


def _reopened(path: Path) -> FileIO:
    """Open unbuffered, since a fork writes a buffer twice and a kill loses it; remove a partial last line."""
    file = path.open("ab", buffering=0)
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if rest := content[complete:]:
        if _step(rest) == -math.inf:
            file.truncate(complete)
        else:
            _append(file, b"\n")
    return file


def _step(line: bytes) -> float:
    """Return the step of a line's record, -inf if it is damaged."""
    step = _record(line).get("step")
    return step if isinstance(step, int | float) else -math.inf


def _record(line: bytes) -> dict[str, Any]:
    """Return the record of a line, {} if it is damaged."""
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

    # TensorBoard reads files in the order of their names, which start with the second of their creation.
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    while int(time.time()) <= max(seconds, default=0):
        time.sleep(0.05)
    return SummaryWriter(str(folder), purge_step=purge)
