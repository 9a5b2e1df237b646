"""Plans on disk, so that step 0 of the next run starts balanced.

One JSON file for each key, with the plans of all layers. Files appear whole or not at all, so runs may share
a folder without a lock; a file that cannot be used is reported and left out, for a lost plan costs one step
of balance and no more. $WEFT_PLANS is another folder than the user's cache, or off.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from weft.core.codec import Value, digest, dumps, loads
from weft.core.errors import InputError
from weft.core.files import cache, read_bytes, whole
from weft.plan.assignment import Assignment

FORMAT = 3
PLAN_FILE = re.compile(r"-[0-9a-f]{16}(\.\d+\.\d+)?\.json$")  # the folder may hold other files


@dataclass(frozen=True, kw_only=True)
class PlanKey(Value):
    """What plans are for. Names, not measurements: a new calibration does not make old plans unknown."""

    model: str
    shape: tuple[int, ...]
    """Heads, queries, keys, ranks."""
    sparsity: str
    topology: str

    @property
    def file(self) -> str:
        """A readable name, and a digest that makes it unique."""
        name = re.sub(r"[^A-Za-z0-9.]+", "-", self.model).strip("-.")[-40:]
        return f"{name}-{digest(self)}.json"


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredPlan(Value):
    """A layer's strategy, its assignment at the beginning of a run, and the loads of its heads by step."""

    layer: int
    branch: int
    strategy: str
    assignment: Assignment
    steps: tuple[int, ...]
    loads: npt.NDArray[np.int64]
    """[steps, heads]"""

    def __post_init__(self) -> None:
        heads = 1 + max((piece.head for group in self.assignment.heads for piece in group), default=-1)
        is_whole = self.loads.dtype.kind in "iu" and self.loads.shape == (len(self.steps), heads)
        if not is_whole or self.loads.min(initial=0) < 0:
            raise InputError(
                f"Loads are {self.loads.dtype} of shape {self.loads.shape}, for {len(self.steps)} steps of "
                f"{heads} heads.",
                hint="A stored plan has one load, a whole number of 0 or more, for each step and head.",
            )


class PlanStore:
    """Plans by key under `folder`; when they take more than `limit` bytes, the longest unused go."""

    def __init__(self, folder: Path | None = None, *, limit: int = 64_000_000) -> None:
        self.folder = folder or default_folder()
        self.limit = limit

    def get(self, key: PlanKey) -> tuple[StoredPlan, ...]:
        """Return the plans of a key, one for each layer and branch; never an error, whatever a file holds."""
        if self.folder is None or not (path := self.folder / key.file).exists():
            return ()
        try:
            plans = _read(path, key)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            warnings.warn(f"The stored plans {path} are ignored: {error}", stacklevel=2)
            return ()
        with suppress(OSError):
            path.touch()  # used: the last to go
        return plans

    def put(self, key: PlanKey, plans: Iterable[StoredPlan]) -> None:
        """Keep plans, each instead of that of its layer; a folder that cannot be written is a warning."""
        if self.folder is None:
            return
        merged = {(plan.layer, plan.branch): plan for plan in (*self.get(key), *plans)}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with whole(self.folder / key.file) as file:
                text = dumps({"format": FORMAT, "key": key, "plans": list(merged.values())})
                file.write_text(text + "\n", encoding="utf-8")
            self._prune(self.folder)
        except OSError as error:
            warnings.warn(f"Plans are not stored in {self.folder}: {error}", stacklevel=2)

    def _prune(self, folder: Path) -> None:
        # Half-written files of runs that died count too; those being written are the newest of all.
        files: list[tuple[int, int, Path]] = []
        for path in filter(lambda path: PLAN_FILE.search(path.name), folder.iterdir()):
            with suppress(FileNotFoundError):  # another run prunes too
                known = path.stat()
                files.append((known.st_mtime_ns, known.st_size, path))
        spare = sum(size for _, size, _ in files) - self.limit
        for _, size, path in sorted(files):
            if spare <= 0:
                break
            path.unlink(missing_ok=True)
            spare -= size


def default_folder() -> Path | None:
    """Return where plans are kept; None for nowhere."""
    setting = os.environ.get("WEFT_PLANS", "")
    return None if setting == "off" else Path(setting) if setting else cache() / "plans"


def _read(path: Path, key: PlanKey) -> tuple[StoredPlan, ...]:
    content = loads(read_bytes(path))
    table = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    if table.get("format") != FORMAT:
        raise InputError(f"the format is {table.get('format')}, this weft reads {FORMAT}.")
    plans: Any = table.get("plans")
    if table.get("key") != key or not isinstance(plans, tuple):
        raise InputError("its content does not match its name.")
    if not all(isinstance(plan, StoredPlan) for plan in cast("tuple[Any, ...]", plans)):
        raise InputError("it must hold plans only.")
    return cast("tuple[StoredPlan, ...]", plans)
