"""USP: exchange heads along `ulysses`, pass keys and values along `ring`.

    home ──scatter──▶ rank (ring r, ulysses u) holds heads u of rows r, and columns r
                      hop 0: attend own columns      while columns r go on to r+1
                      hop 1: attend columns r-1      while they go on to r+1 …
         ◀──return──  finished outputs go home

One scatter does both the head exchange and any permutation of blocks that the partition asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from weft.core.indices import EMPTY, Indices
from weft.core.mask import BlockMask, BoolArray
from weft.core.mesh import Mesh
from weft.core.partition import Partition, WorkItem
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Op, Piece, Schedule, Transfer

MAX_RESENT = 1 / 4
"""Share of a chunk that its next reader may hold and be sent all the same; two hops of a ring do so."""


def usp(
    problem: Problem, mask: BlockMask, mesh: Mesh, partition: Partition, *, name: str = "usp"
) -> Schedule:
    """Build Ulysses × ring on any mesh and any partition; each alone is the special case of one axis.

    The partition decides whether a ring is contiguous or zigzag.
    """
    partition = without_idle(mask, partition)
    chunks = _chunks(problem, mesh, partition)
    wants = [_wants(problem, mask, works) for works in partition.work]
    reach = _reach(mask, mesh, chunks, wants)
    ops: list[Op] = [
        Exchange((*query_transfers(problem, partition), *_scatter_kv(problem, chunks)), "scatter")
    ]
    for hop in range(mesh.size("ring")):
        shift: list[Transfer] = []
        attends: list[Attend] = []
        for ring in mesh.groups("ring"):
            for position, rank in enumerate(ring):
                origin = ring[position - hop]
                if reach[origin] > hop:
                    shift += _pass_on(problem, chunks[origin], rank, ring[(position + 1) % len(ring)])
                # The rank's own copy of replicated keys joins its own columns, so it costs no extra call.
                tokens = chunks[origin].tokens
                if hop == 0 and partition.shared:
                    tokens = tokens | partition.shared
                if tokens and chunks[origin].heads:
                    blocks = tokens.blocks(mask.block_k)
                    attends += [
                        Attend(rank, want.q, _keys(chunks[origin], want.kv_heads, tokens))
                        for want in wants[rank]
                        if any_active(want.columns, blocks)
                    ]
        ops += [Exchange(tuple(shift), f"hop {hop + 1}"), *attends]
    ops.append(Exchange(all_output_transfers(problem, partition), "return"))
    return Schedule(name, problem, mask, mesh, without_empty(ops))


def without_empty(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Leave out exchanges in which nothing moves."""
    return tuple(op for op in ops if isinstance(op, Attend) or op.transfers)


def without_idle(mask: BlockMask, partition: Partition) -> Partition:
    """Leave out work without active tiles, so that nothing moves for it."""
    busy = tuple(
        tuple(work for work in works if needed_columns(mask, (work,)).any()) for works in partition.work
    )
    return Partition(busy, partition.cols, partition.shared)


def query_transfers(problem: Problem, partition: Partition) -> tuple[Transfer, ...]:
    """Send queries from home to the ranks that compute them."""
    return tuple(
        Transfer(Piece("q", work.heads, tokens), source, rank)
        for rank, works in enumerate(partition.work)
        for work in works
        for source, tokens in problem.q.sources(rank, work.rows)
        if source != rank
    )


def all_output_transfers(problem: Problem, partition: Partition) -> tuple[Transfer, ...]:
    """Send outputs from the ranks that compute them to every rank that holds the query's token."""
    return tuple(
        move
        for rank, works in enumerate(partition.work)
        for work in works
        for move in output_transfers(problem, rank, work.heads, work.rows)
    )


def output_transfers(problem: Problem, rank: int, heads: Indices, rows: Indices) -> Iterator[Transfer]:
    """Send the outputs of some rows that a rank has computed to every other rank that holds a row."""
    for home in problem.q.holders(rows):
        if home != rank and (tokens := rows & problem.q.held(home)):
            yield Transfer(Piece("o", heads, tokens), rank, home)


def needed_columns(mask: BlockMask, works: tuple[WorkItem, ...]) -> BoolArray:
    """Return which kv blocks a rank's work touches."""
    needed = np.zeros(mask.kv_blocks, dtype=bool)
    for work in works:
        needed |= mask.needed(work.heads, work.rows)
    return needed


def _chunks(problem: Problem, mesh: Mesh, partition: Partition) -> dict[int, Piece]:
    """Return what each rank contributes to its ring: its columns, for all heads of the ring."""
    chunks: dict[int, Piece] = {}
    for ring in mesh.groups("ring"):
        used = [run for rank in ring for run in partition.heads_of(rank).runs]
        heads = problem.kv_heads_of(Indices.from_runs(used))
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
    """Send a chunk to the next rank of the ring, without what that rank holds at home.

    Mostly that is the same piece again, which is used and passed on as it lies; a smaller piece would have to
    be packed and put together. So a few tokens of a shared block that the next rank holds are sent too.
    """
    held = problem.kv.held(following)
    common = chunk.tokens & held if chunk.tokens.meets(held) else EMPTY
    if common.size > MAX_RESENT * chunk.tokens.size:
        chunk = Piece("kv", chunk.heads, chunk.tokens - common)
    return [Transfer(chunk, rank, following)] if chunk else []


def _keys(chunk: Piece, heads: Indices, tokens: Indices) -> Piece:
    """Return the piece of a chunk, or the chunk itself if it is the whole chunk (the usual case)."""
    same = tokens is chunk.tokens and heads == chunk.heads
    return chunk if same else Piece("kv", heads, tokens)


class _Want(NamedTuple):
    """One work item of a rank, and which kv blocks it touches."""

    q: Piece
    kv_heads: Indices
    columns: BoolArray


def _wants(problem: Problem, mask: BlockMask, works: tuple[WorkItem, ...]) -> list[_Want]:
    return [
        _Want(
            Piece("q", work.heads, work.rows), problem.kv_heads_of(work.heads), needed_columns(mask, (work,))
        )
        for work in works
    ]


def _reach(mask: BlockMask, mesh: Mesh, chunks: dict[int, Piece], wants: list[list[_Want]]) -> dict[int, int]:
    """Return the last hop at which the chunk of each rank is needed; it is passed no further."""
    reach: dict[int, int] = {}
    for ring in mesh.groups("ring"):
        for position, origin in enumerate(ring):
            blocks = chunks[origin].tokens.blocks(mask.block_k) if chunks[origin] else EMPTY
            needed = (
                hop
                for hop in range(len(ring) - 1, 0, -1)
                if any(any_active(w.columns, blocks) for w in wants[ring[(position + hop) % len(ring)]])
            )
            reach[origin] = next(needed, 0)
    return reach


def any_active(columns: BoolArray, blocks: Indices) -> bool:
    """Whether any of some kv blocks is True in `columns`."""
    return any(columns[start:stop].any() for start, stop in blocks.runs)
