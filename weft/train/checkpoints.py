"""Checkpoints: all that a run needs to go on, written to disk while it goes on.

    checkpoints = Checkpoints(Path("runs/shapes/checkpoints"), keep=2)
    checkpoints.save(100, state)     # on all ranks; returns when `state` is copied
    checkpoints.finish()             # waits, and raises on all ranks what went wrong on one
    checkpoints.latest()             # 100: the newest that is complete and undamaged
    checkpoints.load(100, state)     # in place, also on another number of ranks

    step-00000100/
        rank-00000.safetensors …     what each rank wrote of the tensors, see `weft.train.storage`
        values.json                  what is no tensor
        manifest.json                their sizes and digests; written last: without it there is no checkpoint

A state is a dict of tensors, DTensors and plain values, nested. What is no DTensor is the same on all
ranks, and is saved once. Nothing is pickled, neither in files nor between ranks: a folder is data, not code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.core.errors import CommError, InputError, WeftError
from weft.core.files import read_json, whole
from weft.run.exchange import all_gather_json
from weft.train.storage import FORMAT, NAMES, Print, State, Taken, fill, take, write

MANIFEST = "manifest.json"
ERRORS = {kind.__name__: kind for kind in (InputError, WeftError)}
"""What ranks raise for the error of another one, by name."""


class OldFormatError(InputError):
    """A checkpoint that only an unpickler could read."""


class Checkpoints:
    """The last `keep` checkpoints of a run; `tell` hears of those that are passed over or removed."""

    def __init__(self, folder: Path, *, keep: int = 2, tell: Callable[[str], object] = str) -> None:
        self.folder, self.keep, self.tell = folder, keep, tell
        # A group of their own: training goes on in the other one while a thread writes.
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._group = group if isinstance(group, dist.ProcessGroup) else None
        self._rank, self._size = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._damaged: set[Path] = set()

    def save(self, step: int, state: State) -> None:
        """Copy `state` now and write the copy later; waits for the save before, and raises its error."""
        self.finish()
        taken: list[Taken] = []

        def begin() -> str:
            taken.append(take(state, rank=self._rank, ranks=self._size))
            return str(self._make_way(step)) if self._rank == 0 else ""

        path = Path(self._together(begin)[0])
        self._pending = self._thread.submit(self._write, step, path, taken.pop())

    def finish(self) -> None:
        """Wait for the save that is under way."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def latest(self) -> int | None:
        """The step of the newest checkpoint that is as it was written, the same on all ranks."""
        self.finish()
        return self._first(self._newest)

    def load(self, step: int, state: State) -> None:
        """Fill the tensors of `state` and replace its other values."""
        self.finish()
        name, files = self._first(lambda: self._complete(step))
        self._together(lambda: fill(state, self.folder / name, files))

    def _write(self, step: int, path: Path, taken: Taken) -> None:
        """On every rank, in the thread."""
        try:
            files = self._together(lambda: write(path, taken, rank=self._rank))
            self._first(lambda: self._close(step, path, files))
        except CommError:  # nobody to agree with: the next start removes what there is
            raise
        except WeftError as error:
            message, hint = self._first(partial(self._give_up, path, taken.num_bytes, str(error)))
            raise WeftError(message, hint=hint) from error

    def _close(self, step: int, path: Path, files: Iterable[dict[str, Any]]) -> None:
        """The manifest makes it a checkpoint; only then may an older one go."""
        prints = {name: print for each in files for name, print in each.items()}
        if away := [name for name in prints if not (path / name).exists()]:
            raise InputError(
                f"{path} has no {away[0]}, which another rank wrote.",
                hint="Put the run's folder on a disk that all machines share.",
            )
        with whole(path / MANIFEST) as temporary, temporary.open("w", encoding="utf-8") as stream:
            json.dump({"format": FORMAT, "step": step, "files": prints}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        for folder in (path, self.folder):  # names are on the disk, too, before an older one goes
            _sync(folder)
        good = [found for found in self._found() if found not in self._damaged]
        for found in {*self._found()} - {*good[-self.keep :]}:
            _remove(found)

    def _give_up(self, path: Path, needed: int, reason: str) -> tuple[str, str]:
        """Remove what was written; return the message and the hint of the error that all ranks raise."""
        _remove(path)
        free, left = shutil.disk_usage(self.folder).free, [_step(found) for found in self._found()]
        return (
            f"{path} was not written. {reason} It needs about {needed:,} bytes, and {free:,} are free.",
            f"The checkpoint of step {left[-1]} is untouched." if left else "There is no older one.",
        )

    def _found(self) -> list[Path]:
        """Complete or not, in order of their steps."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if _step(path) >= 0), key=_step)

    def _newest(self) -> int | None:
        for path in reversed(self._found()):
            wrong = _damage(path)
            if not wrong:
                return _step(path)
            self._damaged.add(path)
            self.tell(f"passed over the checkpoint {path}: {wrong}")
        return None

    def _complete(self, step: int) -> tuple[str, list[str]]:
        """The name of a checkpoint's folder, and those of the files in it."""
        there = {_step(path): path for path in self._found() if (path / MANIFEST).exists()}
        if step not in there:
            has = f"It has {', '.join(map(str, there))}." if there else "It has none."
            raise InputError(f"{self.folder} has no checkpoint of step {step}.", hint=has)
        return there[step].name, list(_prints(there[step]))

    def _make_way(self, step: int) -> Path:
        """A name for a new checkpoint; what an earlier run could not finish is removed."""
        path = self.folder / f"step-{step:08}"
        self.folder.mkdir(parents=True, exist_ok=True)
        for found in self._found():
            if not (found / MANIFEST).exists() or (found == path and path in self._damaged):
                _remove(found)
                self.tell(f"removed the unusable checkpoint {found}")
        self._damaged.discard(path)
        if path.exists():
            raise InputError(f"{path} is there already.", hint="Go on from it, or save in another folder.")
        return path

    def _first(self, work: Callable[[], Any]) -> Any:
        """Let rank 0 do something, and all ranks have its result, as JSON, or its error."""
        return self._together(lambda: work() if self._rank == 0 else None)[0]

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` returned on every rank, as JSON; if it failed on any, all raise that error."""
        value, failure, cause = None, None, None
        try:
            value = work()
        except Exception as error:
            failure, cause = self._failure(error), error
        results = [(value, failure)]
        if self._group is not None:
            try:
                results = all_gather_json(results[0], group=self._group)
            except CommError as error:
                message = f"Rank {self._rank} lost another rank at a checkpoint: {failure or error.message}"
                raise CommError(message, hint=error.hint) from error
        for _, failed in results:
            if failed is not None:
                kind, message, hint = failed
                raise ERRORS[kind](message, hint=hint) from cause
        return [value for value, _ in results]

    def _failure(self, error: Exception) -> tuple[str, str, str]:
        """Kind, message and hint, naming the rank where the error does not."""
        if isinstance(error, WeftError):
            kind = next(name for name, kind in ERRORS.items() if isinstance(error, kind))
            return kind, error.message, error.hint
        return "WeftError", f"Rank {self._rank}: {type(error).__name__}: {str(error).rstrip('.')}.", ""


def _step(path: Path) -> int:
    """-1 for what is no checkpoint."""
    named = re.fullmatch(r"step-(\d{8,15})", path.name)
    return int(named[1]) if named else -1


def _prints(path: Path) -> dict[str, Print]:
    """The files of a checkpoint, by the manifest."""
    manifest = read_json(path / MANIFEST)
    files = manifest.get("files")
    if isinstance(files, dict) and any(name.endswith(".distcp") for name in files):
        raise OldFormatError(
            f"{path} is of an older weft, in a format of torch that can run code when it is read.",
            hint=f"Finish that run with the weft that wrote it, or begin another --out with model.start = "
            f'"{path.parent.parent / "model"}".',
        )
    if manifest.get("format") != FORMAT or not isinstance(files, dict) or not files:
        raise InputError(f"{MANIFEST} is of {str(manifest.get('format'))[:80]!r}, not of {FORMAT!r}.")
    for name, entry in files.items():
        match entry:
            case [int(), str()] if NAMES.fullmatch(name):
                continue
        raise InputError(f"{MANIFEST} has {name[:80]!r}, which is no file of a checkpoint.")
    return {name: Print(*entry) for name, entry in files.items()}


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint; nothing, if it is as it was written."""
    if not (path / MANIFEST).exists():
        return "it is unfinished"
    try:
        prints = _prints(path)
        for name, print in prints.items():
            status = (path / name).lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != print.size:
                return f"{name} has {status.st_size:,} bytes of {print.size:,}"
        changed = [name for name, print in prints.items() if Print.of(path / name) != print]
        return f"{changed[0]} is not what was written" if changed else ""
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except OldFormatError:
        raise
    except (OSError, InputError) as error:
        return f"it cannot be read ({error})"


def _remove(path: Path) -> None:
    """The manifest first: what is left if this ends half-way is no checkpoint. Of a link, only the link."""
    with suppress(OSError):  # what cannot go stays whole; a new checkpoint is no worse for it
        if path.is_symlink():
            path.unlink()
            return
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)
