"""Checkpoints: the state of a training run, written asynchronously, complete or not at all.

    checkpoints = Checkpoints(Path("runs/shapes/checkpoints"), keep=2)
    checkpoints.save(100, state)     # on all ranks; returns when `state` is copied
    checkpoints.finish()             # waits; an error of one rank is raised on all
    checkpoints.latest()             # 100: the newest that is complete and undamaged
    checkpoints.load(100, state)     # in place, also on another number of ranks

    step-00000100/
        rank-00000.safetensors …     the tensor shards of each rank, see `weft.train.sharded_state`
        values.json                  all other values
        manifest.json                sizes and digests; written last: without it there is no checkpoint

A state is a nested dict of tensors, DTensors and plain values. All but DTensors must be the same on all
ranks, and are saved once. Nothing is pickled, neither in files nor between ranks: a folder is data, not code.
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
from weft.train.sharded_state import (
    FILE_NAME,
    FORMAT,
    Fingerprint,
    ShardCopy,
    StateDict,
    copy_shards,
    fill,
    write,
)

MANIFEST = "manifest.json"


class OldFormatError(InputError):
    """A checkpoint of torch's own format, which must be unpickled."""


class Checkpoints:
    """The last `keep` checkpoints of a run; `notify` gets a message for each that is skipped or removed."""

    def __init__(self, folder: Path, *, keep: int = 2, notify: Callable[[str], object] = str) -> None:
        self.folder, self.keep, self.notify = folder, keep, notify
        # A separate group: training uses the other one while a thread writes.
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._group = group if isinstance(group, dist.ProcessGroup) else None
        self._rank, self._size = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._damaged: set[Path] = set()

    def save(self, step: int, state: StateDict) -> None:
        """Copy `state` and write the copy in a thread, after the previous save, whose error is raised."""
        self.finish()
        copies: list[ShardCopy] = []

        def begin() -> str:
            copies.append(copy_shards(state, rank=self._rank, ranks=self._size))
            return str(self._new_path(step)) if self._rank == 0 else ""

        path = Path(self._on_all_ranks(begin)[0])
        self._pending = self._thread.submit(self._write, step, path, copies.pop())

    def finish(self) -> None:
        """Wait for the pending save."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def latest(self) -> int | None:
        """Return the step of the newest undamaged checkpoint, the same on all ranks."""
        self.finish()
        return self._on_rank_0(self._newest)

    def load(self, step: int, state: StateDict) -> None:
        """Fill the tensors of `state` and replace its other values."""
        self.finish()
        name, files = self._on_rank_0(lambda: self._files_of(step))
        self._on_all_ranks(lambda: fill(state, self.folder / name, files))

    def _write(self, step: int, path: Path, copy: ShardCopy) -> None:
        """Run on every rank, in the thread."""
        try:
            files = self._on_all_ranks(lambda: write(path, copy, rank=self._rank))
            self._on_rank_0(lambda: self._commit(step, path, files))
        except CommError:  # a rank is lost: the next start removes the unfinished checkpoint
            raise
        except WeftError as error:
            message, hint = self._on_rank_0(partial(self._discard, path, copy.num_bytes, str(error)))
            raise WeftError(message, hint=hint) from error

    def _commit(self, step: int, path: Path, files: Iterable[dict[str, Any]]) -> None:
        """Write the manifest, which makes it a checkpoint, and then remove older ones."""
        fingerprints = {name: value for of_rank in files for name, value in of_rank.items()}
        if missing := [name for name in fingerprints if not (path / name).exists()]:
            raise InputError(
                f"{path} has no {missing[0]}, which another rank wrote.",
                hint="Put the run's folder on a disk that all machines share.",
            )
        with whole(path / MANIFEST) as temporary, temporary.open("w", encoding="utf-8") as stream:
            json.dump({"format": FORMAT, "step": step, "files": fingerprints}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        for folder in (path, self.folder):  # directory entries, too, before an older checkpoint is removed
            _fsync_folder(folder)
        paths = self._paths()
        good = [each for each in paths if each not in self._damaged]
        for old in {*paths} - {*good[-self.keep :]}:
            _remove(old)

    def _discard(self, path: Path, needed: int, reason: str) -> tuple[str, str]:
        """Remove an unfinished checkpoint; return the message and the hint of the error for all ranks."""
        _remove(path)
        free, left = shutil.disk_usage(self.folder).free, [_step(each) for each in self._paths()]
        return (
            f"{path} was not written. {reason} It needs about {needed:,} bytes, and {free:,} are free.",
            f"The checkpoint of step {left[-1]} is untouched." if left else "There is no older one.",
        )

    def _paths(self) -> list[Path]:
        """Return the folders of checkpoints, complete or not, in order of their steps."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in paths if _step(path) >= 0), key=_step)

    def _newest(self) -> int | None:
        for path in reversed(self._paths()):
            damage = _find_damage(path)
            if not damage:
                return _step(path)
            self._damaged.add(path)
            self.notify(f"skipped the checkpoint {path}: {damage}")
        return None

    def _files_of(self, step: int) -> tuple[str, list[str]]:
        """Return the name of a checkpoint's folder and of the files in it."""
        complete = {_step(path): path for path in self._paths() if (path / MANIFEST).exists()}
        if step not in complete:
            hint = f"It has {', '.join(map(str, complete))}." if complete else "It has none."
            raise InputError(f"{self.folder} has no checkpoint of step {step}.", hint=hint)
        return complete[step].name, list(_read_manifest(complete[step]))

    def _new_path(self, step: int) -> Path:
        """Return the path of a new checkpoint, and remove unfinished ones of an earlier run."""
        path = self.folder / f"step-{step:08}"
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self._paths():
            if not (old / MANIFEST).exists() or (old == path and path in self._damaged):
                _remove(old)
                self.notify(f"removed the unusable checkpoint {old}")
        self._damaged.discard(path)
        if path.exists():
            raise InputError(f"{path} exists already.", hint="Resume from it, or save in another folder.")
        return path

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0; return its result, as JSON, or raise its error, on all ranks."""
        return self._on_all_ranks(lambda: work() if self._rank == 0 else None)[0]

    def _on_all_ranks(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` and return all ranks' results, as JSON; if it fails on one, all raise its error."""
        value, failure, cause = None, None, None
        try:
            value = work()
        except WeftError as error:
            failure, cause = (isinstance(error, InputError), error.message, error.hint), error
        except Exception as error:
            message = f"Rank {self._rank}: {type(error).__name__}: {str(error).rstrip('.')}."
            failure, cause = (False, message, ""), error
        results = [(value, failure)]
        if self._group is not None:
            try:
                results = all_gather_json(results[0], group=self._group)
            except CommError as error:
                message = f"Rank {self._rank} lost another rank at a checkpoint: {failure or error.message}"
                raise CommError(message, hint=error.hint) from error
        for _, failed in results:
            if failed is not None:
                is_input, message, hint = failed
                raise (InputError if is_input else WeftError)(message, hint=hint) from cause
        return [value for value, _ in results]


def _step(path: Path) -> int:
    """Return the step of a checkpoint's folder, -1 for other names."""
    match = re.fullmatch(r"step-(\d{8,15})", path.name)
    return int(match[1]) if match else -1


def _read_manifest(path: Path) -> dict[str, Fingerprint]:
    """Return the fingerprints of a checkpoint's files."""
    manifest = read_json(path / MANIFEST)
    files = manifest.get("files")
    if isinstance(files, dict) and any(name.endswith(".distcp") for name in files):
        raise OldFormatError(
            f"{path} is of an older weft, in a format of torch that can run code when it is read.",
            hint=f"Finish that run with the weft that wrote it, or begin another --out with model.start = "
            f'"{path.parent.parent / "model"}".',
        )
    if manifest.get("format") != FORMAT or not isinstance(files, dict) or not files:
        raise InputError(
            f"The format of {MANIFEST} must be {FORMAT!r}, got {str(manifest.get('format'))[:80]!r}."
        )
    for name, entry in files.items():
        match entry:
            case [int(), str()] if FILE_NAME.fullmatch(name):
                continue
        raise InputError(f"{MANIFEST} has {name[:80]!r}, which is not a file of a checkpoint.")
    return {name: Fingerprint(*entry) for name, entry in files.items()}


def _find_damage(path: Path) -> str:
    """Return what is wrong with a checkpoint, "" if it is as it was written."""
    if not (path / MANIFEST).exists():
        return "it is unfinished"
    try:
        fingerprints = _read_manifest(path)
        for name, fingerprint in fingerprints.items():
            status = (path / name).lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != fingerprint.size:
                return f"{name} has {status.st_size:,} bytes of {fingerprint.size:,}"
        changed = [name for name, expected in fingerprints.items() if Fingerprint.of(path / name) != expected]
        return f"{changed[0]} is not what was written" if changed else ""
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except OldFormatError:
        raise
    except (OSError, InputError) as error:
        return f"it cannot be read ({error})"


def _remove(path: Path) -> None:
    """Remove the manifest first, so that an interrupted removal leaves no checkpoint; unlink symlinks."""
    with suppress(OSError):  # an old checkpoint that cannot be removed does no harm
        if path.is_symlink():
            path.unlink()
            return
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _fsync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk, where the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)
