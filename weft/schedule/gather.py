"""Gather: each rank keeps its rows and fetches only the key/value blocks that its tiles need.

Heads that need the same blocks share a piece: a mask equal for all heads needs one transfer per rank pair.
"""

from __future__ import annotations

import numpy as np

from weft.core.indices import EMPTY, Indices
from weft.core.mask import BlockMask, BoolArray
from weft.core.mesh import Mesh
from weft.core.partition import Partition, WorkItem
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Piece, Schedule, Transfer
from weft.schedule.usp import all_output_transfers, query_transfers, without_empty, without_idle


def gather(
    problem: Problem, mask: BlockMask, mesh: Mesh, partition: Partition, *, name: str = "gather"
) -> Schedule:
    """Return the schedule: post all fetches, attend to local keys, then to fetched keys; return outputs."""
    partition = without_idle(mask, partition)
    moves: list[Transfer] = list(query_transfers(problem, partition))
    local: list[Attend] = []
    remote: list[Attend] = []
    for rank, items in enumerate(partition.work):
        fetched: list[Piece] = []
        for item in items:
            arriving: list[Piece] = []  # an item's groups have distinct kv heads: only other items overlap
            for heads, tokens in needs(problem, mask, item):
                kv_heads = problem.kv_heads_of(heads)
                for source, indices in problem.kv.sources(rank, tokens):
                    if source != rank:
                        missing = Piece("kv", kv_heads, indices).without(fetched)
                        moves += [Transfer(piece, source, rank) for piece in missing]
                        arriving += missing
                local_keys = _whole_blocks(mask, tokens & problem.kv.held(rank))
                for attends, keys in ((local, local_keys), (remote, tokens - local_keys)):
                    if keys:
                        query, key = Piece("q", heads, item.rows), Piece("kv", kv_heads, keys)
                        attends.append(Attend(rank, query, key))
            fetched += arriving
    outputs = Exchange(all_output_transfers(problem, partition), "return")
    ops = without_empty((Exchange(tuple(moves), "fetch"), *local, *remote, outputs))
    return Schedule(name, problem, mask, mesh, ops)


def needs(problem: Problem, mask: BlockMask, work: WorkItem) -> list[tuple[Indices, Indices]]:
    """Return groups of query heads with the key/value tokens they need; no two groups share a kv head."""
    group_size = problem.heads // problem.kv_heads
    groups: dict[bytes, Indices] = {}
    columns: dict[bytes, BoolArray] = {}
    table = mask.needed_by_head(work.heads, work.rows)
    start = 0
    for kv_head in problem.kv_heads_of(work.heads):
        heads = work.heads & Indices.span(kv_head * group_size, (kv_head + 1) * group_size)
        start, needed = start + heads.size, np.logical_or.reduce(table[start : start + heads.size], axis=0)
        groups[needed.tobytes()] = groups.get(needed.tobytes(), EMPTY) | heads
        columns[needed.tobytes()] = needed
    pairs = [(heads, mask.columns(columns[key])) for key, heads in groups.items()]
    return [(heads, tokens) for heads, tokens in pairs if tokens]


def _whole_blocks(mask: BlockMask, held: Indices) -> Indices:
    """Return the held tokens whose mask block is held completely; all of them if the mask is dense."""
    if mask.is_dense:
        return held
    size = mask.block_k
    runs = [(a, b, min(-(-b // size) * size, mask.kv_len)) for a, b in held.runs]  # start, stop, block end
    return Indices.from_runs(
        (-(-start // size) * size, stop if stop == end else stop // size * size) for start, stop, end in runs
    )
