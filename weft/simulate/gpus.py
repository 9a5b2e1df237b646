"""GPUs by name: what they and their links can do, and how fast each attention kernel is on them.

Every number says where it is from. [V] was read at its source, [R] is remembered and unproven, as `sota.md`
section 4 and `streamfusion.md` sections 5 and 7 mark them; [I] is inferred there or here. weft has timed no
kernel of this table: `weft calibrate` measures those that a machine has.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.core.errors import InputError
from weft.core.topology import Host


class Device(NamedTuple):
    """TFLOP/s dense BF16, TB/s of its memory, GB/s to the other devices of its machine and of 8 to others."""

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
ETHERNET = 12.5  # GB/s of a machine whose devices have PCIe only: 100 Gbit/s [I]
THROUGH_HOST = (
    0.5  # GeForce cards do not read each other's memory: bytes pass the host's, twice over PCIe [I]
)

DEVICES = {
    # 312, 2.0, NVLink 3 at 300, EFA 400 Gbit/s for a P4d machine [V]; p4de of StreamFusion is the same [V].
    "a100": Device("sm_80", 312, 2.0, 300, 50),
    # An A100 with a third of its NVLink taken away: 400 instead of 600 GB/s both ways; 8×200 Gbit/s [R].
    "a800": Device("sm_80", 312, 2.0, 200, 200, like="a100"),
    # NVLink 4; 8 × 400 Gbit/s InfiniBand or EFA [V].
    "h100": Device("sm_90", 989, 3.35, 450, 400),
    # All four [R].
    "h800": Device("sm_90", 989, 3.35, 200, 400, like="h100"),
    # 78 SMs and 4.0 TB/s [V]; one way of NVLink [R]; its network is not in the table, taken as H100's [I].
    "h20": Device("sm_90", 148, 4.0, 450, 400),
    # [V]; attention is 4 % slower forward and 3.5 % faster backward than on H100 (flash-attention#1438) [V].
    "h200": Device("sm_90", 989, 4.8, 450, 400, like="h100"),
    "b200": Device("sm_100", 2250, 8.0, 900, 400),  # NVLink 5 [V]
    # The cards with PCIe only [R].
    "a40": Device("sm_86", 150, 0.7, PCIE_4, ETHERNET, like="a100"),
    "l40s": Device("sm_89", 362, 0.86, PCIE_4, ETHERNET),
    "rtx4090": Device("sm_89", 165, 1.0, PCIE_4 * THROUGH_HOST, ETHERNET),
    "rtx5090": Device("sm_120", 210, 1.8, PCIE_5 * THROUGH_HOST, ETHERNET),
    "rtxpro6000": Device("sm_120", 504, 1.8, PCIE_5, ETHERNET),
    # xGMI: 448 in all but 64 a pair [V]; its network is not in the table, taken as H100's [I].
    "mi300x": Device("gfx942", 1300, 5.3, 448, 400, pair=64),
    # 7 links of 76.8 [R].
    "mi355x": Device("gfx950", 2500, 8.0, 538, 400, pair=76.8),
}


class Kernel(NamedTuple):
    """TFLOP/s of one backend forward and backward, over active tiles, with 16-bit operands and 128 dims."""

    forward: float
    backward: float
    source: str


GUESS = "estimate"
DENSE: dict[str, dict[str, Kernel]] = {
    "a100": {
        # pytorch#192799 has a median of 136 over smaller shapes, and cuDNN equal or behind [V].
        "flash": Kernel(190, 165, "FlashAttention-2 paper, remembered"),
        "cudnn": Kernel(185, 145, "estimate, from pytorch#192799"),
        "exact": Kernel(14, 11, GUESS),
    },
    "h100": {
        # The Flux shape: flash 329, cuDNN 631, FA3 632 [V]; the paper at 16k: 370 and 322, 595 and 516 [V].
        "flash": Kernel(330, 290, "pytorch#142132; backward an estimate"),
        "cudnn": Kernel(600, 515, "FlashAttention-3 paper"),
        "fa4": Kernel(640, 560, "estimate, as FlashAttention-3"),
        "exact": Kernel(30, 25, GUESS),  # three TF32 products for one: 25-40
    },
    "h20": {  # flash-attention#1310, forward at 2k tokens [V]; backward by the shares of an H100
        "flash": Kernel(84, 73, "flash-attention#1310; backward an estimate"),
        "cudnn": Kernel(129, 110, "flash-attention#1310; backward an estimate"),
        "fa4": Kernel(126, 110, "estimate, as FlashAttention-3"),
        "exact": Kernel(15, 12, GUESS),
    },
    "b200": {
        "flash": Kernel(355, 330, "tritonbench#171, flash-attention#1589"),
        "cudnn": Kernel(1430, 1150, "flash-attention#2605; backward an estimate"),
        "fa4": Kernel(1535, 1360, "flash-attention#2280"),
        "exact": Kernel(45, 38, GUESS),
    },
    "l40s": {
        "flash": Kernel(190, 140, GUESS),
        "cudnn": Kernel(200, 150, GUESS),
        "exact": Kernel(20, 15, GUESS),
    },
    "rtx4090": {
        "flash": Kernel(150, 110, GUESS),
        "cudnn": Kernel(155, 115, GUESS),
        "exact": Kernel(18, 14, GUESS),
    },
    "rtx5090": {  # FP4 attention at 1038 is five times FlashAttention-2 [V]
        "flash": Kernel(200, 150, "SageAttention3 paper; backward an estimate"),
        "cudnn": Kernel(205, 155, GUESS),
        "exact": Kernel(22, 17, GUESS),
    },
    "rtxpro6000": {  # 12 heads, 32,760 tokens in 18.5 and 17.7 ms [V]
        "flash": Kernel(356, 260, "sglang#36494; backward an estimate"),
        "cudnn": Kernel(372, 270, "sglang#36494; backward an estimate"),
        "exact": Kernel(25, 19, GUESS),
    },
    "mi300x": {"flash": Kernel(380, 250, GUESS), "exact": Kernel(25, 20, GUESS)},
    "mi355x": {"flash": Kernel(700, 400, GUESS), "exact": Kernel(35, 28, GUESS)},  # aiter's has 1218 [V]
}
SPARSE: dict[str, dict[str, Kernel]] = {
    "a100": {"triton": Kernel(150, 90, GUESS), "gather": Kernel(60, 45, GUESS), "exact": Kernel(8, 6, GUESS)},
    "h100": {
        "triton": Kernel(300, 220, GUESS),  # compiled: 0.4-0.55 of FA3 forward, 0.35-0.45 backward
        # VSA has 85 % of FA3's speed [V]; nobody has published these two on an H100.
        "cudnn_sparse": Kernel(500, 400, GUESS),
        "fa4": Kernel(540, 400, GUESS),
        "gather": Kernel(90, 70, GUESS),
        "exact": Kernel(10, 8, GUESS),
    },
    "h20": {
        "triton": Kernel(75, 55, GUESS),
        "cudnn_sparse": Kernel(110, 85, GUESS),
        "fa4": Kernel(110, 85, GUESS),
        "gather": Kernel(40, 30, GUESS),
        "exact": Kernel(8, 6, GUESS),
    },
    "b200": {
        "triton": Kernel(617, 400, "sglang#37676, a Triton VSA on B300; backward an estimate"),
        "cudnn_sparse": Kernel(1300, 900, GUESS),
        "fa4": Kernel(1450, 1000, "flashinfer#4554; backward an estimate"),  # 900-960 is 60-65 % of it
        "gather": Kernel(110, 90, GUESS),
        "exact": Kernel(12, 10, GUESS),
    },
    "l40s": {"triton": Kernel(130, 80, GUESS), "gather": Kernel(60, 45, GUESS), "exact": Kernel(9, 7, GUESS)},
    "rtx4090": {
        "triton": Kernel(110, 70, GUESS),
        "gather": Kernel(50, 38, GUESS),
        "exact": Kernel(8, 6, GUESS),
    },
    "rtx5090": {
        "triton": Kernel(140, 90, GUESS),
        "gather": Kernel(65, 50, GUESS),
        "exact": Kernel(9, 7, GUESS),
    },
    "rtxpro6000": {
        "triton": Kernel(230, 150, GUESS),
        "gather": Kernel(90, 65, GUESS),
        "exact": Kernel(10, 8, GUESS),
    },
    "mi300x": {
        "triton": Kernel(220, 120, GUESS),
        "gather": Kernel(90, 60, GUESS),
        "exact": Kernel(9, 7, GUESS),
    },
    "mi355x": {
        "triton": Kernel(381, 200, "FastVideo#1860, a Triton VSA; backward an estimate"),
        "gather": Kernel(120, 80, GUESS),
        "exact": Kernel(12, 9, GUESS),
    },
}

# What starting a step takes on the host of a GPU [I]: a copy 4-6 µs, an attention 40-80, a batch of messages
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
    """Return what `backend="auto"` takes for dense and for sparse tiles, with torch and Triton alone."""
    return "cudnn" if arch in ("sm_90", "sm_100") else "flash", "triton"


def known_backends(name: str) -> list[str]:
    """Return the backends whose speed on a device is known, for tiles of either kind."""
    known = device_of(name).like or name
    return sorted({*DENSE[known], *SPARSE[known]})


def kernels_of(name: str, backends: tuple[str, ...] = ()) -> dict[str, tuple[str, Kernel]]:
    """Return backend and speed for "dense" tiles, by the first that can, and "sparse" ones, by the last."""
    device, legal = device_of(name), known_backends(name)
    known = device.like or name
    tables = {"dense": DENSE[known], "sparse": SPARSE[known]}
    if unknown := [each for each in backends if each not in legal]:
        raise InputError(
            f"No speed is known of {unknown[0]!r} on {name}.", hint=f"Use one of {', '.join(legal)}."
        )
    share = device.tflops / DEVICES[known].tflops
    found: dict[str, tuple[str, Kernel]] = {}
    for (kind, table), default in zip(tables.items(), default_backends(device.arch), strict=True):
        named = [each for each in backends if each in table] or [default]
        chosen = named[0 if kind == "dense" else -1]
        forward, backward, source = table[chosen]
        found[kind] = chosen, Kernel(forward * share, backward * share, source)
    return found
