"""Checkpoints: all that a run needs to go on, written to disk while it goes on.

    checkpoints = Checkpoints(Path("runs/shapes/checkpoints"), keep=2)
    checkpoints.save(100, state)     # on all ranks; returns when `state` is copied
    checkpoints.finish()             # waits, and raises on all ranks what went wrong on one
    checkpoints.latest()             # 100: the newest that is complete and undamaged
    checkpoints.load(100, state)     # in place, also on another number of ranks

    step-00000100/
        __0_0.distcp, __1_0.distcp   what each rank wrote, in the format of torch.distributed.checkpoint
        .metadata                    which part of which tensor lies where
        manifest.json                their sizes and digests; written last: without it there is no checkpoint

A state is a dict of tensors, DTensors and plain values, nested. What is no DTensor is the same on all
ranks, and is saved once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import MappingKey, keystr, tree_flatten_with_path

from weft.core.errors import CommError, InputError, WeftError
from weft.core.files import whole

MANIFEST = "manifest.json"
CHUNK = 1 << 20
AROUND = 2048
"""Bytes, about, of a saved tensor beside its numbers."""

T = TypeVar("T")
State = dict[str, Any]


class Print(NamedTuple):
    """What a file must still be when it is read."""

    size: int
    digest: str

    @staticmethod
    def of(file: Path) -> Print:
        digest = hashlib.blake2b(digest_size=16)
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
            return Print(stream.tell(), digest.hexdigest())


class Checkpoints:
    """The last `keep` checkpoints of a run; `tell` hears of those that are passed over or removed."""

    def __init__(self, folder: Path, *, keep: int = 2, tell: Callable[[str], object] = str) -> None:
        self.folder, self.keep, self.tell = folder, keep, tell
        # A group of their own: training goes on in the other one while a thread writes.
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._group = group if isinstance(group, dist.ProcessGroup) else None
        self._rank = 0 if self._group is None else self._group.rank()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._damaged: set[Path] = set()

    def save(self, step: int, state: State) -> None:
        """Copy `state` now and write the copy later; waits for the save before, and raises its error."""
        self.finish()
        copies: list[State] = []

        def begin() -> tuple[Path, int]:
            needed = _bytes(state)
            copies.append(_copy(state))
            return (self._make_way(step) if self._rank == 0 else self.folder), needed

        path, needed = self._together(begin)[0]
        self._pending = self._thread.submit(self._write, step, path, copies.pop(), needed)

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
        path = self._first(lambda: self._complete(step))
        planner = DefaultLoadPlanner()

        def read() -> None:
            _hush()
            load(state, storage_reader=FileSystemReader(path), planner=planner, process_group=self._group)
            # Torch reads what it is asked for; what it is not asked for would be lost without a word.
            if planner.metadata and (
                more := sorted(planner.metadata.state_dict_metadata.keys() - planner.state_dict.keys())
            ):
                raise InputError(
                    f"{path} has {', '.join(more[:3])}{' …' if more[3:] else ''}, which this run has not.",
                    hint="Go on with the recipe and the version of weft that wrote it.",
                )

        self._together(read)

    def _write(self, step: int, path: Path, state: State, needed: int) -> None:
        """On every rank, in the thread."""
        try:
            files = self._together(lambda: self._write_files(path, state))
            self._first(lambda: self._close(step, path, files))
        except CommError:  # nobody to agree with: the next start removes what there is
            raise
        except WeftError as error:
            raise self._first(partial(self._give_up, path, needed, str(error))) from error

    def _write_files(self, path: Path, state: State) -> dict[str, Print]:
        _hush()
        save(state, storage_writer=FileSystemWriter(path), process_group=self._group)
        mine = list(path.glob(f"__{self._rank}_*"))
        if self._rank == 0:
            mine.append(path / ".metadata")
        return {file.name: Print.of(file) for file in mine}

    def _close(self, step: int, path: Path, files: Iterable[dict[str, Print]]) -> None:
        """The manifest makes it a checkpoint; only then may an older one go."""
        prints = {name: print for each in files for name, print in each.items()}
        if away := [name for name in prints if not (path / name).exists()]:
            raise InputError(
                f"{path} has no {away[0]}, which another rank wrote.",
                hint="Put the run's folder on a disk that all machines share.",
            )
        with whole(path / MANIFEST) as temporary, temporary.open("w", encoding="utf-8") as stream:
            json.dump({"step": step, "files": prints}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        good = [found for found in self._found() if found not in self._damaged]
        for found in {*self._found()} - {*good[-self.keep :]}:
            _remove(found)

    def _give_up(self, path: Path, needed: int, reason: str) -> WeftError:
        _remove(path)
        free = shutil.disk_usage(self.folder).free
        if free < needed:  # torch loses the system's own words when a file cannot grow
            reason = "The disk is full."
        left = [_step(found) for found in self._found()]
        return WeftError(
            f"{path} was not written. {reason} It needs about {needed:,} bytes, and {free:,} are free.",
            hint=f"The checkpoint of step {left[-1]} is untouched." if left else "There is no older one.",
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

    def _complete(self, step: int) -> Path:
        there = {_step(path): path for path in self._found() if (path / MANIFEST).exists()}
        if step not in there:
            has = f"It has {', '.join(map(str, there))}." if there else "It has none."
            raise InputError(f"{self.folder} has no checkpoint of step {step}.", hint=has)
        return there[step]

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

    def _first(self, work: Callable[[], T]) -> T:
        """Let rank 0 do something, and all ranks have its result or its error."""
        return cast(T, self._together(lambda: work() if self._rank == 0 else None)[0])

    def _together(self, work: Callable[[], T]) -> list[T]:
        """What `work` returned on every rank; if it failed on any, all raise that error."""
        value, failure, cause = None, None, None
        try:
            value = work()
        except (Exception, CheckpointException) as error:  # torch's own is no Exception
            failure, cause = self._failure(error), error
        everyone: list[Any] = [(value, failure)]
        if self._group is not None:
            everyone *= self._group.size()
            try:
                dist.all_gather_object(everyone, (value, failure), group=self._group)
            except RuntimeError as error:
                raise CommError(
                    f"Rank {self._rank} lost another rank at a checkpoint: {failure or error}"
                ) from error
        for _, failed in everyone:
            if failed is not None:
                raise failed from cause
        return [value for value, _ in everyone]

    def _failure(self, error: BaseException) -> WeftError:
        """As an error that can be sent, naming the rank it comes from."""
        rank = self._rank
        if isinstance(error, CheckpointException):
            rank, (error, _) = next(iter(error.failures.items()))
        if isinstance(error, WeftError):
            return error
        return WeftError(f"Rank {rank}: {type(error).__name__}: {str(error).rstrip('.')}.")


def _step(path: Path) -> int:
    """-1 for what is no checkpoint."""
    named = re.fullmatch(r"step-(\d{8,})", path.name)
    return int(named[1]) if named else -1


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint; nothing, if it is as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        prints = {name: Print(*entry) for name, entry in manifest["files"].items()}
        for name, print in prints.items():
            if (size := (path / name).stat().st_size) != print.size:
                return f"{name} has {size:,} bytes of {print.size:,}"
        changed = [name for name, print in prints.items() if Print.of(path / name) != print]
        return f"{changed[0]} is not what was written" if changed else ""
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        return "it is unfinished" if missing == MANIFEST else f"{missing} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({error!r})"


def _remove(path: Path) -> None:
    """The manifest first: what is left if this ends half-way is no checkpoint."""
    with suppress(OSError):  # what cannot go stays whole; a new checkpoint is no worse for it
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _copy(state: State) -> State:
    """In host memory, before anything changes."""
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
    copied = stager.stage(state)
    stager.close()
    assert isinstance(copied, dict)
    return copied


def _bytes(state: State) -> int:
    """Of all tensors, on all ranks together, with what torch writes around each."""
    total = 0
    for path, leaf in tree_flatten_with_path(state)[0]:
        if any(isinstance(key, MappingKey) and not isinstance(key.key, str) for key in path):
            # Torch saves such a key as a string, and does not find it when it loads.
            raise InputError(f"state{keystr(path)} has a key that is no string.", hint="Name it by str().")
        total += AROUND + (leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0)
    return total


def _hush() -> None:
    """One process alone is nothing to be warned of."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
