"""USP: heads are exchanged along `ulysses`, keys and values travel along `ring`.

    home ──scatter──▶ rank (ring r, ulysses u) holds heads u of rows r, and columns r
                      hop 0: attend own columns      while columns r go on to r+1
                      hop 1: attend columns r-1      while they go on to r+1 …
         ◀──return──  finished outputs go home

One scatter does both the head exchange and any permutation of blocks that the partition asks for.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.core.indices import EMPTY, Indices
from weft.core.mask import BlockMask, BoolArray
from weft.core.mesh import Mesh
from weft.core.partition import Partition, Work
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Op, Piece, Schedule, Transfer


def usp(
    problem: Problem, mask: BlockMask, mesh: Mesh, partition: Partition, *, name: str = "usp"
) -> Schedule:
    """Ulysses × ring on any mesh and any partition; each alone is the special case of one axis."""
    partition = without_idle(mask, partition)
    chunks = _chunks(problem, mesh, partition)
    ops: list[Op] = [Exchange((*query_moves(problem, partition), *_scatter_kv(problem, chunks)), "scatter")]
    for hop in range(mesh.size("ring")):
        shift: list[Transfer] = []
        attends: list[Attend] = []
        for ring in mesh.groups("ring"):
            needs = [needed_columns(mask, partition.work[rank]) for rank in ring]
            for position, rank in enumerate(ring):
                origin = ring[position - hop]
                chunk = chunks[origin]
                later = range(hop + 1, len(ring))
                if any(_meets(needs[(position - hop + k) % len(ring)], chunk, mask) for k in later):
                    shift += _pass_on(problem, chunk, rank, ring[(position + 1) % len(ring)])
                # The rank's own copy of replicated keys joins its own columns, so it costs no extra call.
                extra = partition.shared if hop == 0 else EMPTY
                kv = Piece("kv", chunk.heads, chunk.tokens | extra)
                if _meets(needs[position], kv, mask):
                    attends += [
                        Attend(rank, Piece("q", w.heads, w.rows), _kv_for(problem, w, kv))
                        for w in partition.work[rank]
                        if mask.any_active(w.heads, w.rows, kv.tokens)
                    ]
        ops += [Exchange(tuple(shift), f"hop {hop + 1}"), *attends]
    ops.append(Exchange(output_moves(problem, partition), "return"))
    return Schedule(name, problem, mask, mesh, without_empty(ops))


def without_empty(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Leave out exchanges in which nothing moves."""
    return tuple(op for op in ops if isinstance(op, Attend) or op.transfers)


def without_idle(mask: BlockMask, partition: Partition) -> Partition:
    """Leave out work in which no tile is active: nothing need move for it."""
    busy = tuple(
        tuple(work for work in works if needed_columns(mask, (work,)).any()) for works in partition.work
    )
    return Partition(busy, partition.cols, partition.shared)


def query_moves(problem: Problem, partition: Partition) -> tuple[Transfer, ...]:
    """Queries go from home to whoever computes them."""
    return tuple(
        Transfer(Piece("q", work.heads, tokens), source, rank)
        for rank, works in enumerate(partition.work)
        for work in works
        for source, tokens in problem.q.sources(rank, work.rows)
        if source != rank
    )


def output_moves(problem: Problem, partition: Partition) -> tuple[Transfer, ...]:
    """Outputs go from whoever computed them to every rank that holds the query's token."""
    return tuple(
        Transfer(Piece("o", work.heads, tokens), rank, home)
        for rank, works in enumerate(partition.work)
        for work in works
        for home in range(problem.ranks)
        if home != rank and (tokens := work.rows & problem.q.held(home))
    )


def needed_columns(mask: BlockMask, works: tuple[Work, ...]) -> BoolArray:
    """Which kv blocks a rank's work touches."""
    needed = np.zeros(mask.kv_blocks, dtype=bool)
    for work in works:
        needed |= mask.needed(work.heads, work.rows)
    return needed


def _chunks(problem: Problem, mesh: Mesh, partition: Partition) -> dict[int, Piece]:
    """What each rank brings into its ring: its columns, for all heads that the ring works on."""
    chunks: dict[int, Piece] = {}
    for ring in mesh.groups("ring"):
        heads = EMPTY
        for rank in ring:
            heads = heads | problem.kv_heads_of(partition.heads_of(rank))
        chunks |= {rank: Piece("kv", heads, partition.cols[rank]) for rank in ring}
    return chunks


def _scatter_kv(problem: Problem, chunks: dict[int, Piece]) -> list[Transfer]:
    return [
        Transfer(Piece("kv", chunk.heads, tokens), source, rank)
        for rank, chunk in chunks.items()
        if chunk
        for source, tokens in problem.kv.sources(rank, chunk.tokens)
        if source != rank
    ]


def _pass_on(problem: Problem, chunk: Piece, rank: int, following: int) -> list[Transfer]:
    """What the next rank of the ring does not hold at home already."""
    piece = Piece("kv", chunk.heads, chunk.tokens - problem.kv.held(following))
    return [Transfer(piece, rank, following)] if piece else []


def _kv_for(problem: Problem, work: Work, kv: Piece) -> Piece:
    return Piece("kv", problem.kv_heads_of(work.heads), kv.tokens)


def _meets(needed: BoolArray, kv: Piece, mask: BlockMask) -> bool:
    blocks: Indices = kv.tokens.blocks(mask.block_k)
    return bool(kv) and any(needed[start:stop].any() for start, stop in blocks.runs)
