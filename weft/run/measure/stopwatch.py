"""Stopwatch: measure how long calls keep a device busy, and how long the host takes to start them.

On a GPU, events around a call count what the device does, unless the device waits for a slower host. So the
device is first kept busy for as long as the host takes to start all calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import quantiles

import torch

from weft.run import streams

Call = Callable[[], object]
WARM_UP = 2
"""Calls that pay for connections, compilation and fresh pages."""
MAX_DELAY_SECONDS = 0.5


def device_seconds(call: Call, device: torch.device, repeats: int) -> list[float]:
    """Return how long each of `repeats` calls takes on a device; on a CPU, its wall time.

    Ranks that exchange messages in the call must all pass the same `repeats`.
    """
    for _ in range(WARM_UP):
        call()
    if not streams.has_streams(device):
        return [_wall_seconds(call) for _ in range(repeats)]
    streams.record(device).synchronize()
    launch = _wall_seconds(call)
    streams.record(device).synchronize()
    streams.delay(device, min(MAX_DELAY_SECONDS, 2 * (repeats + 1) * launch))
    marks: list[streams.Event] = []
    for _ in range(repeats + 1):
        call()
        marks.append(streams.record(device, timing=True))
    marks[-1].synchronize()
    # The first mark comes after the delays, for which ranks may have waited.
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]


def launch_seconds(call: Call, device: torch.device, repeats: int, batches: int = 5) -> float:
    """Return how long the host takes to start one of many calls, without waiting for any."""
    taken: list[float] = []
    for _ in range(1 + batches):  # the first one pays for compilation
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        taken.append((time.perf_counter() - began) / repeats)
        streams.record(device).synchronize()
    return min(taken[1:])


def lowest_eighth(seconds: list[float]) -> float:
    """Return the first octile: slower calls were disturbed by other processes, faster ones were lucky."""
    return quantiles(seconds, n=8, method="inclusive")[0]  # exclusive may lie below the least of a few


def _wall_seconds(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
