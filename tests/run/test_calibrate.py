"""Calibration: all ranks take the same steps and agree on one Topology, which the planner reads back."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.run.hot_path import fake_cuda
from tests.worlds import world
from weft.core.topology import Host, Link, Topology
from weft.run.comm import Comm, shm
from weft.run.comm.group import GroupComm
from weft.run.comm.onesided import OneSidedComm
from weft.run.measure import calibrate as module
from weft.run.measure import links
from weft.run.measure.calibrate import Calibration, calibrate
from weft.run.world import World

CPU = torch.device("cpu")


def test_two_ranks_measure_one_topology(tmp_path: Path) -> None:
    first, second = world(2).run(partial(calibrate, quick=True))
    assert first == second
    assert first.ranks == 2
    assert first.cores >= 1
    assert not first.two_sided
    assert first.intra.bandwidth == links.IN_PLACE_BANDWIDTH  # nothing moves in shared memory
    assert 0 < first.intra.latency < 1
    path = tmp_path / "here.toml"
    path.write_text(first.to_toml())
    assert Topology.from_toml(path) == first


def meetings(machines: int, transport: str, on_gpu: bool) -> tuple[list[str], list[str], Topology]:  # noqa: FBT001
    """On a rank: the steps, whatever all ranks must do together, in order, and what it led to.

    on_gpu   take the steps of GPUs; shared memory of the host stands in for the symmetric one.
    """
    seen: list[str] = []

    def noted(name: str, real: Any) -> Any:
        return lambda *args, **kwargs: seen.append(name) or real(*args, **kwargs)

    def post(*args: Any, real: Any = GroupComm.post) -> Any:
        assert "warm_up" in seen, "two ranks speak before NCCL has connected all"
        return real(*args)

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"WEFT_TRANSPORT": transport}))
        stack.enter_context(patch("weft.run.world._worlds", {}))
        stack.enter_context(patch.object(GroupComm, "post", post))
        for place, name in (
            (GroupComm, "warm_up"), (GroupComm, "all_gather_ints"), (OneSidedComm, "begin"),
            (links, "all_gather_json"), (module, "all_gather_json"),
        ):  # fmt: skip
            stack.enter_context(patch.object(place, name, noted(name, getattr(place, name))))
        calibration = Calibration(CPU, 16, "float32", "auto", machines, quick=True)
        if on_gpu:
            calibration.cores = 0
            stack.enter_context(
                patch("weft.run.comm.symmetric.rendezvous", lambda _, base: shm.rendezvous(base))
            )
        steps = calibration.steps()
        for name, step in steps.items():
            seen.append(name)
            numbers = step()
            assert numbers and all(number >= 0 for number in numbers.values()), (name, numbers)
        return list(steps), seen, calibration.topology()


@pytest.mark.parametrize("transport", ["auto", "group"])
@pytest.mark.parametrize(("ranks", "machines"), [(3, 1), (4, 2)])
def test_all_ranks_meet_in_the_same_order(ranks: int, machines: int, transport: str) -> None:
    (steps, seen, topology), *others = world(ranks).run(meetings, machines, transport, False)  # noqa: FBT003
    assert all(each == (steps, seen, topology) for each in others)
    assert "all_gather_ints" in seen
    assert ("begin" in seen) == (transport == "auto")
    devices = ranks // machines
    names = ["0→1"] if devices == 2 else ["0→1", "0→2", "1→2"]
    names += ["all-to-all"] + (["0→2", "network card"] if machines == 2 else [])
    assert steps == [*names, "post", "ring", "dense", "sparse", "copy"]
    assert (topology.machines, topology.devices) == (machines, devices)
    assert topology.two_sided == (transport == "group" or machines == 2)
    assert (topology.nic_bandwidth > 0) == (machines == 2)
    assert topology.flops > 1e8 and topology.backward_flops > 1e8


def test_all_ranks_meet_in_the_same_order_on_gpus() -> None:
    (steps, seen, topology), *others = world(3).run(meetings, 1, "group", True)  # noqa: FBT003
    assert all(each == (steps, seen, topology) for each in others)
    assert steps[4:] == ["dense", "sparse", "copy", "host", "symmetric"]
    assert topology.transport in ("group", "symmetric")
    assert topology.host.attend > 0 and topology.host.collective > 0
    assert topology.host.post + topology.host.message > 0


def test_a_gpu_is_measured_by_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors: nothing is computed, but kernels, dtypes and devices are those of a GPU."""
    monkeypatch.delenv("WEFT_TOPOLOGY", raising=False)
    with fake_cuda() as seen:
        calibration = Calibration(torch.device("cuda", 0), 0, "bfloat16", "auto", 1, quick=True)
        steps = calibration.steps()
        assert list(steps) == ["dense", "sparse", "copy", "host"]
        numbers = {name: step() for name, step in steps.items()}
        topology = calibration.topology()
    assert set(numbers["dense"]) == {"tflops", "backward_tflops"}
    assert any(name.startswith("triton::") for name in seen.names)
    assert topology.kernel == "cudnn, measured" or topology.kernel == "flash, measured"
    assert topology.sparse_kernel == "triton, measured"
    assert topology.cores == 0 and topology.row_seconds == topology.tile_seconds == 0
    assert topology.host != Host() and topology.host.call >= 0
    assert topology.comm_slowdown > 0  # what is not measured is the table's


def test_what_is_not_measured_is_the_tables() -> None:
    with fake_cuda(), patch.object(module.world, "world_of", lambda *_: World(module.world.LocalComm())):
        calibration = Calibration(torch.device("cuda", 0), 0, "bfloat16", "auto", 1, quick=True)
        assert calibration.topology().flops == calibration.base.flops
        assert calibration.topology().host == calibration.base.host


def test_a_step_that_is_taken_again_keeps_the_better_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = Calibration(CPU, 16, "float32", "auto", 1, quick=True)
    for seconds in (3.0, 2.0, 4.0):
        monkeypatch.setattr(calibration.speeds, "dense_times", lambda seconds=seconds: {
            "call": seconds, "dense": seconds, "dense backward": seconds
        })  # fmt: skip
        calibration.steps()["dense"]()
    assert calibration.times["dense"] == 2.0
    assert [calibration._rate("nic_bandwidth", rate)["gbytes_per_s"] for rate in (2e9, 1e9)] == [2, 2]


def one_sided(has_memory: bool) -> tuple[dict[str, float], Topology]:  # noqa: FBT001 - a Pool passes no names
    """On a rank: shared memory of the host stands in for that of GPUs."""
    calibration = Calibration(CPU, 16, "float32", "auto", 1, quick=True)
    calibration.steps()["all-to-all"]()

    def meet(_: Any, base: Comm) -> Any:
        return shm.rendezvous(base) if has_memory else (None, "no GPU")

    with patch("weft.run.comm.symmetric.rendezvous", meet):
        return calibration._symmetric(), calibration.topology()


def test_symmetric_memory_is_measured_where_all_ranks_have_it() -> None:
    (numbers, topology), (_, same) = world(2).run(one_sided, True)  # noqa: FBT003
    assert set(numbers) == {"gbytes_per_s", "microseconds"}
    assert topology == same and topology.transport in ("group", "symmetric")
    (numbers, topology), _ = world(2).run(one_sided, False)  # noqa: FBT003
    assert numbers == {} and topology.transport == ""


@pytest.mark.parametrize(("rate", "transport"), [(1e9, "group"), (3e9, "symmetric")])
def test_the_faster_transport_is_chosen_with_its_links(rate: float, transport: str) -> None:
    calibration = Calibration(CPU, 16, "float32", "auto", 1, quick=True)
    calibration.rates["all-to-all"] = 2e9
    calibration.one_sided = Link(latency=1e-6, bandwidth=0.5e9), rate
    found = calibration.topology()
    assert found.transport == transport
    assert (found.intra == Link(latency=1e-6, bandwidth=3e9)) == (transport == "symmetric")
