"""Check an attention that is captured in a CUDA graph and replayed with other inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from weft.doctor.known_attention import KnownAttention, judged
from weft.doctor.suite import Check, CheckContext
from weft.run.measure.compare import TIMEOUT
from weft.run.streams import on, side
from weft.run.world import world_of

PLANS = ("ulysses", "ring")
SEEDS = (0, 1, 2)
"""Of the replays, and of the capture."""
UNCAPTURED = "CPUs have no graphs: the attention ran as it is."


def checks(ctx: CheckContext) -> Iterator[Check]:
    if world_of(None, TIMEOUT).comm.transport == "symmetric":
        why = "Messages in symmetric memory cannot be captured: set WEFT_TRANSPORT=group."
        yield Check(name="capture", status="skipped", note=why)
        return
    attentions = [KnownAttention.drawn(ctx, seed) for seed in SEEDS[:-1]]
    for plan in PLANS:
        if ctx.begins(plan):
            yield _judged(plan, attentions, ctx)


def _judged(plan: str, attentions: list[KnownAttention], ctx: CheckContext) -> Check:
    """Judge the results of one graph for several inputs, which are copied to where it reads them."""
    static = KnownAttention.drawn(ctx, SEEDS[-1])
    replay = (lambda: static.attend(plan)) if ctx.is_rehearsal else _captured(static, plan, ctx)
    results: list[tuple[KnownAttention, list[Tensor]]] = []
    for each in attentions:
        for target, x in zip(static.inputs, each.inputs, strict=True):
            target.copy_(x)
        results.append((each, [replay().clone()]))
    note = UNCAPTURED if ctx.is_rehearsal else f"replayed with {len(attentions)} other inputs"
    return judged(plan, results, note, ctx)


def _captured(operands: KnownAttention, plan: str, ctx: CheckContext) -> Callable[[], Tensor]:
    """Return the replay of an attention's graph, which returns the tensor that it writes."""
    stream = side(ctx.device, "doctor 1")
    torch.cuda.synchronize(ctx.device)  # inputs were made on another stream
    with on(stream):
        for _ in range(3):  # plans, connections and tables are made by the first
            operands.attend(plan)
    torch.cuda.synchronize(ctx.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = operands.attend(plan)

    def replay() -> Tensor:
        graph.replay()
        torch.cuda.synchronize(ctx.device)
        return out

    return replay
