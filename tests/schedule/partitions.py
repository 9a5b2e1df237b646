"""Partitions that no planner would make: any block on any rank, for any head."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from tests.cases import Case
from weft.core.indices import Indices
from weft.core.mesh import Mesh
from weft.core.partition import Partition, WorkItem
from weft.core.schedule import Schedule
from weft.schedule.gather import gather
from weft.schedule.usp import usp


def random_schedule(rng: np.random.Generator, case: Case) -> Schedule:
    """Work and columns dealt out at random, in a ring or a gather."""
    builder = (gather, usp)[int(rng.integers(2))]
    return builder(case.problem, case.mask, Mesh.of(ring=case.problem.ranks), random_partition(rng, case))


def random_partition(rng: np.random.Generator, case: Case) -> Partition:
    """Each (head, q block) goes to any rank, each kv block too; a rank gets one work a head or fewer."""
    ranks, mask = case.problem.ranks, case.mask
    taker = rng.integers(ranks, size=(mask.heads, mask.q_blocks))
    taker[rng.random(mask.heads) < 0.5] = taker[0]  # heads dealt alike make works of several heads
    bringer = rng.integers(ranks, size=mask.kv_blocks)
    work: list[tuple[WorkItem, ...]] = []
    for rank in range(ranks):
        rows = {head: tuple(np.flatnonzero(taker[head] == rank).tolist()) for head in range(mask.heads)}
        alike = groupby(sorted(rows, key=rows.__getitem__), key=rows.__getitem__)
        work.append(
            tuple(
                WorkItem(Indices.of(heads), tokens(blocks, mask.block_q, mask.q_len))
                for blocks, heads in alike
                if blocks
            )
        )
    cols = [np.flatnonzero(bringer == rank).tolist() for rank in range(ranks)]
    return Partition(tuple(work), tuple(tokens(blocks, mask.block_k, mask.kv_len) for blocks in cols))


def tokens(blocks: tuple[int, ...] | list[int], size: int, length: int) -> Indices:
    return Indices.from_runs((block * size, min((block + 1) * size, length)) for block in blocks)
