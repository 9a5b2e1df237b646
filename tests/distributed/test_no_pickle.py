"""Ranks unpickle nothing while they train, save, resume, calibrate and generate.

The pool's own calls and results are pickles over unix pipes, before and after `inside` runs: those are not
counted. Whatever a rank unpickles in between came from a socket or from a file.
"""

from __future__ import annotations

import _pickle
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.distributed.test_resume import SPARSE, complete, losses
from tests.distributed.test_resume import train as run_training
from tests.worlds import world
from weft.generate.generate import generate
from weft.generate.request import Request
from weft.run.measure.calibrate import calibrate
from weft.video.saved_model import shipped

READERS = [
    (pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (pickle, "_Unpickler"),
    (_pickle, "loads"), (_pickle, "load"), (_pickle, "Unpickler"),
    (c10d, "_unpickler"), (c10d, "_tensor_to_object"), (torch, "load"),
]  # fmt: skip


def inside(work: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """What `work` returns on this rank, and what was unpickled meanwhile, in all threads."""
    seen: list[str] = []

    def watch(name: str, real: Any) -> Any:
        if isinstance(real, type):  # modules that are imported meanwhile derive from it
            return type(name, (real,), {"load": lambda self: seen.append(name) or real.load(self)})
        return lambda *args, **options: seen.append(name) or real(*args, **options)

    with ExitStack() as stack:
        for module, name in READERS:
            stack.enter_context(mock.patch.object(module, name, watch(name, getattr(module, name))))
        return work(*args), seen


def broadcast_object() -> None:
    dist.broadcast_object_list([1])


def test_an_object_collective_is_seen() -> None:
    assert all("_tensor_to_object" in seen for _, seen in world(2).run(inside, broadcast_object)[1:])


def train(folder: Path, steps: int) -> int:
    said = SPARSE | {"train": SPARSE["train"] | {"steps": steps}}
    return run_training(said | {"sparse": SPARSE["sparse"] | {"gate": "cost"}}, folder)


def test_training_with_checkpoints_and_a_resume(tmp_path: Path) -> None:
    assert world(2).run(inside, train, tmp_path, 6) == [(6, [])] * 2
    assert len(complete(tmp_path)) == 2
    assert world(2).run(inside, train, tmp_path, 9) == [(9, [])] * 2
    assert list(losses(tmp_path)) == list(range(1, 10))
    files = {file.suffix for file in (tmp_path / "checkpoints").rglob("*") if file.is_file()}
    assert files == {".safetensors", ".json"}


def test_calibration() -> None:
    assert [seen for _, seen in world(2).run(inside, partial(calibrate, quick=True))] == [[], []]


def test_generation(tmp_path: Path) -> None:
    pytest.importorskip("av")
    request = Request(
        model=shipped(),
        prompt="a red circle moving left",
        out=tmp_path / "a.mp4",
        seed=0,
        steps=1,
        quiet=True,
    )
    assert [seen for _, seen in world(2).run(inside, generate, request)] == [[], []]
