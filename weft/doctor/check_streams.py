"""Check attentions on two streams of a process at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.doctor.known_attention import KnownAttention, judged
from weft.doctor.suite import Check, CheckContext
from weft.run.streams import on, side

PAIRS = (("ulysses", "ring"), ("ring", "ring"), ("gather", "ulysses"))
"""The plans on the two streams."""
ROUNDS, REHEARSED_ROUNDS = 20, 2
IN_TURN = "CPUs have no streams: the attentions ran in turn."


def checks(ctx: CheckContext) -> Iterator[Check]:
    attentions = [KnownAttention.drawn(ctx, seed) for seed in (0, 1)]
    two = [side(ctx.device, f"doctor {number}") for number in (1, 2)]
    rounds = REHEARSED_ROUNDS if ctx.is_rehearsal else ROUNDS
    note = IN_TURN if ctx.is_rehearsal else f"{rounds} times, forward and backward"
    for pair in PAIRS:
        name = f"{pair[0]} beside {pair[1]}"
        if not ctx.begins(name):
            continue
        results: list[tuple[KnownAttention, list[Tensor]]] = []
        _synchronize(ctx)  # inputs were made on another stream
        for _ in range(rounds):
            for each, stream, plan in zip(attentions, two, pair, strict=True):
                with on(stream):
                    results.append((each, each.attend_and_differentiate(plan)))
        _synchronize(ctx)
        yield judged(name, results, note, ctx)


def _synchronize(ctx: CheckContext) -> None:
    if not ctx.is_rehearsal:
        torch.cuda.synchronize(ctx.device)
