"""GPUs by name: what they and their links can do, and how fast each attention kernel is on them.

Numbers of devices are those of vendors' datasheets as github.com/stas00/ml-engineering lists them, unless
marked "assumed"; kernels name their source. weft has timed none of these kernels: `weft calibrate` measures
those that a machine has. `docs/planning.md` (What is assumed of GPUs) shows the table.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.core.errors import InputError
from weft.core.topology import Host


class Device(NamedTuple):
    """TFLOP/s dense BF16, TB/s of memory, GB/s inside a machine, and GB/s of 8 devices to other machines."""

    arch: str
    tflops: float
    memory: float
    scale_up: float
    scale_out: float
    pair: float = 0.0
    """GB/s between two devices, where that is less than one device has in all."""
    like: str = ""
    """The device whose kernel speeds it has, by its share of the peak."""


PCIE_4, PCIE_5 = 32.0, 64.0  # GB/s one way of 16 lanes
ETHERNET = 12.5  # GB/s of a machine whose devices have PCIe only: 100 Gbit/s, assumed
# GeForce cards do not read each other's memory: bytes cross PCIe twice, through the host's memory; assumed.
THROUGH_HOST = 0.5

DEVICES = {
    # NVLink 3; EFA of 400 Gbit/s on AWS P4d and P4de machines.
    "a100": Device("sm_80", 312, 2.0, 300, 50),
    # An A100 with NVLink at 400 instead of 600 GB/s both ways; 8 × 200 Gbit/s, assumed.
    "a800": Device("sm_80", 312, 2.0, 200, 200, like="a100"),
    # NVLink 4; 8 × 400 Gbit/s InfiniBand or EFA.
    "h100": Device("sm_90", 989, 3.35, 450, 400),
    # An H100 with NVLink at 400 GB/s both ways; memory and network assumed as H100's.
    "h800": Device("sm_90", 989, 3.35, 200, 400, like="h100"),
    # NVLink and network assumed as H100's.
    "h20": Device("sm_90", 148, 4.0, 450, 400),
    # Attention is 4 % slower forward and 3.5 % faster backward than on H100 (flash-attention#1438).
    "h200": Device("sm_90", 989, 4.8, 450, 400, like="h100"),
    "b200": Device("sm_100", 2250, 8.0, 900, 400),  # NVLink 5
    # Cards with PCIe only; vendors' specifications, not in that list.
    "a40": Device("sm_86", 150, 0.7, PCIE_4, ETHERNET, like="a100"),
    "l40s": Device("sm_89", 362, 0.86, PCIE_4, ETHERNET),
    "rtx4090": Device("sm_89", 165, 1.0, PCIE_4 * THROUGH_HOST, ETHERNET),
    "rtx5090": Device("sm_120", 210, 1.8, PCIE_5 * THROUGH_HOST, ETHERNET),
    "rtxpro6000": Device("sm_120", 504, 1.8, PCIE_5, ETHERNET),
    # xGMI: 448 in all but 64 a pair; network assumed as H100's.
    "mi300x": Device("gfx942", 1300, 5.3, 448, 400, pair=64),
    # 7 links of 76.8, AMD's specification.
    "mi355x": Device("gfx950", 2500, 8.0, 538, 400, pair=76.8),
}


class KernelSpeed(NamedTuple):
    """TFLOP/s of one backend forward and backward, over active tiles, with 16-bit operands and 128 dims."""

    forward: float
    backward: float
    source: str = "estimate"


_Rows = dict[str, dict[str, tuple[float, float] | tuple[float, float, str]]]


def _speeds(rows: _Rows) -> dict[str, dict[str, KernelSpeed]]:
    return {
        device: {backend: KernelSpeed(row[0], row[1], *row[2:]) for backend, row in kernels.items()}
        for device, kernels in rows.items()
    }


DENSE = _speeds(
    {
        "a100": {
            # pytorch#192799 has a median of 136 over smaller shapes, and cuDNN equal or behind.
            "flash": (190, 165, "estimate, from the FlashAttention-2 paper"),
            "cudnn": (185, 145, "estimate, from pytorch#192799"),
            "exact": (14, 11),
        },
        "h100": {
            # The Flux shape: flash 329, cuDNN 631, FA3 632; the paper at 16k: 370 and 322, 595 and 516.
            "flash": (330, 290, "pytorch#142132; backward an estimate"),
            "cudnn": (600, 515, "FlashAttention-3 paper"),
            "fa4": (640, 560, "estimate, as FlashAttention-3"),
            "exact": (30, 25),  # three TF32 products for one: 25-40
        },
        "h20": {  # flash-attention#1310, forward at 2k tokens; backward by the shares of an H100
            "flash": (84, 73, "flash-attention#1310; backward an estimate"),
            "cudnn": (129, 110, "flash-attention#1310; backward an estimate"),
            "fa4": (126, 110, "estimate, as FlashAttention-3"),
            "exact": (15, 12),
        },
        "b200": {
            "flash": (355, 330, "tritonbench#171, flash-attention#1589"),
            "cudnn": (1430, 1150, "flash-attention#2605; backward an estimate"),
            "fa4": (1535, 1360, "flash-attention#2280"),
            "exact": (45, 38),
        },
        "l40s": {"flash": (190, 140), "cudnn": (200, 150), "exact": (20, 15)},
        "rtx4090": {"flash": (150, 110), "cudnn": (155, 115), "exact": (18, 14)},
        "rtx5090": {  # FP4 attention at 1038 is five times FlashAttention-2
            "flash": (200, 150, "SageAttention3 paper; backward an estimate"),
            "cudnn": (205, 155),
            "exact": (22, 17),
        },
        "rtxpro6000": {  # 12 heads, 32,760 tokens in 18.5 and 17.7 ms
            "flash": (356, 260, "sglang#36494; backward an estimate"),
            "cudnn": (372, 270, "sglang#36494; backward an estimate"),
            "exact": (25, 19),
        },
        "mi300x": {"flash": (380, 250), "exact": (25, 20)},
        "mi355x": {"flash": (700, 400), "exact": (35, 28)},  # aiter's kernel reaches 1218
    }
)
SPARSE = _speeds(
    {
        "a100": {"triton": (150, 90), "gather": (60, 45), "exact": (8, 6)},
        "h100": {
            "triton": (300, 220),  # compiled: 0.4-0.55 of FA3 forward, 0.35-0.45 backward
            # VSA reaches 85 % of FA3's speed; no speeds of these two on an H100 are published.
            "cudnn_sparse": (500, 400),
            "fa4": (540, 400),
            "gather": (90, 70),
            "exact": (10, 8),
        },
        "h20": {
            "triton": (75, 55),
            "cudnn_sparse": (110, 85),
            "fa4": (110, 85),
            "gather": (40, 30),
            "exact": (8, 6),
        },
        "b200": {
            "triton": (617, 400, "sglang#37676, a Triton VSA on B300; backward an estimate"),
            "cudnn_sparse": (1300, 900),
            "fa4": (
                1450,
                1000,
                "flashinfer#4554; backward an estimate",
            ),  # 900-960 is 60-65 % of it
            "gather": (110, 90),
            "exact": (12, 10),
        },
        "l40s": {"triton": (130, 80), "gather": (60, 45), "exact": (9, 7)},
        "rtx4090": {"triton": (110, 70), "gather": (50, 38), "exact": (8, 6)},
        "rtx5090": {"triton": (140, 90), "gather": (65, 50), "exact": (9, 7)},
        "rtxpro6000": {"triton": (230, 150), "gather": (90, 65), "exact": (10, 8)},
        "mi300x": {"triton": (220, 120), "gather": (90, 60), "exact": (9, 7)},
        "mi355x": {
            "triton": (381, 200, "FastVideo#1860, a Triton VSA; backward an estimate"),
            "gather": (120, 80),
            "exact": (12, 9),
        },
    }
)

# Starting a step on the host of a GPU, assumed: a copy 4-6 µs, an attention 40-80, a batch of messages
# 100-200 with what is in it, a collective 30-50; the look-up of a call was timed, on a CPU (53 µs).
GPU_HOST = Host(call=50e-6, attend=50e-6, copy=6e-6, collective=40e-6, post=80e-6, message=7e-6)


def device_of(name: str) -> Device:
    """Return a device by its name; `a100pcie` is one whose machine has PCIe and no NVLink."""
    if name in DEVICES:
        return DEVICES[name]
    sibling = name.removesuffix("pcie")
    device = DEVICES[sibling]
    link = PCIE_4 if device.arch == "sm_80" else PCIE_5
    return device._replace(scale_up=link, scale_out=ETHERNET, pair=0.0, like=device.like or sibling)


def is_device(name: str) -> bool:
    return name.removesuffix("pcie") in DEVICES


def default_backends(arch: str) -> tuple[str, str]:
    """Return what `backend="auto"` chooses for dense and for sparse tiles, with torch and Triton alone."""
    return "cudnn" if arch in ("sm_90", "sm_100") else "flash", "triton"


def known_backends(name: str) -> list[str]:
    """Return the backends whose speed on a device is known, for tiles of either kind."""
    known = device_of(name).like or name
    return sorted({*DENSE[known], *SPARSE[known]})


def kernels_of(name: str, backends: tuple[str, ...] = ()) -> dict[str, tuple[str, KernelSpeed]]:
    """Return backend and speed for "dense" tiles, by the first that can, and "sparse" ones, by the last."""
    device, legal = device_of(name), known_backends(name)
    known = device.like or name
    tables = {"dense": DENSE[known], "sparse": SPARSE[known]}
    if unknown := [each for each in backends if each not in legal]:
        raise InputError(
            f"The speed of {unknown[0]!r} on {name} is unknown.", hint=f"Use one of {', '.join(legal)}."
        )
    share = device.tflops / DEVICES[known].tflops
    kernels: dict[str, tuple[str, KernelSpeed]] = {}
    for (kind, table), default in zip(tables.items(), default_backends(device.arch), strict=True):
        named = [each for each in backends if each in table] or [default]
        chosen = named[0 if kind == "dense" else -1]
        forward, backward, source = table[chosen]
        kernels[kind] = chosen, KernelSpeed(forward * share, backward * share, source)
    return kernels
