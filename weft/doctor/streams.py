"""Streams: attentions on two streams of a process at once, each judged every time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.doctor.operands import Operands, judged
from weft.doctor.part import Check, Site
from weft.run.streams import on, side

PAIRS = (("ulysses", "ring"), ("ring", "ring"), ("gather", "ulysses"))
"""What runs on the two streams."""
ROUNDS, REHEARSED_ROUNDS = 20, 2
IN_TURN = "CPUs have no streams: the attentions ran in turn."


def checks(site: Site) -> Iterator[Check]:
    operands = [Operands.drawn(site, seed) for seed in (0, 1)]
    two = [side(site.device, f"doctor {number}") for number in (1, 2)]
    rounds = REHEARSED_ROUNDS if site.is_rehearsal else ROUNDS
    note = IN_TURN if site.is_rehearsal else f"{rounds} times, forward and backward"
    for pair in PAIRS:
        name = f"{pair[0]} beside {pair[1]}"
        if not site.begins(name):
            continue
        results: list[tuple[Operands, list[Tensor]]] = []
        _synchronize(site)  # inputs were made on another stream
        for _ in range(rounds):
            for each, stream, plan in zip(operands, two, pair, strict=True):
                with on(stream):
                    results.append((each, each.attend_and_differentiate(plan)))
        _synchronize(site)
        yield judged(name, results, note, site)


def _synchronize(site: Site) -> None:
    if not site.is_rehearsal:
        torch.cuda.synchronize(site.device)
