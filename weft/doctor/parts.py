"""Parts: everything that `weft doctor --gpu` asks of a machine, in the order in which it asks.

What must work for the rest comes first. The limits add up to less than ten minutes.
"""

from __future__ import annotations

from weft.doctor.part import Part

BACKENDS_TRIED = {
    "flash": 25, "cudnn": 25, "triton": 60, "gather": 25, "exact": 25, "fa4": 45, "cudnn_sparse": 40,
}  # fmt: skip
"""By name, seconds for its part: some compile their kernels as they are first called."""
UNASKED = (
    "the watcher that names the rank that is late",
    "training: FSDP2, DSV, checkpoints of GPU tensors",
    "the server, and decoding by several ranks",
    "torch.compile around weft.attention",
)
"""What never ran on a GPU either, and no part asks for."""
PARTS = (
    Part(
        name="nccl",
        title="NCCL: all ranks meet, in one group and in halves",
        function="nccl:checks",
        seconds=45,
        claims=("NCCL by weft's groups: high-priority streams, all_to_all and batches of messages",),
    ),
    Part(
        name="links",
        title="Links and kernel speeds, as the planner reads them",
        function="links:checks",
        seconds=75,
        claims=("calibration with CUDA events: links by pair, all-to-all, kernels, host costs",),
    ),
    Part(
        name="symmetric",
        title="Symmetric memory: one-sided messages over NVLink",
        function="symmetric:checks",
        seconds=40,
        claims=("symmetric memory: rendezvous, copy engine, signals between streams",),
    ),
    *(
        Part(
            name=f"kernel-{backend}",
            title=f"Attention by backend={backend!r}, against float64",
            function=f"kernels:{backend}",
            seconds=seconds,
            claims=(f"backend={backend!r}: forward, and backward where it has one",),
        )
        for backend, seconds in BACKENDS_TRIED.items()
    ),
    Part(
        name="strategies",
        title="Every strategy, forward and backward, against float64",
        function="strategies:checks",
        seconds=70,
        claims=("every strategy on GPUs, with launches fused and waits on streams",),
    ),
    Part(
        name="wan",
        title="One attention of Wan: time and memory beside the prediction",
        function="wan:checks",
        seconds=35,
        claims=("predicted times and memory against measured ones",),
    ),
    Part(
        name="streams",
        title="Two streams at once",
        function="streams:checks",
        seconds=20,
        claims=("two attentions on two streams of one process",),
    ),
    Part(
        name="graph",
        title="An attention captured as a CUDA graph",
        function="graph:checks",
        seconds=25,
        claims=("capture of an attention in a CUDA graph, and its replay",),
    ),
    Part(
        name="pipeline",
        title="A step of a Diffusers pipeline, parallelized",
        function="pipeline:checks",
        seconds=40,
        claims=("weft.parallelize on a Diffusers pipeline",),
    ),
)
