"""Tours: the order in which each machine visits the others, and which tokens it gets from each."""

from __future__ import annotations

import math
from itertools import groupby

from weft.core.indices import EMPTY, Indices, split_evenly
from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.core.partition import Partition


def tours(mesh: Mesh, machines: int) -> list[list[int]]:
    """Return the order in which each machine visits all: its Ulysses group first, then the other groups.

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
    """Return, by rank, the ranks of its ring on its machine, and the columns of the ring that it fetches."""
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
    """Return the indices that the devices of each machine hold together."""
    devices = layout.ranks // machines
    ranks = [range(m * devices, (m + 1) * devices) for m in range(machines)]
    return [Indices.from_runs(run for rank in some for run in layout.held(rank).runs) for some in ranks]


def view(held: list[Indices], unit: int, tour: list[int]) -> list[Indices]:
    """Return, for each machine of a tour, the units that begin there and on no machine before it."""
    size = max(tokens.runs[-1][1] for tokens in held if tokens)
    units: list[Indices] = []
    visited = EMPTY
    for machine in tour:
        begun = Indices.from_runs(
            (-(-a // unit) * unit, min(-(-b // unit) * unit, size)) for a, b in held[machine].runs
        )
        units.append(begun - visited)
        visited = visited | begun
    return units


def in_stages(tokens: Indices, machines: list[Indices], unit: int, chunks: int) -> list[Indices]:
    """Split tokens into one stage on the first machine, then `chunks` stages on each of the others."""
    here, *others = (tokens & held for held in machines)
    return [here, *(chunk for tokens in others for chunk in cut(tokens, unit, chunks))]


def cut(tokens: Indices, unit: int, parts: int) -> list[Indices]:
    """Split tokens into stages of equally many whole units.

    >>> cut(Indices.span(4, 18), 4, 2)
    [Indices(4-11), Indices(12-17)]
    """
    blocks = tokens.blocks(unit)
    stages: list[Indices] = []
    for start, stop in split_evenly(blocks.size, parts):
        runs: list[tuple[int, int]] = []
        at = 0
        for a, b in blocks.runs:
            runs.append(((a + max(0, start - at)) * unit, min(b, a + stop - at) * unit))
            at += b - a
        stages.append(tokens & Indices.from_runs(runs))
    return stages
