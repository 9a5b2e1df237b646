"""Reverse: derive the backward schedule from the forward one.

Output gradients take the reverse route of outputs. Attentions run again in forward order, over keys and
values that were saved or are sent again. Each rank's partial dK/dV is sent to its home rank as soon as its
last tile is done, and dQ to the home rank of Q. Gradients of a switched tensor take its reverse route and
are summed where copies arrive at one rank.
"""

from __future__ import annotations

from dataclasses import replace

from weft.core.errors import InputError
from weft.core.problem import Switch
from weft.core.schedule import Exchange, Op, Piece, Schedule, Transfer
from weft.schedule.usp import without_empty


def reverse(schedule: Schedule, *, keep: str = "auto") -> Schedule:
    """Return the backward schedule; `keep` says which received keys and values are saved: all, none, auto.

    Auto saves them where that at most doubles what a rank holds at home, as in Ulysses.

    >>> import weft
    >>> tokens = weft.Layout.even(2047, 5)
    >>> problem = weft.Problem(batch=1, heads=3, kv_heads=3, head_dim=64, q=tokens, kv=tokens)
    >>> reverse(weft.build("ring", problem))
    Schedule(ring on ring 5, backward: 6 exchanges, 25 attends)
    """
    if schedule.backward:
        raise InputError(f"{schedule.name} is already a backward schedule.", hint="Pass the forward one.")
    if keep not in ("all", "none", "auto"):
        raise InputError(f"keep must be 'all', 'none' or 'auto', got {keep!r}.")
    if isinstance(schedule.problem, Switch):
        back = (
            Exchange(tuple(Transfer(t.piece, t.dst, t.src) for t in op.transfers), f"{op.label} backward")
            for op in reversed(schedule.ops)
            if isinstance(op, Exchange)
        )
        return replace(schedule, ops=tuple(back), backward=True)
    if keep == "auto":
        keep = "all" if _kv_fits(schedule) else "none"
    again, moves = _again(schedule, keep)
    sent: dict[int, list[Piece]] = {}
    for _, op in schedule.attends():
        own = sent.setdefault(op.rank, [])
        for piece in op.q.without(own):
            own.append(piece)
            moves += _home(schedule, op.rank, _gradient(piece))
    first = Exchange(_output_gradients(schedule), "output gradients")
    ops = (first, *again, Exchange(tuple(moves), "gradients home"))
    return replace(schedule, ops=without_empty(ops), backward=True, kept=_kept(schedule, keep))


def _again(schedule: Schedule, keep: str) -> tuple[list[Op], list[Transfer]]:
    """Return attentions in forward order, with keys sent again and gradients home, and the moves left."""
    again: list[Op] = []
    moves: list[Transfer] = []
    ranks, full = schedule.problem.ranks, _kv_at_home(schedule)
    pending = [0] * ranks
    finished = _finished_keys(schedule)
    for index, op in enumerate(schedule.ops):
        if isinstance(op, Exchange):
            resent = [t for t in op.transfers if t.piece.tensor == "kv" and keep == "none"]
            again.append(Exchange((*resent, *moves), op.label if resent else "gradients home"))
            moves, pending = [], [0] * ranks
        else:
            if 2 * pending[op.rank] >= full:
                # No exchange follows the last hop: the gradients of two hops would wait for the end.
                again.append(Exchange(tuple(moves), "gradients home"))
                moves, pending = [], [0] * ranks
            again.append(op)
            for piece in finished.get(index, ()):
                home = _home(schedule, op.rank, _gradient(piece))
                pending[op.rank] += sum(t.piece.cells for t in home)
                moves += home
    return again, moves


def _finished_keys(schedule: Schedule) -> dict[int, list[Piece]]:
    """Return which disjoint key/value pieces of its rank each Attend is the last one to add to."""
    groups: dict[int, list[tuple[list[Piece], int]]] = {}
    for index, op in schedule.attends():
        own = groups.setdefault(op.rank, [])
        touching = [group for group in own if any(piece & op.kv for piece in group[0])]
        pieces = [piece for group in touching for piece in group[0]]
        own[:] = [group for group in own if group not in touching]
        own.append((pieces + op.kv.without(pieces), index))
    return {last: pieces for own in groups.values() for pieces, last in own}


def _gradient(piece: Piece) -> Piece:
    return Piece("d" + piece.tensor, piece.heads, piece.tokens)


def _output_gradients(schedule: Schedule) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(_gradient(t.piece), t.dst, t.src) for _, t in schedule.transfers() if t.piece.tensor == "o"
    )


def _home(schedule: Schedule, rank: int, piece: Piece) -> list[Transfer]:
    """Send a partial gradient to the copies that were read; the rank's own tokens stay."""
    sources = schedule.problem.home(piece.tensor).sources(rank, piece.tokens)
    return [
        Transfer(Piece(piece.tensor, piece.heads, tokens), rank, home)
        for home, tokens in sources
        if home != rank
    ]


def _kept(schedule: Schedule, keep: str) -> tuple[tuple[Piece, ...], ...]:
    """Return what the forward saves: received queries and computed outputs, and maybe keys and values."""
    kept: list[dict[Piece, None]] = [{} for _ in range(schedule.problem.ranks)]
    for _, transfer in schedule.transfers():
        tensor = transfer.piece.tensor
        if tensor == "q" or (tensor == "kv" and keep == "all"):
            kept[transfer.dst][transfer.piece] = None
    for _, op in schedule.attends():
        kept[op.rank][Piece("o", op.q.heads, op.q.tokens)] = None
    return tuple(tuple(pieces) for pieces in kept)


def _kv_fits(schedule: Schedule) -> bool:
    problem, _ = schedule.attention
    received = [0] * problem.ranks
    for _, transfer in schedule.transfers():
        if transfer.piece.tensor == "kv":
            received[transfer.dst] += transfer.piece.cells
    return max(received, default=0) <= _kv_at_home(schedule)


def _kv_at_home(schedule: Schedule) -> int:
    """Return the tokens × heads of keys and values that a rank holds."""
    problem, _ = schedule.attention
    return -(-problem.kv.size // problem.ranks) * problem.kv_heads
