"""Devices: the GPU of each rank. Threads are ranks, and torch.cuda is a stand-in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from tests.adversary import AdversaryComm, run_adversary
from weft.core.errors import InputError, WeftError
from weft.run import devices
from weft.run.devices import check_devices
from weft.run.world import World

Rank = dict[str, Any]
"""What a rank sees: `env`, `gpus` (UUIDs of its visible GPUs), `host`, `current`."""


class Machines(threading.local):
    """The stand-in of the environment, the host's name and torch.cuda, for each thread its own."""

    def __init__(self) -> None:
        self.environ: dict[str, str] = {}
        self.gpus: list[str] = []
        self.host, self.current = "a", 0

    def enter(self, rank: Rank) -> None:
        self.environ, self.gpus = rank.get("env", {}), rank.get("gpus", [])
        self.host, self.current = rank.get("host", "a"), rank.get("current", 0)

    def set_device(self, index: int | torch.device) -> None:
        chosen = index if isinstance(index, int) else index.index
        assert 0 <= chosen < len(self.gpus), "invalid device ordinal"
        self.current = chosen


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    own = Machines()
    monkeypatch.setattr(devices, "os", own)
    monkeypatch.setattr(devices, "socket", SimpleNamespace(gethostname=lambda: own.host))
    stand_ins: dict[str, Callable[..., Any]] = {
        "is_available": lambda: bool(own.gpus),
        "device_count": lambda: len(own.gpus),
        "current_device": lambda: own.current,
        "set_device": own.set_device,
        "get_device_properties": lambda index: SimpleNamespace(uuid=own.gpus[index]),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return own


def torchrun(ranks: int, gpus: int, **more: Any) -> list[Rank]:
    """The ranks of one host that all see all of its GPUs."""
    return [
        {
            "env": {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
            "gpus": [f"GPU-{more.get('host', 'a')}{i}" for i in range(gpus)],
            **more,
        }
        for rank in range(ranks)
    ]


def device_of(machines: Machines, rank: Rank) -> str:
    machines.enter(rank)
    found = weft.device()
    if found.type == "cuda":
        assert machines.current == found.index
    return str(found)


def test_without_a_gpu_the_device_is_the_cpu(machines: Machines) -> None:
    assert device_of(machines, {"env": {"LOCAL_RANK": "3"}}) == "cpu"


def test_torchrun_gives_each_local_rank_its_gpu(machines: Machines) -> None:
    assert [device_of(machines, rank) for rank in torchrun(4, 8)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_slurm_gives_each_task_its_gpu(machines: Machines) -> None:
    tasks = [{"env": {"SLURM_LOCALID": str(i)}, "gpus": ["GPU-0", "GPU-1"]} for i in range(2)]
    assert [device_of(machines, task) for task in tasks] == ["cuda:0", "cuda:1"]
    one_each = [{"env": {"SLURM_LOCALID": str(i)}, "gpus": [f"GPU-{i}"]} for i in range(2)]
    assert [device_of(machines, task) for task in one_each] == ["cuda:0", "cuda:0"]


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_one_visible_gpu_for_each_rank_is_index_0(machines: Machines, name: str) -> None:
    env = {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8", name: "5"}
    assert device_of(machines, {"env": env, "gpus": ["GPU-5"]}) == "cuda:0"


def test_a_process_without_a_launcher_keeps_its_current_gpu(machines: Machines) -> None:
    assert device_of(machines, {"gpus": ["GPU-0", "GPU-1"], "current": 1}) == "cuda:1"


@pytest.mark.parametrize(("ranks", "gpus"), [(4, 2), (2, 1)])
def test_more_ranks_than_gpus_are_refused_on_all_of_them(machines: Machines, ranks: int, gpus: int) -> None:
    for rank in torchrun(ranks, gpus):
        machines.enter(rank)
        with pytest.raises(
            InputError, match=rf"a has {ranks} ranks and {gpus} visible GPU.*--nproc-per-node {gpus}"
        ):
            weft.device()


def compare(machines: Machines, ranks: list[Rank], where: list[str] | None = None) -> list[Any]:
    """Let all ranks compare `where`, or their weft.device(). Return what each of them raised."""

    def job(comm: AdversaryComm) -> str:
        machines.enter(ranks[comm.rank])
        device = torch.device(where[comm.rank]) if where else weft.device()
        try:
            for _ in range(2):  # the second time nothing is asked
                check_devices(comm, device)
        except InputError as error:
            return str(error)
        assert comm._gathered == 2, "once, and not again"
        assert device.type == "cpu" or machines.current == device.index
        return ""

    return run_adversary(len(ranks), job)


def test_a_gpu_for_each_rank_passes(machines: Machines) -> None:
    assert compare(machines, torchrun(4, 4)) == [""] * 4
    assert compare(machines, torchrun(2, 2, host="a") + torchrun(2, 2, host="b")) == [""] * 4
    one_each = [{"env": {"SLURM_LOCALID": str(i)}, "gpus": [f"GPU-{i}"], "host": "a"} for i in range(3)]
    assert compare(machines, one_each) == [""] * 3


def test_a_gpu_that_the_user_has_made_current_passes_and_stays(machines: Machines) -> None:
    ranks = [{**rank, "current": 1 - i} for i, rank in enumerate(torchrun(2, 2))]
    assert compare(machines, ranks, ["cuda:1", "cuda:0"]) == ["", ""]


def test_the_gpu_of_the_tensors_becomes_the_current_one(machines: Machines) -> None:
    assert compare(machines, torchrun(3, 3), ["cuda:0", "cuda:1", "cuda:2"]) == [""] * 3


def test_two_ranks_on_one_gpu_are_named_on_all_ranks(machines: Machines) -> None:
    """As after .to("cuda") without set_device."""
    told = compare(machines, torchrun(3, 3), ["cuda:0", "cuda:0", "cuda:2"])
    assert len(set(told)) == 1
    assert told[0].startswith("Ranks 0 and 1 are both on GPU 0 of host a.")
    assert "weft.device()" in told[0]
    hosts = torchrun(2, 2, host="a") + torchrun(3, 3, host="b")
    told = compare(machines, hosts, ["cuda:0", "cuda:1", "cuda:0", "cuda:0", "cuda:0"])
    assert len(set(told)) == 1
    assert told[0].startswith("Ranks 2, 3 and 4 are all on GPU 0 of host b.")


def test_one_visible_gpu_that_is_the_same_for_all_is_seen_by_its_uuid(machines: Machines) -> None:
    """As with CUDA_VISIBLE_DEVICES=7 torchrun --nproc-per-node 2."""
    ranks = [{**rank, "env": {**rank["env"], "CUDA_VISIBLE_DEVICES": "7"}} for rank in torchrun(2, 1)]
    told = compare(machines, ranks)
    assert told[0] == told[1]
    assert told[0].startswith("Ranks 0 and 1 are both on GPU 0 of host a.")


def test_a_gpu_of_another_rank_is_refused_on_all_ranks(machines: Machines) -> None:
    told = compare(machines, torchrun(2, 4), ["cuda:0", "cuda:3"])
    assert told[0] == told[1]
    assert told[0].startswith("Rank 1: its tensors are on cuda:3, but its GPU is cuda:1.")


def test_gpus_and_cpus_at_once_are_refused(machines: Machines) -> None:
    told = compare(machines, torchrun(3, 3), ["cuda:0", "cuda:1", "cpu"])
    assert told == ["Rank 0 is on cuda:0, rank 2 on cpu. All ranks compute on GPUs, or all on CPUs: "
                    ".to(weft.device()) on each of them."] * 3  # fmt: skip


def test_ranks_on_the_cpu_may_share_it(machines: Machines) -> None:
    assert compare(machines, [{"env": {"LOCAL_RANK": str(i)}} for i in range(3)]) == [""] * 3


def test_attention_refuses_a_shared_gpu_before_anything_moves(
    machines: Machines,
) -> None:
    def job(comm: AdversaryComm) -> str:
        machines.enter(ranks[comm.rank])
        with FakeTensorMode():
            q = torch.empty(1, 2, 8, 16, device="cuda:0", dtype=torch.bfloat16)
        try:
            weft.attention(q, q, q, tokens=16, plan="ring", mesh=World(comm), backend="exact")
        except InputError as error:
            assert comm.bytes_sent == 0
            return str(error)
        return ""

    ranks = torchrun(2, 2)
    told = run_adversary(2, job)
    assert [text[:38] for text in told] == ["Ranks 0 and 1 are both on GPU 0 of hos"] * 2


def test_attention_on_a_gpu_and_on_a_cpu_is_refused_on_both(machines: Machines) -> None:
    def job(comm: AdversaryComm) -> str:
        machines.enter(ranks[comm.rank])
        with FakeTensorMode():
            q = torch.empty(1, 2, 8, 16, device="cpu" if comm.rank else "cuda:0")
        with pytest.raises(WeftError) as refused:
            weft.attention(q, q, q, tokens=16, plan="ring", mesh=World(comm), backend="exact")
        return str(refused.value)

    ranks = torchrun(2, 2)
    on_gpu, on_cpu = run_adversary(2, job)
    assert on_gpu.startswith("Rank 0 is on cuda:0, rank 1 on cpu.")
    assert "rank 1 has device cpu" in on_cpu


@pytest.mark.parametrize(("gpus", "dtype"), [([], "float32"), (["GPU-0"], "bfloat16")])
def test_models_load_in_bfloat16_on_gpus_only(machines: Machines, gpus: list[str], dtype: str) -> None:
    machines.enter({"gpus": gpus})
    assert devices.default_dtype() == dtype
