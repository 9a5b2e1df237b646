"""Choose the topology to plan for: of the caller, else calibrated, else by the name of the GPU."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from weft.core.topology import Link, Topology
from weft.run.world import machines, place

# Until `weft calibrate` measures them: shared memory inside a machine, 10 Gbit/s between machines.
UNCALIBRATED = Topology(
    name="not calibrated",
    intra=Link(latency=3e-5, bandwidth=1e10),
    inter=Link(latency=1e-4, bandwidth=1.25e9),
    nic_bandwidth=1.25e9,
)


def topology_for(
    topology: Topology | None, ranks: int, device: torch.device | None = None, backend: str = "auto"
) -> Topology:
    """Return the caller's topology, else the calibrated one, else the table's entry for this GPU.

    It must be the same on all ranks, or they will not agree. `device` is that of the tensors, where known.
    """
    if topology is not None:
        return topology
    if path := os.environ.get("WEFT_TOPOLOGY"):
        calibrated = Topology.from_toml(path)
        if calibrated.machines > 1 or calibrated.devices == ranks:
            return calibrated
        return replace(
            calibrated, devices=ranks, links=()
        )  # a subset of the ranks, of which the links are unknown
    # The ranks of a smaller group may lie on any machines.
    several = machines() if ranks == place()[1] and ranks % machines() == 0 else 1
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        from weft.run.gpus import topology_here

        return topology_here(several, ranks // several, device, backend)
    return replace(UNCALIBRATED, machines=several, devices=ranks // several)
