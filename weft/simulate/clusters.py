"""Clusters by name: `8xh100` is one machine of 8, `4x8xh100` four of them, `8xh100:fa4` one with that kernel.

Devices and kernels are those of `gpus`. Inside a machine a device has its links to itself; between machines
the devices of one share its network. Messages are NCCL's: both ends must be posted, and while they run the
device computes more slowly. Bandwidths were measured by github.com/stas00/ml-engineering.
"""

from __future__ import annotations

import re

from weft.core.errors import InputError
from weft.core.topology import Link, Topology
from weft.simulate.gpus import DEVICES, GPU_HOST, Device, device_of, is_device, kernels_of

PAIRWISE_EFFICIENCY = 0.88  # of the specification: NVLink pairwise on H200
# All-reduce on 8 H200 gets 40 GB/s at 1 MiB, 347 at 64 MiB, 450 at 512 MiB: 42 and 77 µs more than its
# bytes take at full speed, whatever its size. So it is a latency, 20-50 µs a message, and no `half_bytes`.
INTRA_LATENCY = 20e-6
INTER_LATENCY = 50e-6
CALL_SECONDS = 10e-6  # of the device: a kernel's first and last waves, and a merge; assumed
NCCL_SLOWDOWN = 0.1  # of the SMs; assumed: a fit to the StreamFusion paper's times gives 0.1-0.25
NIC_EFFICIENCY = 0.97  # ConnectX-7 InfiniBand gives 48-49 of 50 GB/s a NIC


def cluster(name: str) -> Topology:
    """Return a topology by its name, such as 8xh100, 4x8xa100 or 8xh100:fa4.

    >>> cluster("2x8xa100").ranks
    16
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([a-z]\w*)(?::([\w,]+))?", name.strip().lower())
    if not match or not is_device(match[3]) or not int(match[2]) * int(match[1] or 1):
        raise InputError(
            f"There is no cluster {name!r}.",
            hint=f"Write 8xh100 or 4x8xh100 (machines × devices) with one of {', '.join(DEVICES)}, "
            "or give a topology's TOML (weft calibrate writes one).",
        )
    device = device_of(match[3])
    kernels = kernels_of(match[3], tuple(match[4].split(",")) if match[4] else ())
    (kernel, dense), (sparse_kernel, sparse) = kernels["dense"], kernels["sparse"]
    return Topology(
        name=name,
        machines=int(match[1] or 1),
        devices=int(match[2]),
        intra=Link(latency=INTRA_LATENCY, bandwidth=device.scale_up * PAIRWISE_EFFICIENCY * 1e9),
        inter=Link(latency=INTER_LATENCY, bandwidth=_nic_gigabytes(device) * NIC_EFFICIENCY * 1e9),
        flops=dense.forward * 1e12,
        sparse_flops=sparse.forward * 1e12,
        backward_flops=dense.backward * 1e12,
        sparse_backward_flops=sparse.backward * 1e12,
        kernel=f"{kernel}, {dense.source}",
        sparse_kernel=f"{sparse_kernel}, {sparse.source}",
        host=GPU_HOST,
        call_seconds=CALL_SECONDS,
        memory_bandwidth=device.memory * 1e12,
        pair_bandwidth=device.pair * PAIRWISE_EFFICIENCY * 1e9,
        nic_bandwidth=device.scale_out * NIC_EFFICIENCY * 1e9,
        two_sided=True,
        comm_slowdown=NCCL_SLOWDOWN,
    )


def _nic_gigabytes(device: Device) -> float:
    """GB/s of one network card: one per device, EFA's four, or one per machine."""
    return device.scale_out / (8 if device.scale_out >= 100 else 4 if device.scale_out >= 50 else 1)
