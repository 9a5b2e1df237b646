"""Plans on disk, so that step 0 of the next run starts balanced.

One small JSON file per key. Files appear whole or not at all, so runs may share a folder without a lock;
a file that cannot be used is reported and left out, for a lost plan costs one step of balance and no more.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from weft.core.codec import digest, dumps, loads, value
from weft.core.errors import InputError
from weft.core.files import cache, whole
from weft.plan.assignment import Assignment

FORMAT = 2
OURS = re.compile(r"-[0-9a-f]{16}(\.\d+\.\d+)?\.json$")  # a folder may hold files of others


@value
@dataclass(frozen=True, kw_only=True)
class Key:
    """What a plan is for. Names, not measurements: a new calibration does not make old plans unknown."""

    model: str
    layer: int
    shape: tuple[int, ...]
    mask: str
    topology: str

    @property
    def file(self) -> str:
        """A name that a reader can place, and a digest that tells it from all others."""
        name = re.sub(r"[^A-Za-z0-9.]+", "-", self.model).strip("-.")[-40:]
        return f"{name}-{self.layer}-{digest(self)}.json"


@value
@dataclass(frozen=True, eq=False)
class Stored:
    """A strategy's name, who had what in the last step, and the loads of the heads in the steps of a run."""

    strategy: str
    assignment: Assignment
    steps: tuple[int, ...]
    loads: npt.NDArray[np.int64]
    """[steps, heads]"""

    def __post_init__(self) -> None:
        heads = 1 + max((part.head for group in self.assignment.heads for part in group), default=-1)
        if self.loads.shape != (len(self.steps), heads) or self.loads.min(initial=0) < 0:
            raise InputError(
                f"Loads of shape {self.loads.shape} for {len(self.steps)} steps of {heads} heads.",
                hint="A stored plan has one load, 0 or more, for each step and head.",
            )


class Store:
    """Plans by key under `folder`; when they take more than `limit` bytes, the longest unused go."""

    def __init__(self, folder: Path | None = None, *, limit: int = 16_000_000) -> None:
        self.folder = folder or default_folder()
        self.limit = limit

    def get(self, key: Key) -> Stored | None:
        """The plan of a key, or None; never an error, whatever the file holds."""
        path = self.folder / key.file
        try:
            found = _read(path, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            warnings.warn(f"The stored plan {path} is ignored: {error}", stacklevel=2)
            return None
        with suppress(OSError):
            path.touch()  # used: the last to go
        return found

    def put(self, plans: Mapping[Key, Stored]) -> None:
        """Keep plans, each instead of what was there; a folder that cannot be written is a warning."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for key, plan in plans.items():
                text = dumps({"format": FORMAT, "key": key, "plan": plan})
                with whole(self.folder / key.file) as file:
                    file.write_text(text + "\n", encoding="utf-8")
            self._prune()
        except OSError as error:
            warnings.warn(f"Plans are not stored in {self.folder}: {error}", stacklevel=2)

    def _prune(self) -> None:
        # Half-written files of runs that died count too; those being written are the newest of all.
        files: list[tuple[int, int, Path]] = []
        for path in filter(lambda path: OURS.search(path.name), self.folder.iterdir()):
            with suppress(FileNotFoundError):  # another run prunes too
                known = path.stat()
                files.append((known.st_mtime_ns, known.st_size, path))
        spare = sum(size for _, size, _ in files) - self.limit
        for _, size, path in sorted(files):
            if spare <= 0:
                break
            path.unlink(missing_ok=True)
            spare -= size


def default_folder() -> Path:
    return cache() / "plans"


def _read(path: Path, key: Key) -> Stored:
    content = loads(path.read_text(encoding="utf-8"))
    table = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    if table.get("format") != FORMAT:
        raise InputError(f"it has format {table.get('format')}, this weft reads {FORMAT}.")
    plan = table.get("plan")
    if table.get("key") != key or not isinstance(plan, Stored):
        raise InputError("it holds something else than its name says.")
    return plan
