"""Switch: redistribute a tensor from one sharded dim to another, in one exchange.

time │ 0 0 0 0        rank i has its part of the old dim, rank j gets its part of the new one:
     │ 1 1 1 1        what travels from i to j is the rectangle (part i) × (part j)
     └─ space
"""

from __future__ import annotations

from weft.core.indices import Indices
from weft.core.mesh import Mesh
from weft.core.problem import Switch
from weft.core.schedule import Exchange, Piece, Schedule, Transfer


def switch(problem: Switch) -> Schedule:
    """Send each rank its new shard from the ranks that hold it.

    >>> from weft.core.layout import Layout
    >>> time, space = Layout.even(3, 2, dim="time"), Layout.even(5, 2, dim="space")
    >>> print(switch(Switch.of(time, space, width=8)).ops[0])
    Exchange time → space(x[heads 3-4, tokens 0-1] 0→1; x[heads 0-2, tokens 2] 1→0)
    """
    before, after, ranks = problem.before, problem.after, problem.ranks
    moves = [
        Transfer(Piece("x", after.held(dst), tokens), src, dst)
        for dst in range(ranks)
        if after.held(dst)
        for src, tokens in before.sources(dst, Indices.span(0, before.size))
        if src != dst
    ]
    # In each round every rank sends to another one, so that no rank receives from all at once.
    moves.sort(key=lambda move: ((move.dst - move.src) % ranks, move.src))
    ops = (Exchange(tuple(moves), str(problem)),) if moves else ()
    return Schedule("switch", problem, None, Mesh.of(sequence=ranks), ops)
