"""GPUs of this machine: what a planner takes for a topology where none was given or calibrated.

It is the row of `simulate.gpus` that the name of a rank's device and its links lead to. Each rank asks its
own device and no other rank, so ranks with different GPUs need a topology that they share (WEFT_TOPOLOGY).
Nothing here has run on a GPU.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from weft.core.topology import Link, Topology
from weft.run import world
from weft.run.kernels.choice import decide
from weft.run.kernels.machine import arch_of, machine_of
from weft.run.kernels.rules import Work
from weft.simulate.clusters import cluster
from weft.simulate.gpus import DEVICES, PCIE_5, default_backends, known_backends

_log = logging.getLogger("weft")

# As torch.cuda.get_device_name writes them: "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3",
# "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X".
NAMES = (
    (r"\bG?B[23]00\b", "b200"),
    (r"\bG?H200\b", "h200"),
    (r"\bG?H100\b", "h100"),
    (r"\bH800\b", "h800"),
    (r"\bH20\b", "h20"),
    (r"\bA100\b", "a100"),
    (r"\bA800\b", "a800"),
    (r"\bA40\b|\bA6000\b", "a40"),
    (r"\bL40S?\b", "l40s"),
    (r"\bRTX 4090\b", "rtx4090"),
    (r"\bRTX 5090\b", "rtx5090"),
    (r"\bRTX PRO 6000\b", "rtxpro6000"),
    (r"\bMI3[02][05]X\b", "mi300x"),
    (r"\bMI35[05]X\b", "mi355x"),
)
NEAREST = {
    "sm_80": "a100", "sm_86": "a40", "sm_89": "l40s", "sm_90": "h100", "sm_100": "b200",
    "sm_120": "rtxpro6000", "gfx942": "mi300x", "gfx950": "mi355x",
}  # fmt: skip
"""For names that are not in the table: a device of the same architecture."""
OLDEST = "a40"
WITHOUT_NVLINK = re.compile(r"PCIe|\bNVL\b", re.IGNORECASE)
"""Cards whose bridges, if any, join pairs of them and not all."""
TYPICAL = [Work(sparse, backward=False, head_dim=128, block_q=64, block_k=64) for sparse in (False, True)]
"""What the planner's kernels are chosen for; what a call gets may differ with its head dim and blocks."""


# Until `weft calibrate` says better: shared memory inside a machine, 10 Gbit/s between machines.
SOMEWHERE = Topology(
    name="not calibrated",
    intra=Link(latency=3e-5, bandwidth=1e10),
    inter=Link(latency=1e-4, bandwidth=1.25e9),
    nic_bandwidth=1.25e9,
)


def topology_for(
    given: Topology | None, ranks: int, device: torch.device | None = None, backend: str = "auto"
) -> Topology:
    """Return what the caller says, else what was calibrated here, else the table's entry for this GPU.

    It must be the same on all ranks, or they will not agree. `device` is that of the tensors, where known.
    """
    if given is not None:
        return given
    if path := os.environ.get("WEFT_TOPOLOGY"):
        found = Topology.from_toml(path)
        if found.machines > 1 or found.devices == ranks:
            return found
        return replace(found, devices=ranks, links=())  # some of the ranks, and nobody says which
    # A group of some of the ranks may lie anywhere: only of all of them is it known.
    whole = ranks == world.place()[1] and ranks % world.machines() == 0
    several = world.machines() if whole else 1
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        return topology_here(several, ranks // several, device, backend)
    return replace(SOMEWHERE, machines=several, devices=ranks // several)


def topology_here(
    machines: int, devices: int, device: torch.device | None = None, backend: str = "auto"
) -> Topology:
    """Return the cluster of so many GPUs such as `device`, or the current one, with its kernels."""
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    name = device_name(index)
    machine = machine_of(torch.device("cuda", index))
    chosen = [decide(work, machine).backend for work in TYPICAL]
    if chosen[0] == "flash" and machine.activated:
        chosen[0] = "fa4"  # the user has told torch to call FA3 or FA4 by that name
    if backend in known_backends(name):
        chosen = [backend]
    usual = tuple(chosen) == default_backends(DEVICES[name.removesuffix("pcie")].arch)
    kernels = "" if usual else f":{','.join(chosen)}"
    return cluster(f"{machines}x" * (machines > 1) + f"{devices}x{name}{kernels}")


@cache
def device_name(index: int) -> str:
    """Return the name that `simulate.gpus` has for a GPU: h100, a100pcie."""
    told = torch.cuda.get_device_name(index)
    name = next((name for pattern, name in NAMES if re.search(pattern, told)), "")
    if not name:
        arch = arch_of(torch.device("cuda", index))
        name = NEAREST.get(arch, OLDEST)
        _log.warning(
            "%s (%s) is not in weft's table of GPUs: plans assume the speeds of %s. `weft calibrate` "
            "measures this machine's.", told, arch, name
        )  # fmt: skip
    return name if has_fast_links(told, name, index) else f"{name}pcie"


def has_fast_links(told: str, name: str, index: int) -> bool:
    """Whether a device reaches its peers by the links of the table (NVLink, xGMI), or by PCIe only."""
    if DEVICES[name].scale_up <= PCIE_5:
        return True  # PCIe is what the table says
    if WITHOUT_NVLINK.search(told) or _nvlinks(index) == 0:
        return False
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    return not others or torch.cuda.can_device_access_peer(index, others[0])


def _nvlinks(index: int) -> int | None:
    """Count the active NVLinks of a GPU; None where the driver's library is not there to ask."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        own = torch.cuda.get_device_properties(index)
        handle = nvml.nvmlDeviceGetHandleByPciBusId(
            f"{own.pci_domain_id:08x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0".encode()
        )
        return sum(_is_active(nvml, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    except (nvml.NVMLError, AttributeError):
        return None


def _is_active(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:  # this GPU has fewer links than there can be
        return False
