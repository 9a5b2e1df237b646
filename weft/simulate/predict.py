"""Predict: one interface to the time of a schedule, whatever works it out."""

from __future__ import annotations

import numpy as np

from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.simulate.critical import Timing, critical_path
from weft.simulate.events import simulate

MOST_RANKS = 64  # beyond it a planner that compares many schedules cannot wait for events


def predict(schedule: Schedule, topology: Topology, works: dict[int, int] | None = None) -> Timing:
    """The simulated time of the very schedule that would run; for many ranks that of its critical path."""
    if schedule.problem.ranks > MOST_RANKS:
        return critical_path(schedule, topology, works)
    timeline = simulate(schedule, topology, works, memory=False)
    sending = np.zeros(timeline.ranks)
    launching = 0.0
    for span in timeline.spans:
        if span.kind == "send":
            sending[span.rank] += span.seconds
        elif span.kind == "launch":
            launching = max(launching, span.seconds)
    return Timing(timeline.seconds, tuple(timeline.computing.tolist()), tuple(sending.tolist()), launching)
