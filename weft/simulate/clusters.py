"""Clusters by name: `8xh100` is one machine of 8, `4x8xh100` is four of them.

Bandwidths are per device and direction, as a schedule's messages see them: 88 % of the specification
inside a machine (pairwise, measured on H200) and the share of one device of the network between
machines. Attention runs at 61 % of the dense BF16 peak, as A100s do (190 of 312 TFLOP/s).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from weft.core.errors import InputError
from weft.core.topology import Link, Topology

PAIRWISE = 0.88
ATTENTION = 190 / 312
INTRA_LATENCY, INTER_LATENCY = 20e-6, 50e-6  # floors of small messages, with their launch
CALL_SECONDS = 20e-6


class Device(NamedTuple):
    """TFLOP/s dense BF16, GB/s to the other devices of its machine, GB/s of the network of 8 of them."""

    tflops: float
    scale_up: float
    scale_out: float


DEVICES = {
    "a100": Device(312, 300, 50),  # NVLink 3; EFA 400 Gbit/s (p4d)
    "a800": Device(312, 200, 50),  # an A100 with a third of its NVLink taken away
    "h100": Device(989, 450, 400),  # NVLink 4; 8 × 400 Gbit/s
    "h800": Device(989, 200, 400),
    "h20": Device(148, 450, 400),
    "h200": Device(989, 450, 400),
    "b200": Device(2250, 900, 400),
    "mi300x": Device(1300, 64, 400),  # xGMI: 64 GB/s a pair, 448 in all
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
        inter=Link(latency=INTER_LATENCY, bandwidth=device.scale_out / 8 * PAIRWISE * 1e9),
        flops=device.tflops * ATTENTION * 1e12,
        call_seconds=CALL_SECONDS,
    )
