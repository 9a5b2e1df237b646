"""Checkpoints: what was saved comes back bit for bit, on any ranks, or is said to be lost and not used."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.worlds import world
from weft.core.errors import InputError, WeftError
from weft.run.spawn.pool import RankFailure
from weft.run.spawn.pool_rank import PRELOAD
from weft.train import checkpoints as module
from weft.train.checkpoints import MANIFEST, Checkpoints

PRELOAD.append("torch.distributed.checkpoint")  # seconds, otherwise in each rank


class Training:
    """Something that learns, sharded if there are ranks; 7 × 5 does not divide by 2 or 3."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
        if dist.is_initialized():
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=0.1, betas=(0.9, 0.95))
        self.count = 0

    def step(self, inputs: int = 6) -> None:
        self.count += 1
        x = torch.randn(inputs, 5, generator=torch.Generator().manual_seed(self.count))
        self.model(x).square().mean().backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def state(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.named_parameters()),
            "optimiser": get_optimizer_state_dict(self.model, self.optimiser),
            "plain": {"count": self.count, "tuple": (1, "a", None), "rates": [0.1, 1 / 3], "none": {}},
            "half": torch.arange(3).to(torch.bfloat16),
        }

    def resume(self, checkpoints: Checkpoints, step: int) -> None:
        state = self.state()
        checkpoints.load(step, state)
        set_optimizer_state_dict(self.model, self.optimiser, state["optimiser"])
        self.count = state["plain"]["count"]


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """By name; tensors whole, as lists of their bits."""
    if isinstance(state, dict):
        return {key: x for k, v in state.items() for key, x in flat(v, f"{name}.{k}").items()}
    if isinstance(state, Tensor):
        whole = state.full_tensor() if isinstance(state, DTensor) else state
        return {name: (str(whole.dtype), whole.detach().reshape(-1).view(torch.uint8).tolist())}
    return {name: state}


def save_and_go_on(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is saved after step 3, and what a fresh one has that loads it; their steps 4 are equal too."""
    training, checkpoints = Training(), Checkpoints(folder)
    for _ in range(3):
        training.step()
    saved = flat(training.state())
    checkpoints.save(3, training.state())
    training.step()
    after = flat(training.state())
    assert checkpoints.latest() == 3
    again = Training(seed=1)
    again.resume(checkpoints, 3)
    loaded = flat(again.state())
    again.step()
    assert flat(again.state()) == after != saved
    return saved, loaded


def load_here(folder: Path) -> dict[str, Any]:
    training, checkpoints = Training(seed=2), Checkpoints(folder)
    step = checkpoints.latest()
    assert step is not None
    training.resume(checkpoints, step)
    return flat(training.state())


def test_one_process_resumes_bit_for_bit(tmp_path: Path) -> None:
    saved, loaded = save_and_go_on(tmp_path)
    assert saved == loaded


def test_ranks_resume_bit_for_bit_and_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    two = world(2).run(save_and_go_on, tmp_path / "two")
    assert all(saved == loaded == two[0][0] for saved, loaded in two)
    assert load_here(tmp_path / "two") == two[0][0]
    assert world(3).run(load_here, tmp_path / "two") == [two[0][0]] * 3
    save_and_go_on(tmp_path / "one")
    assert world(2).run(load_here, tmp_path / "one") == [load_here(tmp_path / "one")] * 2


def scattered(folder: Path) -> list[list[float]]:
    """Save tensors that are split along other dims, and replicated; load them split otherwise."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = {name: torch.arange(35.0).reshape(5, 7) + at for at, name in enumerate("wxyz")}
    before = [
        (Replicate(), Shard(1)),
        (Shard(0), Shard(1)),
        (Replicate(), Replicate()),
        (Shard(1), Replicate()),
    ]
    after = [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(0), Shard(0))]

    def state(values: float, placements: list[Any]) -> dict[str, Any]:
        named = zip(whole.items(), placements, strict=True)
        return {name: distribute_tensor(x * values, mesh, placed) for (name, x), placed in named}

    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state(1.0, before) | {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 2)})
    checkpoints.finish()
    found = state(0.0, after) | {"scalar": torch.tensor(0.0), "empty": torch.zeros(0, 2)}
    checkpoints.load(1, found)
    return [found[name].full_tensor().flatten().tolist() for name in whole] + [[found["scalar"].item()]]


def test_tensors_are_saved_once_and_come_back_however_they_are_split(tmp_path: Path) -> None:
    expected = [[float(n + at) for n in range(35)] for at in range(4)] + [[3.0]]
    assert world(4).run(scattered, tmp_path) == [expected] * 4
    files = list(tmp_path.rglob("*.safetensors"))
    stored = [safe_open(file, "pt") for file in files]
    sizes = [each.get_tensor(name).numel() for each in stored for name in each.keys()]  # noqa: SIM118
    assert len(files) == 4 and sum(sizes) == 4 * 35 + 1


class Gate:
    """Holds back the writing of files until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.open = threading.Event(), threading.Event()
        write = module.write

        def late(*args: Any, **options: Any) -> Any:
            self.arrived.set()
            assert self.open.wait(30)
            return write(*args, **options)

        monkeypatch.setattr(module, "write", late)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.iterdir())


def test_training_goes_on_while_a_copy_is_written_and_the_old_ones_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": torch.arange(5.0), "list": [1]}
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (10, 20):
        checkpoints.save(step, state)
    checkpoints.finish()
    gate = Gate(monkeypatch)
    checkpoints.save(30, state)  # a save that waits for its files would not return
    state["x"] += 1
    state["list"].append(2)
    assert gate.arrived.wait(30)
    assert steps(tmp_path) == [10, 20]
    gate.open.set()
    assert checkpoints.latest() == 30
    assert steps(tmp_path) == [20, 30]
    checkpoints.load(30, state)
    assert state["x"].tolist() == [0, 1, 2, 3, 4]
    assert state["list"] == [1]


def cut(path: Path) -> None:
    os.truncate(path / "rank-00000.safetensors", (path / "rank-00000.safetensors").stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray((path / "rank-00000.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "rank-00000.safetensors").write_bytes(data)


def lose(path: Path) -> None:
    (path / "values.json").unlink()


def unfinish(path: Path) -> None:
    (path / MANIFEST).unlink()


def tear(path: Path) -> None:
    os.truncate(path / MANIFEST, 20)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut, "bytes of"),
        (flip, "rank-00000.safetensors is not what was written"),
        (lose, "values.json is missing"),
        (unfinish, "it is unfinished"),
        (tear, "cannot be read"),
    ],
)
def test_what_is_damaged_is_passed_over_by_name_and_made_again(
    harm: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    state, told = {"x": torch.arange(7.0)}, []
    before = Checkpoints(tmp_path, keep=2)
    before.save(10, state)
    before.save(20, state)
    before.finish()
    harm(tmp_path / "step-00000020")
    checkpoints = Checkpoints(tmp_path, keep=2, notify=told.append)
    assert checkpoints.latest() == 10
    assert len(told) == 1 and "step-00000020" in told[0] and said in told[0]
    checkpoints.save(15, state)  # the damaged one counts for nothing
    checkpoints.finish()
    assert steps(tmp_path) == [10, 15]
    checkpoints.save(20, state)
    assert checkpoints.latest() == 20
    assert steps(tmp_path) == [15, 20]


def test_a_damaged_one_gives_way_to_the_same_step_and_a_good_one_does_not(tmp_path: Path) -> None:
    state = {"x": torch.arange(7.0)}
    for harm in (cut, unfinish):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.latest()
        checkpoints.save(20, state)
        assert checkpoints.latest() == 20
        with pytest.raises(InputError, match="step-00000020 exists already"):
            checkpoints.save(20, state)
        harm(tmp_path / "step-00000020")


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": torch.zeros(2), "a": {"b": 1, "c": 2}})
    for state, said in (
        ({"x": torch.zeros(2), "a": {"b": 1}}, r"this run has no a\.c, which .*step-\d+ has"),
        ({"x": torch.zeros(2), "a": {"b": 1, "c": 2, "d": 3}}, r"a\.d"),
        ({"x": torch.zeros(3), "a": {"b": 1, "c": 2}}, "x"),
    ):
        with pytest.raises(WeftError, match=said):
            checkpoints.load(1, state)
    with pytest.raises(InputError, match=r"no checkpoint of step 2\. It has 1\."):
        checkpoints.load(2, {})
    with pytest.raises(InputError, match=r"must be strings"):
        checkpoints.save(2, {"layers": {0: 1}})
    assert checkpoints.latest() == 1


@contextmanager
def largest_file(size: int):
    """As a disk that is full: the kernel refuses to write on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_the_disk_of(rank: int, folder: Path) -> tuple[str, list[int], int | None]:
    """What every rank is told if one has no room, and what is left."""
    checkpoints, training = Checkpoints(folder), Training()
    training.step()
    checkpoints.save(1, training.state())
    checkpoints.finish()
    with largest_file(1000 if dist.get_rank() == rank else 1 << 40):
        checkpoints.save(2, training.state())
        with pytest.raises(WeftError) as caught:
            checkpoints.finish()
    left, after = steps(folder), checkpoints.latest()
    checkpoints.save(3, training.state())
    assert checkpoints.latest() == 3
    return str(caught.value), left, after


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_is_told_to_all_and_loses_nothing(rank: int, tmp_path: Path) -> None:
    told = world(2).run(fill_the_disk_of, rank, tmp_path)
    assert told == [told[0]] * 2
    said, left, after = told[0]
    assert left == [1] and after == 1 and steps(tmp_path) == [1, 3]
    assert f"step-00000002 was not written. Rank {rank}: " in said
    assert "It needs about" in said and "are free. The checkpoint of step 1 is untouched." in said


def fail_on(rank: int, folder: Path) -> None:
    training, me = Training(), dist.get_rank()
    Checkpoints(folder).save(1, training.state() | ({"wrong": {3: 4}} if me == rank else {}))


def test_a_state_that_one_rank_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        world(2).run(fail_on, 1, tmp_path)
    assert {each.kind for each in caught.value.failures.values()} == {"InputError"}
    assert len(caught.value.failures) == 2


def leave_while_others_save(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(1, {"x": torch.zeros(3)})
    checkpoints.finish()


def test_a_rank_that_is_lost_is_missed_and_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        world(2).run(leave_while_others_save, tmp_path)
    assert {rank: each.kind for rank, each in caught.value.failures.items()} == {0: "CommError", 1: "killed"}
    assert "Rank 0 lost another rank" in caught.value.failures[0].message
