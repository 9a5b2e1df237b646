"""Derive a topology from the GPUs of this machine, for planning without a calibrated topology.

The name of a rank's device and its links select a row of `simulate.gpus`. Each rank looks at its own device
only, so ranks with different GPUs need a shared topology (WEFT_TOPOLOGY). Nothing here has run on a GPU.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from weft.core.topology import Topology
from weft.run.kernels.choice import arch_of, decide, platform_of
from weft.run.kernels.rules import KernelSpec
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
"""A device of the same architecture, for names that are not in the table."""
OLDEST = "a40"
WITHOUT_NVLINK = re.compile(r"PCIe|\bNVL\b", re.IGNORECASE)
"""Cards whose bridges, if any, join only pairs of them."""
TYPICAL = [
    KernelSpec(sparse, backward=False, head_dim=128, block_q=64, block_k=64) for sparse in (False, True)
]
"""Specs for which the planner's kernels are chosen; those of a call depend on its head dim and blocks."""


def topology_here(
    machines: int, devices: int, device: torch.device | None = None, backend: str = "auto"
) -> Topology:
    """Return the cluster of so many GPUs of the kind of `device` (by default the current one)."""
    index = torch.cuda.current_device() if device is None or device.index is None else device.index  # pyright: ignore[reportUnnecessaryComparison]
    name = device_name(index)
    platform = platform_of(torch.device("cuda", index))
    chosen = [decide(spec, platform).backend for spec in TYPICAL]
    if chosen[0] == "flash" and platform.activated:
        chosen[0] = "fa4"  # torch calls the activated FA3 or FA4 by that name
    if backend in known_backends(name):
        chosen = [backend]
    usual = tuple(chosen) == default_backends(DEVICES[name.removesuffix("pcie")].arch)
    kernels = "" if usual else f":{','.join(chosen)}"
    return cluster(f"{machines}x" * (machines > 1) + f"{devices}x{name}{kernels}")


@cache
def device_name(index: int) -> str:
    """Return the name of a GPU in `simulate.gpus`: h100, a100pcie."""
    torch_name = torch.cuda.get_device_name(index)
    name = next((name for pattern, name in NAMES if re.search(pattern, torch_name)), "")
    if not name:
        arch = arch_of(torch.device("cuda", index))
        name = NEAREST.get(arch, OLDEST)
        _log.warning(
            "%s (%s) is not in weft's table of GPUs: plans assume the speeds of %s. `weft calibrate` "
            "measures this machine's.", torch_name, arch, name
        )  # fmt: skip
    return name if has_fast_links(torch_name, name, index) else f"{name}pcie"


def has_fast_links(torch_name: str, name: str, index: int) -> bool:
    """Whether a device reaches its peers by the links of the table (NVLink, xGMI), not by PCIe only."""
    if DEVICES[name].scale_up <= PCIE_5:
        return True  # the table has PCIe
    if WITHOUT_NVLINK.search(torch_name) or _nvlinks(index) == 0:
        return False
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    return not others or torch.cuda.can_device_access_peer(index, others[0])


def _nvlinks(index: int) -> int | None:
    """Return the number of active NVLinks of a GPU; None without the driver's library."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        pci = attrgetter("pci_domain_id", "pci_bus_id", "pci_device_id")
        address = "{:08x}:{:02x}:{:02x}.0".format(*pci(torch.cuda.get_device_properties(index)))  # pyright: ignore
        handle = nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
        return sum(_is_active(nvml, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    except (nvml.NVMLError, AttributeError):
        return None


def _is_active(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:  # this GPU has fewer links than there can be
        return False
