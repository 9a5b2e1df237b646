"""Sweep: simulate one attention with several plans on clusters of several sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.timeline import Timeline
from weft.core.topology import Topology
from weft.plan.choose import build, candidates
from weft.plan.strategies import parse


@dataclass(frozen=True)
class SweepPoint:
    """One plan on one number of devices."""

    gpus: int
    plan: str
    seconds: float
    exposed: float
    imbalance: float
    intra_bytes: int
    inter_bytes: int
    memory: int

    @staticmethod
    def of(plan: str, cluster: Topology, timeline: Timeline) -> SweepPoint:
        machine = np.arange(cluster.ranks) // cluster.devices
        inside = int(timeline.traffic[machine[:, None] == machine].sum())
        return SweepPoint(
            gpus=cluster.ranks,
            plan=plan,
            seconds=timeline.seconds,
            exposed=timeline.exposed,
            imbalance=timeline.imbalance,
            intra_bytes=inside,
            inter_bytes=int(timeline.traffic.sum()) - inside,
            memory=max(timeline.memory, default=0),
        )


class SweepResult(NamedTuple):
    """A point of a sweep, with its schedule, cluster and timeline."""

    point: SweepPoint
    schedule: Schedule
    cluster: Topology
    timeline: Timeline


def resized(topology: Topology, gpus: int) -> Topology:
    """Return the topology with another number of machines; fewer devices than one has are one machine."""
    devices = min(gpus, topology.devices)
    if gpus < 1 or gpus % devices:
        whole = max(1, gpus // topology.devices) * topology.devices
        raise InputError(
            f"The number of devices must be a multiple of {topology.devices}, the devices of one machine of "
            f"{topology.name}, got {gpus}.",
            hint=f"Try {whole} or {whole + topology.devices}.",
        )
    links = tuple(link for link in topology.links if max(link[:2]) < gpus)
    kind = re.sub(r"^(\d+x)+", "", topology.name)
    machines = gpus // devices
    shape = f"{machines}x{devices}" if machines > 1 else f"{devices}"
    name = f"{shape}x{kind}" if kind != topology.name else kind
    return replace(topology, name=name, machines=machines, devices=devices, links=links)


def on_ranks(problem: Problem, ranks: int) -> Problem:
    """Return the problem with its tokens sharded evenly over another number of ranks."""

    def even(layout: Layout) -> Layout:
        shared = layout.shared.size if layout.ranks > 1 else 0
        return Layout.even(layout.size, ranks, prefix=shared)

    return replace(problem, q=even(problem.q), kv=even(problem.kv))


def sizes_up_to(topology: Topology) -> list[int]:
    """Return device counts: powers of two within a machine, then doubling machines."""
    inside = [2**i for i in range(topology.devices.bit_length()) if 2**i < topology.devices]
    machines = [2**i for i in range(topology.machines.bit_length()) if 2**i < topology.machines]
    return [*inside, *(topology.devices * m for m in machines), topology.ranks]


def sweep(
    problem_on: Callable[[int], Problem],
    mask: BlockMask,
    clusters: Iterable[Topology],
    names: Sequence[str] = ("auto",),
    *,
    on_plan: Callable[[str], object] = str,
) -> Iterator[SweepResult]:
    """Simulate each plan on each cluster; `auto` is the choice of the planner, `all` every candidate."""
    from weft.simulate.events import simulate

    for cluster in clusters:
        problem = problem_on(cluster.ranks)
        for name in wanted(problem, mask, cluster, names):
            on_plan(f"{name} on {cluster.name}")
            schedule = build(name, problem, mask, cluster)
            timeline = simulate(schedule, cluster)
            yield SweepResult(SweepPoint.of(schedule.name, cluster, timeline), schedule, cluster, timeline)


def wanted(problem: Problem, mask: BlockMask, cluster: Topology, names: Sequence[str]) -> list[str]:
    """Return the plan names, with `all` replaced by every candidate for this size."""
    for name in set(names) - {"auto", "all"}:
        parse(name, cluster.ranks)  # refuse a plan that does not fit before anything is simulated
    every = [str(strategy) for strategy in candidates(problem, mask, cluster)] if "all" in names else []
    return list(dict.fromkeys(one for name in names for one in (every if name == "all" else [name])))
