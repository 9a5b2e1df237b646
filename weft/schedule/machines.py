"""Machines: which tokens come from which machine when, for schedules that go from one to the next."""

from __future__ import annotations

import math
from itertools import groupby

from weft.core.indices import EMPTY, Indices, split_evenly
from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.core.partition import Partition


def tours(mesh: Mesh, machines: int) -> list[list[int]]:
    """By machine, the order in which it visits all: its Ulysses group first, then one group after another.

    At each step every machine is visited by exactly one other.
    """
    devices = mesh.ranks // machines
    torus = math.gcd(machines, len({rank // devices for rank in mesh.groups("ulysses")[0]}))
    groups = machines // torus
    return [
        [
            (machine // torus + group) % groups * torus + (machine + step) % torus
            for group in range(groups)
            for step in range(torus)
        ]
        for machine in range(machines)
    ]


def mates_and_columns(
    mesh: Mesh, partition: Partition, machines: int
) -> tuple[list[tuple[int, ...]], list[Indices]]:
    """By rank: those of its ring on its machine, and the columns of all the ring that it fetches for them."""
    devices = mesh.ranks // machines
    mates: list[tuple[int, ...]] = [()] * mesh.ranks
    cols = [EMPTY] * mesh.ranks
    for ring in mesh.groups("ring"):
        inside = [tuple(group) for _, group in groupby(ring, key=lambda rank: rank // devices)]
        for here in inside:
            for rank in here:
                mates[rank] = here
            for there in inside:
                for place, rank in enumerate(there):
                    to = here[place % len(here)]
                    cols[to] = cols[to] | partition.cols[rank]
    return mates, cols


def by_machine(layout: Layout, machines: int) -> list[Indices]:
    """What the devices of each machine hold together."""
    devices = layout.ranks // machines
    ranks = [range(m * devices, (m + 1) * devices) for m in range(machines)]
    return [Indices.from_runs(run for rank in some for run in layout.held(rank).runs) for some in ranks]


def view(held: list[Indices], unit: int, tour: list[int]) -> list[Indices]:
    """In the order of a tour, the units whose first token is there, and on no machine visited before."""
    size = max(tokens.runs[-1][1] for tokens in held if tokens)
    found: list[Indices] = []
    seen = EMPTY
    for machine in tour:
        begun = Indices.from_runs(
            (-(-a // unit) * unit, min(-(-b // unit) * unit, size)) for a, b in held[machine].runs
        )
        found.append(begun - seen)
        seen = seen | begun
    return found


def in_stages(tokens: Indices, seen: list[Indices], unit: int, chunks: int) -> list[Indices]:
    """What is here in one stage, then what lies on each other machine in `chunks` of them."""
    here, *others = (tokens & there for there in seen)
    return [here, *(chunk for part in others for chunk in cut(part, unit, chunks))]


def cut(tokens: Indices, unit: int, parts: int) -> list[Indices]:
    """Whole units in parts of equal number.

    >>> cut(Indices.span(4, 18), 4, 2)
    [Indices(4-11), Indices(12-17)]
    """
    blocks = tokens.blocks(unit)
    found: list[Indices] = []
    for start, stop in split_evenly(blocks.size, parts):
        runs: list[tuple[int, int]] = []
        at = 0
        for a, b in blocks.runs:
            runs.append(((a + max(0, start - at)) * unit, min(b, a + stop - at) * unit))
            at += b - a
        found.append(tokens & Indices.from_runs(runs))
    return found
