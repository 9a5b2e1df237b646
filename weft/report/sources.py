"""Cases: from a traced run, or from a schedule that is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median_low

from weft.core.codec import loads
from weft.core.errors import InputError
from weft.core.schedule import Schedule
from weft.core.timeline import Span, Timeline
from weft.core.topology import Topology
from weft.report.case import Case
from weft.report.sweep import Point, on_ranks, resized, sizes_up_to, sweep


def measured(timeline: Timeline, schedule: Schedule | None = None, topology: Topology | None = None) -> Case:
    """A traced run; with its schedule there are masks, loads and memory too."""
    for known, what in (
        (schedule and schedule.problem.ranks, "schedule"),
        (topology and topology.ranks, "topology"),
    ):
        if known and known != timeline.ranks:
            raise InputError(
                f"The trace {timeline.name!r} has {timeline.ranks} ranks, its {what} has {known}.",
                hint="Give what it ran with, or leave it out.",
            )
    return Case(timeline.name or "run", one_call(timeline), schedule, topology)


def one_call(timeline: Timeline) -> Timeline:
    """Of several attentions one after another, the one that took the median time, from its own zero."""
    calls: dict[int, list[Span]] = {}
    for span in timeline.spans:
        calls.setdefault(span.call, []).append(span)
    if not calls:
        raise InputError(f"The timeline {timeline.name!r} has no spans.")
    begins = {call: min(span.start for span in spans) for call, spans in calls.items()}
    took = {call: max(span.end for span in spans) - begins[call] for call, spans in calls.items()}
    middle = median_low(took.values())
    chosen = next(call for call in sorted(took) if took[call] == middle)
    zero = begins[chosen]
    spans = tuple(replace(s, start=s.start - zero, end=s.end - zero) for s in calls[chosen])
    return replace(timeline, spans=spans)


def read_schedule(path: Path) -> Schedule:
    """What `weft plan --save` writes."""
    found = loads(_text(path))
    if not isinstance(found, Schedule):
        raise InputError(f"{path} holds no schedule.", hint="weft plan MODEL --save writes one.")
    return found


def simulated(schedule: Schedule, topology: Topology, others: Sequence[str] = ()) -> Case:
    """A schedule on a cluster, how the same attention does on smaller ones and, by name, with other plans."""
    from weft.simulate.events import simulate

    if topology.ranks != schedule.problem.ranks:
        raise InputError(
            f"The schedule is for {schedule.problem.ranks} ranks, {topology.name} has {topology.ranks}.",
            hint="Give a --topology of as many devices.",
        )
    timeline = simulate(schedule, topology)
    scaling = _scaling(schedule, topology, timeline)
    named = tuple(name for name in others if name != schedule.name)
    found = sweep(lambda _: schedule.problem, schedule.mask, [topology] if named else [], named)
    plans = sorted(
        (Point.of(schedule.name, topology, timeline), *(one.point for one in found)), key=lambda p: p.seconds
    )
    return Case(schedule.name, timeline, schedule, topology, tuple(plans), scaling)


def _scaling(schedule: Schedule, topology: Topology, timeline: Timeline) -> tuple[Point, ...]:
    if topology.links or topology.cores:
        return ()  # measured links belong to one size, and shared cores do not grow
    smaller = [resized(topology, gpus) for gpus in sizes_up_to(topology)[:-1]]
    points = sweep(partial(on_ranks, schedule.problem), schedule.mask, smaller)
    return (*(found.point for found in points), Point.of(schedule.name, topology, timeline))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None
