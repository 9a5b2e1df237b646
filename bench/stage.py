"""On a rank: who is on stage, and a round in which each of them takes its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from bench.rows import Took, take_turns

STAGE: dict[str, Callable[[], Any]] = {}
"""A benchmark's `prepare` fills it once a case; it lives on in the rank until `play` is called."""


def play(turn: int) -> dict[str, Took]:
    return take_turns(STAGE, turn, before=dist.barrier)
