"""What a report says of the machine, by a GPU that is made up here."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from weft.doctor import check_machine
from weft.doctor.suite import CheckContext


def ctx(device: str) -> CheckContext:
    options = {"rank": 0, "ranks": 1, "machines": 1, "dtype": "float32", "deadline": time.monotonic()}
    return CheckContext(device=torch.device(device), **options)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a != b)
    monkeypatch.setattr("weft.run.gpus._nvlinks", lambda _: 18)
    monkeypatch.setattr("weft.run.kernels.choice.arch_of", lambda _: "sm_90")


def test_gpu_of_each_rank_is_told(gpus: None) -> None:
    [check] = check_machine.checks(ctx("cuda:3"))
    told = check_machine.machine_of([check.data, {**check.data, "gpu": None}], device="cuda", machines=2)
    gpu = {
        "name": "NVIDIA H100 80GB HBM3", "memory_gib": 80.0, "arch": "sm_90",
        "links": "18 NVLinks, reaches 7 peers",
    }  # fmt: skip
    assert told["gpus"] == [gpu]
    assert (told["machines"], told["ranks"], told["device"]) == (2, 2, "cuda")
    assert set(told) == {
        "machines", "ranks", "device", "gpus", "python", "torch", "cuda", "nccl", "cudnn", "driver", "triton",
        "packages",
    }  # fmt: skip


def test_fact_that_a_driver_refuses_costs_itself_only(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise RuntimeError("at /home/somebody")

    monkeypatch.setattr(check_machine, "_driver", refuse)
    [check] = check_machine.checks(ctx("cuda:0"))
    assert check.data["driver"] == "unknown: RuntimeError" and check.data["torch"] == torch.__version__


def test_rehearsal_has_no_gpu() -> None:
    [check] = check_machine.checks(ctx("cpu"))
    assert (
        check.data["gpu"] is None
        and check_machine.machine_of([check.data], device="cpu", machines=1)["gpus"] == []
    )


def test_no_rank_answered() -> None:
    assert check_machine.machine_of([], device="cuda", machines=1)["gpus"] == []
