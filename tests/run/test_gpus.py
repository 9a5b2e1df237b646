"""What a planner without a topology takes from the names of GPUs and their links; the GPUs are fake."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from weft.cli.workload import Workload, read_topology
from weft.core.topology import Link, Topology
from weft.plan.choose import choose
from weft.run import gpus
from weft.run.call import AttentionCall, schedule_for
from weft.run.kernels import choice
from weft.run.kernels.choice import GpuPlatform, decide
from weft.run.topology import topology_for
from weft.simulate.clusters import cluster
from weft.simulate.gpus import DEVICES, default_backends

H100 = "NVIDIA H100 80GB HBM3"
OLD = "a40"


@dataclass
class Box:
    """Eight GPUs of a name, as torch would show them to one of eight ranks."""

    name: str = H100
    capability: tuple[int, int] = (9, 0)
    count: int = 8
    peers: bool = True
    packages: frozenset[str] = frozenset({"triton"})
    cudnn: int = 92000

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name, answer in {
            "is_available": True,
            "device_count": self.count,
            "current_device": 0,
            "get_device_name": self.name,
            "get_device_capability": self.capability,
            "can_device_access_peer": self.peers,
            "get_device_properties": SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0),
        }.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        patch.setattr(torch.backends.cudnn, "version", lambda: self.cudnn)
        patch.setattr(choice, "installed", lambda: self.packages)
        patch.delenv("WEFT_TOPOLOGY", raising=False)
        for name, value in {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 8}.items():
            patch.setenv(name, str(value))
        patch.setitem(sys.modules, "pynvml", None)
        gpus.device_name.cache_clear()
        choice.arch_of.cache_clear()


@pytest.fixture
def patch(monkeypatch):
    yield monkeypatch
    gpus.device_name.cache_clear()
    choice.arch_of.cache_clear()


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (H100, "h100"),
        ("NVIDIA H100 PCIe", "h100pcie"),
        ("NVIDIA H100 NVL", "h100pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "h200"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100pcie"),
        ("NVIDIA A100 80GB PCIe", "a100pcie"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "b200"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A6000", "a40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("AMD Instinct MI355X", "mi355x"),
    ],
)
def test_names_of_torch_are_rows_of_the_table(patch, caplog, told, expected):
    Box(told).install(patch)
    assert gpus.device_name(0) == expected
    assert not caplog.records
    cluster(f"8x{expected}")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), "a100"),
        ((8, 6), "a40"),
        ((8, 7), "a40"),
        ((9, 0), "h100"),
        ((10, 3), "b200"),
        ((7, 5), "a40"),
    ],
)
def test_unknown_names_take_the_nearest_and_say_so_once(patch, caplog, capability, expected):
    Box("NVIDIA Thing 9000", capability).install(patch)
    with caplog.at_level(logging.WARNING, "weft"):
        assert [gpus.device_name(0), gpus.device_name(0)] == [expected] * 2
    [record] = caplog.records
    assert "NVIDIA Thing 9000" in record.getMessage() and expected in record.getMessage()


def nvml(active: int) -> SimpleNamespace:
    """A driver's library that knows 18 links, the first ones of which are active."""
    error = type("NVMLError", (Exception,), {})

    def state(handle: object, link: int) -> int:
        assert handle == b"00000000:1b:00.0", "found by its place on the bus, not by its index"
        if link >= 12:
            raise error
        return int(link < active)

    return SimpleNamespace(
        NVMLError=error,
        NVML_NVLINK_MAX_LINKS=18,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda place: place,
        nvmlDeviceGetNvLinkState=state,
    )


@pytest.mark.parametrize(("active", "expected"), [(12, "a100"), (0, "a100pcie")])
def test_the_driver_tells_whether_links_are_up(patch, active, expected):
    Box("NVIDIA A100-SXM4-80GB", (8, 0)).install(patch)
    patch.setitem(sys.modules, "pynvml", nvml(active))
    assert gpus.device_name(0) == expected


def test_peers_that_cannot_be_reached_are_behind_pcie(patch):
    Box(peers=False).install(patch)
    assert gpus.device_name(0) == "h100pcie"
    gpus.device_name.cache_clear()
    Box(peers=False, count=1).install(patch)
    assert gpus.device_name(0) == "h100", "one visible GPU has no peer to ask about"


WORKLOADS = {
    "flux": ("flux", "", 0, "dense", 4608),
    "cogvideox": ("cogvideox-5b", "720x480", 49, "dense", 17_776),
    "wan dense": ("wan2.1-14b", "", 0, "dense", 75_600),
    "wan sta": ("wan2.1-14b", "", 0, "sta", 75_600),
}


@pytest.mark.parametrize(
    ("work", "told", "capability", "named"),
    [
        *((work, H100, (9, 0), "8xh100") for work in WORKLOADS),
        ("flux", "NVIDIA H100 PCIe", (9, 0), "8xh100pcie"),
        ("wan sta", "NVIDIA A100-SXM4-80GB", (8, 0), "8xa100"),
        ("wan dense", "NVIDIA B200", (10, 0), "8xb200"),
        ("cogvideox", "NVIDIA L40S", (8, 9), "8xl40s"),
        ("wan dense", "NVIDIA GeForce RTX 4090", (8, 9), "8xrtx4090"),
    ],
)
def test_the_plan_without_a_topology_is_that_of_the_named_cluster(patch, work, told, capability, named):
    """Through `schedule_for`, as `weft.attention` plans, against what `weft plan --topology` does."""
    Box(told, capability).install(patch)
    name, size, frames, mask, tokens = WORKLOADS[work]
    asked = Workload.read(name, size=size, frames=frames, mask=mask, block=64, dtype="bfloat16")
    problem = asked.problem(8)
    assert problem.q.size == tokens
    expected = choose(problem, asked.mask, read_topology(named))
    shape = (1, problem.heads, problem.q.rows(0), problem.head_dim)
    place = torch.device("cuda", 0)
    chosen = None if mask == "dense" else asked.mask
    options = (chosen, "auto", problem.q, problem.kv, 0, 0, "auto", None, None)
    call = AttentionCall(shape, shape, shape, (torch.bfloat16,) * 3, (place,) * 3, *options)
    assert topology_for(None, 8, place) == read_topology(named)
    planned = schedule_for(call, rank=0, ranks=8)
    assert planned.name == expected.schedule.name
    assert planned.ops == expected.schedule.ops


def test_machines_and_parts_of_them(patch):
    Box().install(patch)
    patch.setenv("WORLD_SIZE", "32")
    assert topology_for(None, 32) == cluster("4x8xh100")
    assert topology_for(None, 4) == cluster("4xh100"), "of a part of the ranks nobody knows where they are"


def test_what_was_given_or_calibrated_comes_first(patch, tmp_path):
    Box().install(patch)
    given = Topology(devices=8, flops=1e12)
    assert topology_for(given, 8) == given
    (tmp_path / "here.toml").write_text(given.to_toml())
    patch.setenv("WEFT_TOPOLOGY", str(tmp_path / "here.toml"))
    assert topology_for(None, 8) == given


def test_some_ranks_of_a_calibrated_machine_have_its_usual_links(patch, tmp_path):
    slow = Link(latency=1e-5, bandwidth=1e9)
    box = Topology(devices=8, links=((6, 7, slow),))
    (tmp_path / "here.toml").write_text(box.to_toml())
    patch.setenv("WEFT_TOPOLOGY", str(tmp_path / "here.toml"))
    assert topology_for(None, 8) == box
    assert topology_for(None, 2) == Topology(devices=2)


def test_tensors_on_the_cpu_of_a_machine_with_gpus_are_no_gpus(patch):
    Box().install(patch)
    assert topology_for(None, 8, torch.device("cpu")).name == "not calibrated"


def test_installed_packages_change_the_speeds(patch):
    Box(packages=frozenset({"triton", "fa4"})).install(patch)
    found = topology_for(None, 8)
    assert found.kernel.startswith("fa4, ")
    assert found.flops == cluster("8xh100:fa4").flops > cluster("8xh100").flops
    gpus.device_name.cache_clear()
    Box(cudnn=91000).install(patch)
    assert topology_for(None, 8) == cluster("8xh100:flash,triton"), "this cuDNN is wrong, and not used"


def test_a_named_backend_has_its_own_speed(patch):
    Box().install(patch)
    for backend in ("exact", "flash", "fa4"):
        assert topology_for(None, 8, backend=backend) == cluster(f"8xh100:{backend}")
    assert topology_for(None, 8, backend="reference") == cluster("8xh100"), "nobody knows its speed"


@pytest.mark.parametrize("arch", sorted({device.arch for device in DEVICES.values()}))
def test_the_table_assumes_what_auto_takes(arch):
    """Of `weft.run.kernels.choice`, where torch, its cuDNN and Triton are there and no further package."""
    here = GpuPlatform(arch, frozenset({"triton", "cudnn"}))
    assert tuple(decide(work, here).backend for work in gpus.TYPICAL) == default_backends(arch)
