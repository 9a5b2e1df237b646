"""Training on real ranks that are killed, cut off from their disk, and started again on others."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.worlds import world
from weft.run.spawn.pool import RankFailure
from weft.run.spawn.pool_rank import PRELOAD
from weft.train.recipe import Recipe
from weft.train.trainer import Trainer

PRELOAD.append("torch.distributed.checkpoint")  # seconds, otherwise in each rank

EVERY, LAST = 3, 12
DENSE: dict[str, Any] = {
    "model": {"patch": (2, 8, 8), "width": 24, "depth": 2, "heads": 3},
    "data": {"frames": 4, "size": 32, "held_out": 1},
    "train": {"steps": LAST, "batch": 6, "warmup": 2},
    "save": {"every": EVERY},
}
SHARED = DENSE | {"parallel": {"sequence": 0}}
SPARSE = SHARED | {
    "sparse": {
        "cube": (2, 2, 2),
        "rows": 8,
        "stage1": 4,
        "profile_every": 2,
        "profile_rarely": 3,
        "gate": 1.0,
        "budget": 0.5,
    }
}


class Trouble(NamedTuple):
    """What happens to a rank in a step, some seconds after its begin."""

    what: str  # "killed" | "full", of the disk
    rank: int
    step: int
    delay: float = 0.0


class Troubled(Trainer):
    """Meets its trouble, at the latest in the step after the one it is meant for."""

    trouble: Trouble | None = None

    def _step(self, step: int) -> bool:
        trouble = self.trouble
        if trouble is None or self.mesh.rank != trouble.rank or step < trouble.step:
            return super()._step(step)
        if trouble.what == "full":
            limit_files(2000)
        elif step > trouble.step:
            kill()
        else:
            threading.Timer(trouble.delay, kill).start()
        return super()._step(step)


def limit_files(size: int | None) -> None:
    """As a disk that is full: the kernel refuses to write on."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(said: dict[str, Any], folder: Path, trouble: Trouble | None = None) -> int:
    trainer = Troubled(Recipe.of(said), folder, live=False)
    trainer.trouble = trouble
    try:
        return trainer.run()
    finally:
        limit_files(None)
        trainer.close()


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in log(folder) if line["kind"] == "step"}


def weights(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted((folder / "model").rglob("*.safetensors")))


def complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in (folder / "checkpoints").glob("*/manifest.json"))


def cut(path: Path) -> None:
    file = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 2 ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("resume") / "calm"
    assert world(2).run(train, DENSE, folder) == [LAST] * 2
    return folder


def test_interrupted_run_matches_uninterrupted_run_bitwise(calm: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        world(2).run(train, DENSE, tmp_path, Trouble("full", 1, 2 * EVERY + 1))
    failures = caught.value.failures.values()
    assert [each.kind for each in failures] == ["WeftError"] * 2
    assert all("was not written" in each.message and "is untouched" in each.message for each in failures)
    assert complete(tmp_path)

    with pytest.raises(RankFailure, match="rank 0 was killed by SIGKILL"):
        world(2).run(train, DENSE, tmp_path, Trouble("killed", 0, LAST - 1, 0.02))
    *_, before, last = complete(tmp_path)
    cut(last)

    assert world(2).run(train, DENSE, tmp_path) == [LAST] * 2
    assert losses(tmp_path) == losses(calm)
    assert weights(tmp_path) == weights(calm) != b""
    notes = [line["text"] for line in log(tmp_path) if line["kind"] == "note"]
    assert any(last.name in note and "bytes of" in note for note in notes)
    resumed = [line["resumed"] for line in log(tmp_path) if line["kind"] == "run"]
    assert resumed[-1] == int(before.name[5:])


def goes_on(folder: Path, said: dict[str, Any], ranks: int) -> dict[int, float]:
    """What the other ranks make of the last steps of a run."""
    shutil.rmtree(complete(folder)[-1])
    if ranks > 1:
        world(ranks).run(train, said, folder)
    else:
        train(said, folder)
    return losses(folder)


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_go_on_where_two_were(ranks: int, calm: Path, tmp_path: Path) -> None:
    shutil.copytree(calm, tmp_path / "run")
    assert not dist.is_initialized()
    assert goes_on(tmp_path / "run", DENSE, ranks) == pytest.approx(losses(calm), rel=1e-5)


def test_muon_and_weights_on_every_rank_are_the_same_on_other_ranks(tmp_path: Path) -> None:
    """Three ranks that have all of the weights go on where two with a half each were."""
    muon = DENSE | {"train": DENSE["train"] | {"optimizer": "muon"}}
    train(muon, tmp_path / "alone")
    world(2).run(train, muon, tmp_path / "ranks")
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    found = goes_on(tmp_path / "ranks", muon | {"parallel": {"shard": False}}, 3)
    assert found == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("said", [DENSE, SHARED, SPARSE], ids=["dense", "shared", "sparse"])
def test_two_ranks_go_on_where_one_was(said: dict[str, Any], tmp_path: Path) -> None:
    train(said, tmp_path)
    alone = losses(tmp_path)
    if "sparse" in said:  # some steps were, else this says nothing about them
        assert any(line["kind"] == "sparsity" and line["mode"] == "sparse" for line in log(tmp_path))
    assert goes_on(tmp_path, said, 2) == pytest.approx(alone, rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("said", [DENSE, SHARED, SPARSE], ids=["dense", "shared", "sparse"])
def test_ranks_killed_again_and_again_lose_nothing(said: dict[str, Any], tmp_path: Path) -> None:
    """Any rank, at any moment, until the run is through."""
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    world(2).run(train, said, tmp_path / "calm")
    for _ in range(3):
        trouble = Trouble("killed", dice.randrange(2), dice.randint(1, LAST - 1), dice.uniform(0, 0.1))
        with pytest.raises(RankFailure, match="SIGKILL"):
            world(2).run(train, said, tmp_path / "rough", trouble)
        if dice.random() < 0.5 and complete(tmp_path / "rough"):
            cut(complete(tmp_path / "rough")[-1])
    world(2).run(train, said, tmp_path / "rough")
    assert losses(tmp_path / "rough") == losses(tmp_path / "calm"), f"seed {seed}"
    assert weights(tmp_path / "rough") == weights(tmp_path / "calm"), f"seed {seed}"
