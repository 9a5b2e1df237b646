"""Switch: a tensor that is sharded by one dim becomes sharded by another, in one exchange.

time │ 0 0 0 0        rank i has its part of the old dim, rank j gets its part of the new one:
     │ 1 1 1 1        what travels from i to j is the rectangle (part i) × (part j)
     └─ space
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.core.errors import InputError
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.problem import Switch
from weft.core.schedule import Exchange, Piece, Schedule, Transfer


def switch(problem: Switch) -> Schedule:
    """Each rank gets what it is to hold from whoever holds it now.

    >>> time, space = Layout.even(3, 2, dim="time"), Layout.even(5, 2, dim="space")
    >>> print(switch(Switch.of(time, space, width=8)).ops[0])
    Exchange time → space(x[heads 3-4, tokens 0-1] 0→1; x[heads 0-2, tokens 2] 1→0)
    """
    before, after, ranks = problem.q, problem.after, problem.ranks
    moves = [
        Transfer(Piece("x", after.held(dst), tokens), src, dst)
        for dst in range(ranks)
        if after.held(dst)
        for src, tokens in before.sources(dst, Indices.span(0, before.size))
        if src != dst
    ]
    # In each round every rank sends to another one, so that nobody is sent to by all at once.
    moves.sort(key=lambda move: ((move.dst - move.src) % ranks, move.src))
    whole = after.shared.size == after.size and ranks > 1
    label = f"gather {before.dim}" if whole else f"{before.dim} → {after.dim}"
    ops = (Exchange(tuple(moves), label),) if moves else ()
    return Schedule("switch", problem, _no_tiles(problem), Mesh.of(sequence=ranks), ops)


def gather(before: Layout, *, width: int, dtype: str = "float32") -> Schedule:
    """Every rank gets everything: a switch to a dim of one index that all ranks hold."""
    one = Layout.replicated(1, before.ranks, dim="whole")
    return switch(Switch.of(before, one, width=width, dtype=dtype))


def turned(schedule: Schedule) -> Schedule:
    """The backward of a switch: gradients go back the way the tensor came, and add up where copies meet."""
    if not isinstance(schedule.problem, Switch) or schedule.backward:
        raise InputError(f"{schedule.name} is not a forward switch.", hint="Use schedule.reverse.")
    ops = tuple(
        Exchange(tuple(Transfer(t.piece, t.dst, t.src) for t in op.transfers), f"{op.label} backward")
        for op in schedule.ops
        if isinstance(op, Exchange)
    )
    return replace(schedule, ops=ops, backward=True)


def _no_tiles(problem: Switch) -> BlockMask:
    size = problem.q.size
    tiles = np.zeros((problem.heads, 1, 1), dtype=bool)
    return BlockMask.from_tiles(tiles, q_len=size, kv_len=size, block_q=size)
