"""Make cases from traces and from simulated schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median_low

from weft.core.errors import InputError
from weft.core.schedule import Schedule
from weft.core.timeline import Timeline
from weft.core.topology import Topology
from weft.plan.explanation import Explanation
from weft.report.case import Case, by_call, is_backward
from weft.report.sweep import SweepPoint, on_ranks, resized, sizes_up_to, sweep


def measured(
    timeline: Timeline,
    schedule: Schedule | None = None,
    topology: Topology | None = None,
    explained: Explanation | None = None,
) -> Case:
    """Return the case of a traced run; a schedule adds masks, loads and memory."""
    for known, what in (
        (schedule and schedule.problem.ranks, "schedule"),
        (topology and topology.ranks, "topology"),
    ):
        if known and known != timeline.ranks:
            raise InputError(
                f"The trace {timeline.name!r} has {timeline.ranks} ranks, its {what} has {known}.",
                hint="Pass the one that it ran with, or omit it.",
            )
    timeline = replace(timeline, name=timeline.name or "run")
    call = one_call(timeline)
    return Case(timeline.name, call, schedule, topology, traced=timeline, explained=explained)


def one_call(timeline: Timeline) -> Timeline:
    """Return the forward call of median duration of a trace, shifted to start at zero."""
    calls = by_call(timeline)
    if not calls:
        raise InputError(f"The timeline {timeline.name!r} has no spans.")
    # A backward takes about twice as long; a median over both would represent neither.
    forward = {call: spans for call, spans in calls.items() if not is_backward(spans)} or calls
    begins = {call: min(span.start for span in spans) for call, spans in forward.items()}
    took = {call: max(span.end for span in spans) - begins[call] for call, spans in forward.items()}
    middle = median_low(took.values())
    chosen = next(call for call in sorted(took) if took[call] == middle)
    zero = begins[chosen]
    spans = tuple(s._replace(start=s.start - zero, end=s.end - zero) for s in calls[chosen])
    return replace(timeline, spans=spans)


def distinct_names(cases: Sequence[Case]) -> list[Case]:
    """Make the names of cases differ: by their source, or else by position."""
    if len({case.name for case in cases}) == len(cases):
        return list(cases)
    words = [case.source for case in cases]
    words = words if len(set(words)) == len(cases) else ORDINALS[: len(cases)]
    return [replace(case, name=f"{case.name}, {word}") for case, word in zip(cases, words, strict=True)]


ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"]


def simulated(
    schedule: Schedule, topology: Topology, others: Sequence[str] = (), *, model: str = "", asked: str = ""
) -> Case:
    """Return the case of a simulated schedule, with a scaling sweep and the named other plans.

    `model` and `asked` (its mask) are as written on the command line.
    """
    from weft.simulate.events import simulate

    if topology.ranks != schedule.problem.ranks:
        raise InputError(
            f"The schedule is for {schedule.problem.ranks} ranks, {topology.name} has {topology.ranks}.",
            hint="Pass a --topology with as many devices.",
        )
    timeline = simulate(schedule, topology)
    own = SweepPoint.of(schedule.name, topology, timeline)
    named = tuple(name for name in others if name != schedule.name)
    problem, mask = schedule.attention
    points = sweep(lambda _: problem, mask, [topology] if named else [], named)
    plans = sorted((own, *(result.point for result in points)), key=lambda p: p.seconds)
    scaling = _scaling(schedule, topology, own, plans)
    return Case(schedule.name, timeline, schedule, topology, tuple(plans), scaling, model=model, mask=asked)


def _scaling(
    schedule: Schedule, topology: Topology, own: SweepPoint, plans: Sequence[SweepPoint]
) -> tuple[SweepPoint, ...]:
    """Return the fastest plan at each size, and the plan itself where it is not the fastest."""
    if topology.links or topology.cores or not any(schedule.attends()):
        return ()  # measured links hold for one size, shared cores do not grow, an empty mask has no work
    sizes = sizes_up_to(topology)
    clusters = [resized(topology, gpus) for gpus in (sizes if len(plans) == 1 else sizes[:-1])]
    problem, mask = schedule.attention
    points = [result.point for result in sweep(partial(on_ranks, problem), mask, clusters)]
    # If there are other plans, the planner has already run for the whole cluster.
    return (*points, *dict.fromkeys((plans[0], own)))
