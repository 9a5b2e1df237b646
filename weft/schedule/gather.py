"""Gather: each rank keeps its rows and fetches only the key/value blocks that its tiles need.

Heads with equal needs share a piece, so a mask that is the same for all heads is one transfer a pair.
"""

from __future__ import annotations

import numpy as np

from weft.core.indices import EMPTY, Indices
from weft.core.mask import BlockMask, BoolArray
from weft.core.mesh import Mesh
from weft.core.partition import Partition, Work
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Piece, Schedule, Transfer
from weft.schedule.usp import output_moves, query_moves, without_empty, without_idle


def gather(
    problem: Problem, mask: BlockMask, mesh: Mesh, partition: Partition, *, name: str = "gather"
) -> Schedule:
    """Post every fetch, attend what is held at home, then what has arrived."""
    partition = without_idle(mask, partition)
    moves: list[Transfer] = list(query_moves(problem, partition))
    near: list[Attend] = []
    far: list[Attend] = []
    for rank, works in enumerate(partition.work):
        fetched: list[Piece] = []
        for work in works:
            coming: list[Piece] = []  # groups of one work share no kv head, so only earlier works count
            for heads, tokens in needs(problem, mask, work):
                kv_heads = problem.kv_heads_of(heads)
                for source, part in problem.kv.sources(rank, tokens):
                    if source != rank:
                        missing = Piece("kv", kv_heads, part).without(fetched)
                        moves += [Transfer(piece, source, rank) for piece in missing]
                        coming += missing
                here = _whole_blocks(mask, tokens & problem.kv.held(rank))
                for attends, keys in ((near, here), (far, tokens - here)):
                    if keys:
                        query, key = Piece("q", heads, work.rows), Piece("kv", kv_heads, keys)
                        attends.append(Attend(rank, query, key))
            fetched += coming
    back = Exchange(output_moves(problem, partition), "return")
    ops = without_empty((Exchange(tuple(moves), "fetch"), *near, *far, back))
    return Schedule(name, problem, mask, mesh, ops)


def needs(problem: Problem, mask: BlockMask, work: Work) -> list[tuple[Indices, Indices]]:
    """Groups of query heads with the key/value tokens they touch; no two groups share a kv head."""
    share = problem.heads // problem.kv_heads
    groups: dict[bytes, Indices] = {}
    columns: dict[bytes, BoolArray] = {}
    table = mask.needed_by_head(work.heads, work.rows)
    start = 0
    for kv_head in problem.kv_heads_of(work.heads):
        heads = work.heads & Indices.span(kv_head * share, (kv_head + 1) * share)
        start, needed = start + heads.size, np.logical_or.reduce(table[start : start + heads.size], axis=0)
        groups[needed.tobytes()] = groups.get(needed.tobytes(), EMPTY) | heads
        columns[needed.tobytes()] = needed
    found = [(heads, mask.columns(columns[key])) for key, heads in groups.items()]
    return [(heads, tokens) for heads, tokens in found if tokens]


def _whole_blocks(mask: BlockMask, held: Indices) -> Indices:
    """The part of some tokens that is whole blocks of the mask; any part, where the mask is dense."""
    if mask.is_dense:
        return held
    size = mask.block_k
    ends = [(a, b, min(-(-b // size) * size, mask.kv_len)) for a, b in held.runs]
    return Indices.from_runs(
        (-(-start // size) * size, stop if stop == end else stop // size * size) for start, stop, end in ends
    )
