"""What papers and their repositories report, as far as we know it; bench.papers puts weft beside it."""

from __future__ import annotations

from typing import NamedTuple

# db-SP, one attention of Wan2.1-14B on 8 A800, in ms: traces in the authors' repository.
TRACES = {
    "balanced": {"usp:8x1": 44.5, "usp:4x2": 45.1, "usp:2x4": 48.4},
    "imbalanced": {"usp:8x1": 71.9, "usp:4x2": 64.6, "usp:2x4": 73.3},
}
DENSE_TRACE = "usp:4x2", 79.1
# Wan2.1-14B with PARO, 8 GPUs over one.
SCALING = {"usp:8x1": 6.09, "usp:1x8": 5.81}

WAYS = {8: ("usp:8x1", "usp:4x2", "usp:2x4", "usp:1x8"), 4: ("usp:4x1", "usp:2x2", "usp:1x4")}

# Masks for them. PARO's spread of densities over heads is said to be 0.3-0.6; Sparge's density is not
# published: a half by its default, and 0.47 in masks that look like it.
LAWS = {
    "paro .414": "paro:density=0.414,cv=0.45",
    "paro .683": "paro:density=0.683,cv=0.45",
    "sparge": "evolving:density=0.47",
}


class EndToEnd(NamedTuple):
    """One row of db-SP's figure, in seconds, digitised to about ±1 s: the static ways, then db-SP."""

    model: str
    device: str
    ranks: int
    law: str
    static: tuple[float, ...]
    dbsp: float


WAN, COG = "wan2.1-14b", "cogvideox1.5-5b"
END_TO_END = (
    EndToEnd(WAN, "a800", 8, "paro .414", (158.2, 164.2, 166.4, 164.2), 138.1),
    EndToEnd(WAN, "a800", 8, "paro .683", (189.6, 191.0, 192.5, 193.3), 154.5),
    EndToEnd(WAN, "a800", 8, "sparge", (220.9,), 194.0),
    EndToEnd(WAN, "h800", 8, "paro .414", (90.5, 91.6, 90.5, 89.4), 75.5),
    EndToEnd(WAN, "h800", 8, "paro .683", (106.6, 106.6, 104.8, 103.7), 84.6),
    EndToEnd(WAN, "h800", 8, "sparge", (117.6,), 104.8),
    EndToEnd(COG, "a800", 8, "paro .414", (128.2, 128.2, 128.2, 127.0), 95.1),
    EndToEnd(COG, "a800", 8, "paro .683", (157.7, 160.7, 158.3, 156.4), 111.0),
    EndToEnd(COG, "h800", 8, "paro .414", (76.4, 76.4, 72.6, 78.7), 62.4),
    EndToEnd(COG, "h800", 8, "paro .683", (90.9, 93.9, 87.8, 90.9), 69.6),
    EndToEnd(WAN, "a800", 4, "paro .414", (291.8, 302.7, 298.6), 263.0),
    EndToEnd(WAN, "a800", 4, "paro .683", (349.3, 353.4, 349.3), 305.5),
    EndToEnd(WAN, "a800", 4, "sparge", (395.9,), 356.2),
    EndToEnd(WAN, "h800", 4, "paro .414", (160.5, 161.3, 161.3), 145.7),
    EndToEnd(WAN, "h800", 4, "paro .683", (192.6, 195.9, 187.7), 169.5),
    EndToEnd(WAN, "h800", 4, "sparge", (213.2,), 192.6),
    EndToEnd(COG, "a800", 4, "paro .414", (226.5, 224.3, 215.5), 192.3),
    EndToEnd(COG, "a800", 4, "paro .683", (280.7, 280.7, 272.9), 227.6),
    EndToEnd(COG, "a800", 4, "sparge", (233.1,), 195.6),
    EndToEnd(COG, "h800", 4, "paro .683", (147.1, 145.0, 140.8), 123.0),
    EndToEnd(COG, "h800", 4, "sparge", (131.9,), 110.2),
)


class Ablation(NamedTuple):
    """StreamFusion on machines of 8 A100, speed-up of a step over USP."""

    name: str
    model: str
    size: tuple[int, int, int]
    machines: int
    usp: str
    swapped: str
    staged: str
    topology_aware: float
    torus: float
    one_sided: float


# Ulysses degrees by the paper's rule, gcd(GPUs, heads); sizes as width, height and frames at 8 a second.
THREE, FOUR = ("usp:8x3", "ulysses", "torus:24x1"), ("usp:8x4", "swapped:8x4", "torus:8x4")
ABLATION = (
    Ablation("Flux 3072", "flux", (3072, 3072, 1), 3, *THREE, 1.11, 1.01, 1.11),
    Ablation("Flux 3072", "flux", (3072, 3072, 1), 4, *FOUR, 1.64, 1.06, 1.77),
    Ablation("Flux 4096", "flux", (4096, 4096, 1), 4, *FOUR, 1.62, 1.49, 1.61),
    Ablation("CogVideoX 20 s", "cogvideox-5b", (1360, 768, 161), 3, *THREE, 1.08, 1.26, 1.22),
    Ablation("CogVideoX 40 s", "cogvideox-5b", (1360, 768, 321), 3, *THREE, 1.06, 1.16, 1.17),
)

# DSP, Open-Sora, 80 frames of 512 × 512 on H800, in seconds, by GPUs and way.
OPEN_SORA = {(1, "dsp"): 106.0, (8, "ulysses"): 45.0, (8, "dsp"): 22.0}


class Parallel(NamedTuple):
    """DSV's artifact on 4 H100, 16 heads: tokens, sparsity of the first and last head, ms of each."""

    name: str
    tokens: int
    sparsity: tuple[float, float]
    by_head: float
    by_sequence: float
    dsv: float


PARALLEL = (
    Parallel("64k, skewed heads", 65536, (0.82, 0.98), 39.35, 28.78, 27.96),
    Parallel("128k, even heads", 131072, (0.91, 0.95), 91.26, 82.63, 80.53),
)


class Training(NamedTuple):
    """DSV's training throughput over full attention: the middle of what is reported for a set-up."""

    name: str
    model: str
    tokens: int
    cluster: str
    low: float
    high: float


TRAINING = (
    Training("4 GPUs, CP4, 32k", "dsv-2.7b", 32768, "4xh100", 3.13, 3.13),
    Training("32 GPUs, CP4, 130k", "dsv-2.7b", 130_000, "4xh100", 2.73, 3.02),
    Training("64 GPUs, CP8, 260k", "dsv-2.7b", 260_000, "8xh100", 2.41, 2.93),
    Training("128 GPUs, CP16, 520k", "dsv-2.7b", 520_000, "2x8xh100", 2.1, 3.02),
    Training("96 GPUs, CP8, 120k", "dsv-30b", 120_000, "8xh100", 2.06, 2.53),
)
STEP_MS = 2649.0, 846.0  # of the first, with full attention and with DSV
# Its kernels at 64k tokens, 4 heads of 128, on one H100: FLOP/s by its logs, forward and backward (a backward
# counted as 2.5 forwards), and the selection in seconds.
DENSE_FLOPS, SPARSE_FLOPS = (446e12, 86e12), (166e12, 22e12)
SELECTION = 5.2e-3
# Of 32 blocks 5 stay dense; the others have this density on average.
DENSE_SHARE, SPARSE_DENSITY = 5 / 32, 0.026
