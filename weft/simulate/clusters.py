"""Clusters by name: `8xh100` is one machine of 8, `4x8xh100` is four of them.

Every number says where it is from. [V] was read at its source, [R] is remembered and unproven, as
`sota.md` section 4 and `streamfusion.md` sections 5 and 7 mark them; [I] is inferred there or here.

Inside a machine a device has its links to itself; between machines the devices of one share its network.
Messages are NCCL's: both ends must be there, and while they run the device computes more slowly.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from weft.core.errors import InputError
from weft.core.topology import Link, Topology

PAIRWISE = 0.88  # of the specification, NVLink pairwise on H200 [V]
ATTENTION = 190 / 312  # of the dense BF16 peak: FlashAttention-2 on A100 [R]; VSA reaches 56 % on H100 [I]
# All-reduce on 8 H200 gets 40 GB/s at 1 MiB, 347 at 64 MiB, 450 at 512 MiB [V]: 42 and 77 µs more than its
# bytes take at full speed, whatever its size. So it is a latency, 20-50 µs a message, and no `half_bytes`.
INTRA_LATENCY = 20e-6
INTER_LATENCY = 50e-6
CALL_SECONDS = 20e-6  # a launch and a merge [I]
NCCL_SLOWDOWN = 0.1  # of the SMs; 0.1-0.25 in streamfusion.md 7.6 [I]
EFFICIENT = 0.97  # CX-7 InfiniBand gives 48-49 of 50 GB/s a NIC [V]


class Device(NamedTuple):
    """TFLOP/s dense BF16, TB/s of its memory, GB/s to the other devices of its machine and of 8 to others."""

    tflops: float
    memory: float
    scale_up: float
    scale_out: float
    pair: float = 0.0
    """GB/s between two devices, where that is less than one device has in all."""


DEVICES = {
    # 312, 2.0, NVLink 3 at 300, EFA 400 Gbit/s for a P4d machine [V]; p4de of StreamFusion is the same [V].
    "a100": Device(312, 2.0, 300, 50),
    # An A100 with a third of its NVLink taken away: 400 instead of 600 GB/s both ways; 8×200 Gbit/s [R].
    "a800": Device(312, 2.0, 200, 200),
    # NVLink 4; 8 × 400 Gbit/s InfiniBand or EFA [V].
    "h100": Device(989, 3.35, 450, 400),
    # All four [R].
    "h800": Device(989, 3.35, 200, 400),
    # 78 SMs and 4.0 TB/s [V]; one way of NVLink [R]; its network is not in the table, taken as H100's [I].
    "h20": Device(148, 4.0, 450, 400),
    "h200": Device(989, 4.8, 450, 400),  # [V]
    "b200": Device(2250, 8.0, 900, 400),  # NVLink 5 [V]
    # xGMI: 448 in all but 64 a pair [V]; its network is not in the table, taken as H100's [I].
    "mi300x": Device(1300, 5.3, 448, 400, pair=64),
}


def cluster(name: str) -> Topology:
    """A topology by its name, such as 8xh100 or 4x8xa100.

    >>> cluster("2x8xa100").ranks
    16
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([a-z]\w*)", name.strip().lower())
    if not match or match[3] not in DEVICES or not int(match[2]) * int(match[1] or 1):
        raise InputError(
            f"There is no cluster {name!r}.",
            hint=f"Write 8xh100 or 4x8xh100 (machines × devices) with one of {', '.join(DEVICES)}, "
            "or give a topology's TOML (weft calibrate writes one).",
        )
    device = DEVICES[match[3]]
    return Topology(
        name=name,
        machines=int(match[1] or 1),
        devices=int(match[2]),
        intra=Link(latency=INTRA_LATENCY, bandwidth=device.scale_up * PAIRWISE * 1e9),
        inter=Link(latency=INTER_LATENCY, bandwidth=_one(device) * EFFICIENT * 1e9),
        flops=device.tflops * ATTENTION * 1e12,
        call_seconds=CALL_SECONDS,
        memory_bandwidth=device.memory * 1e12,
        pair_bandwidth=device.pair * PAIRWISE * 1e9,
        nic_bandwidth=device.scale_out * EFFICIENT * 1e9,
        two_sided=True,
        comm_slowdown=NCCL_SLOWDOWN,
    )


def _one(device: Device) -> float:
    """What one device can have of its machine's network: a NIC each; EFA on A100 is four for all [V]."""
    return device.scale_out / (4 if device.scale_out < 100 else 8)
