"""Pace: how fast this machine is at a moment, so that times of different moments can be compared.

The cores of a rented machine are shared with neighbours that no process list shows: the same attention
takes 17 ms, and 29 ms of CPU time a second later. So right after every contender all ranks run a fixed
attention, and the contender is counted in multiples of its CPU time, at the calibrated speed: where ranks
take turns on the cores, the clock of one that waits for its first turn would begin too late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

from bench.rows import Round
from weft.core.topology import Topology
from weft.run.kernels import choose
from weft.run.kernels.tiles import Tiles

HEADS, TOKENS, DIM = 2, 1024, 64
PACE = "pace after "


def paced(contenders: dict[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """Each contender with a pace after it; turns go around, so they stay neighbours."""
    kernel = choose("auto", "float32", "cpu")
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM) for _ in range(3))
    tiles = Tiles(None, TOKENS, TOKENS, TOKENS, TOKENS)

    def pace() -> None:
        kernel.attend(q, k, v, tiles, DIM**-0.5)

    with_pace: dict[str, Callable[[], object]] = {}
    for name, contender in contenders.items():
        with_pace |= {name: contender, PACE + name: pace}
    return with_pace


def seconds_of(name: str, rounds: Sequence[Round], topology: Topology) -> float:
    """What a contender takes at the calibrated speed: the median over rounds of its multiple of the pace."""
    flops = 4 * HEADS * TOKENS**2 * DIM
    one = topology.call_seconds + flops / topology.flops
    return one * median(_multiple(name, played) for played in rounds)


def _multiple(name: str, played: Round) -> float:
    """Of the pace before and after it."""
    names = list(played.took)
    paces = [other for other in names if other.startswith(PACE)]
    at = paces.index(PACE + name)
    return 2 * played.took[name].wall / sum(played.took[paces[i]].cpu for i in (at - 1, at))
