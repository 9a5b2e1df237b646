"""Graph: an attention is captured in a CUDA graph, which is replayed with other inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from weft.doctor.operands import Operands, judged
from weft.doctor.part import Check, Site
from weft.run.check import TIMEOUT
from weft.run.streams import on, side
from weft.run.world import world_of

PLANS = ("ulysses", "ring")
SEEDS = (0, 1, 2)
"""Of the replays, and of the capture."""
UNCAPTURED = "CPUs have no graphs: the attention ran as it is."


def checks(site: Site) -> Iterator[Check]:
    if world_of(None, TIMEOUT).comm.transport == "symmetric":
        why = "Messages in symmetric memory cannot be captured: set WEFT_TRANSPORT=group."
        yield Check(name="capture", status="skipped", note=why)
        return
    attentions = [Operands.drawn(site, seed) for seed in SEEDS[:-1]]
    for plan in PLANS:
        if site.begins(plan):
            yield _judged(plan, attentions, site)


def _judged(plan: str, attentions: list[Operands], site: Site) -> Check:
    """Judge what one graph makes of several inputs, which are copied to where it reads them."""
    static = Operands.drawn(site, SEEDS[-1])
    replay = (lambda: static.attend(plan)) if site.is_rehearsal else _captured(static, plan, site)
    results: list[tuple[Operands, list[Tensor]]] = []
    for each in attentions:
        for place, x in zip(static.inputs, each.inputs, strict=True):
            place.copy_(x)
        results.append((each, [replay().clone()]))
    note = UNCAPTURED if site.is_rehearsal else f"replayed with {len(attentions)} other inputs"
    return judged(plan, results, note, site)


def _captured(operands: Operands, plan: str, site: Site) -> Callable[[], Tensor]:
    """Return what replays the graph of an attention, with the tensor that it writes."""
    stream = side(site.device, "doctor 1")
    torch.cuda.synchronize(site.device)  # inputs were made on another stream
    with on(stream):
        for _ in range(3):  # plans, connections and tables are made by the first
            operands.attend(plan)
    torch.cuda.synchronize(site.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = operands.attend(plan)

    def replay() -> Tensor:
        graph.replay()
        torch.cuda.synchronize(site.device)
        return out

    return replay
