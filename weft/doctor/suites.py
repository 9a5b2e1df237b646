"""Suites: the parts of `weft doctor --gpu`, in order.

What the others need comes first. The limits add up to less than ten minutes.
"""

from __future__ import annotations

from weft.doctor.suite import CheckSuite

BACKEND_SECONDS = {
    "flash": 25, "cudnn": 25, "triton": 60, "gather": 25, "exact": 25, "fa4": 45, "cudnn_sparse": 40,
}  # fmt: skip
"""The limit of each backend's suite: some compile their kernels in the first call."""
NOT_COVERED = (
    "the watcher that names the rank that is late",
    "training: FSDP2, DSV, checkpoints of GPU tensors",
    "the server, and decoding by several ranks",
    "torch.compile around weft.attention",
)
"""What never ran on a GPU either, and no suite checks."""
BACKENDS = tuple(
    (f"kernel-{backend}", seconds, f"Attention by backend={backend!r}, against float64",
     f"backend={backend!r}: forward, and backward where it has one")
    for backend, seconds in BACKEND_SECONDS.items()
)  # fmt: skip
SUITES = tuple(
    CheckSuite(name=name, seconds=seconds, title=title, claims=(claim,))
    for name, seconds, title, claim in (
        ("nccl", 45, "NCCL: all ranks meet, in one group and in halves",
         "NCCL by weft's groups: high-priority streams, all_to_all and batches of messages"),
        ("links", 75, "Links and kernel speeds, as the planner reads them",
         "calibration with CUDA events: links by pair, all-to-all, kernels, host costs"),
        ("symmetric", 40, "Symmetric memory: one-sided messages over NVLink",
         "symmetric memory: rendezvous, copy engine, signals between streams"),
        *BACKENDS,
        ("strategies", 70, "Every strategy, forward and backward, against float64",
         "every strategy on GPUs, with launches fused and waits on streams"),
        ("wan", 35, "One attention of Wan: time and memory beside the prediction",
         "predicted times and memory against measured ones"),
        ("streams", 20, "Two streams at once", "two attentions on two streams of one process"),
        ("graph", 25, "An attention captured as a CUDA graph",
         "capture of an attention in a CUDA graph, and its replay"),
        ("pipeline", 40, "A step of a Diffusers pipeline, parallelized",
         "weft.parallelize on a Diffusers pipeline"),
    )
)  # fmt: skip
"""Name, limit in seconds, title, and what runs on a GPU for the first time."""
