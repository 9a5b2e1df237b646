"""Ways to spoil a schedule: each takes a sound one and returns it with one thing changed, or None."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from tests.cases import random_case
from tests.schedule.partitions import random_schedule
from weft.core.errors import ScheduleError
from weft.core.indices import Indices
from weft.core.schedule import Attend, Exchange, Op, Piece, Schedule, Transfer
from weft.schedule.reverse import reverse
from weft.schedule.verify import verify

Rng = np.random.Generator
Mutation = Callable[[Rng, Schedule], Schedule | None]


def mutants(kind: str, *, backward: bool) -> Iterator[Schedule]:
    """Endlessly many corruptions of one kind, of schedules of all kinds."""
    rng = np.random.default_rng([sorted(KINDS).index(kind), backward])
    while True:
        schedule = sound(rng, backward=backward)
        for _ in range(3):
            if (mutant := KINDS[kind](rng, schedule)) and mutant.ops != schedule.ops:
                yield mutant


def sound(rng: Rng, *, backward: bool) -> Schedule:
    """A schedule that verifies: of a builder's own partition, or of one at random."""
    for _ in range(99):
        case = random_case(rng, max_tokens=59, max_ranks=5)
        schedule = case.schedule if rng.random() < 0.5 else random_schedule(rng, case)
        if backward:
            schedule = reverse(schedule, keep=str(rng.choice(["all", "none"])))
        if case.problem.ranks > 1 and schedule.ops and is_sound(schedule):
            return schedule
    raise AssertionError("verify refuses everything")


def is_sound(schedule: Schedule) -> bool:
    try:
        verify(schedule)
    except ScheduleError:
        return False
    return True


def drop_op(rng: Rng, schedule: Schedule) -> Schedule | None:
    at = pick(rng, len(schedule.ops))
    return with_ops(schedule, schedule.ops[:at] + schedule.ops[at + 1 :])


def double_op(rng: Rng, schedule: Schedule) -> Schedule | None:
    """The second one anywhere after the first."""
    at = pick(rng, len(schedule.ops))
    to = int(rng.integers(at, len(schedule.ops))) + 1
    return with_ops(schedule, (*schedule.ops[:to], schedule.ops[at], *schedule.ops[to:]))


def move_op_earlier(rng: Rng, schedule: Schedule) -> Schedule | None:
    at = pick(rng, len(schedule.ops))
    rest, to = schedule.ops[:at] + schedule.ops[at + 1 :], pick(rng, at + 1)
    return with_ops(schedule, (*rest[:to], schedule.ops[at], *rest[to:]))


def move_op_later(rng: Rng, schedule: Schedule) -> Schedule | None:
    at = pick(rng, len(schedule.ops))
    rest, to = schedule.ops[:at] + schedule.ops[at + 1 :], int(rng.integers(at, len(schedule.ops)))
    return with_ops(schedule, (*rest[:to], schedule.ops[at], *rest[to:]))


def drop_transfer(rng: Rng, schedule: Schedule) -> Schedule | None:
    return with_transfer(rng, schedule, lambda _: [])


def double_transfer(rng: Rng, schedule: Schedule) -> Schedule | None:
    return with_transfer(rng, schedule, lambda t: [t, t])


def repeat_transfer(rng: Rng, schedule: Schedule) -> Schedule | None:
    """Again at another point, where it may meet other data."""
    moves = [t for _, t in schedule.transfers()]
    if not moves:
        return None
    to = pick(rng, len(schedule.ops) + 1)
    again = Exchange((moves[pick(rng, len(moves))],), "again")
    return with_ops(schedule, (*schedule.ops[:to], again, *schedule.ops[to:]))


def move_transfer(rng: Rng, schedule: Schedule) -> Schedule | None:
    """Out of its exchange to another point."""
    found: list[Transfer] = []
    rest = with_transfer(rng, schedule, lambda t: found.append(t) or [])
    if rest is None:
        return None
    to = pick(rng, len(rest.ops) + 1)
    return with_ops(schedule, (*rest.ops[:to], Exchange(tuple(found), "moved"), *rest.ops[to:]))


def send_elsewhere(rng: Rng, schedule: Schedule) -> Schedule | None:
    ranks = schedule.problem.ranks
    return with_transfer(rng, schedule, lambda t: [replace(t, dst=other(rng, ranks, t.dst))])


def send_from_elsewhere(rng: Rng, schedule: Schedule) -> Schedule | None:
    ranks = schedule.problem.ranks
    return with_transfer(rng, schedule, lambda t: [replace(t, src=other(rng, ranks, t.src))])


def turn_around(rng: Rng, schedule: Schedule) -> Schedule | None:
    return with_transfer(rng, schedule, lambda t: [Transfer(t.piece, t.dst, t.src)])


def shrink_transfer(rng: Rng, schedule: Schedule) -> Schedule | None:
    return with_transfer(rng, schedule, lambda t: [replace(t, piece=p) for p in shrunk(rng, t.piece)])


def attend_elsewhere(rng: Rng, schedule: Schedule) -> Schedule | None:
    ranks = schedule.problem.ranks
    return with_attend(rng, schedule, lambda op: [replace(op, rank=other(rng, ranks, op.rank))])


def shrink_queries(rng: Rng, schedule: Schedule) -> Schedule | None:
    return with_attend(rng, schedule, lambda op: [replace(op, q=q) for q in shrunk(rng, op.q)])


def shrink_keys(rng: Rng, schedule: Schedule) -> Schedule | None:
    return with_attend(rng, schedule, lambda op: [replace(op, kv=kv) for kv in shrunk(rng, op.kv)])


def shift_keys(rng: Rng, schedule: Schedule) -> Schedule | None:
    """The keys of another Attend."""
    keys = [op.kv for _, op in schedule.attends()]
    return with_attend(rng, schedule, lambda op: [replace(op, kv=keys[pick(rng, len(keys))])])


def carry_elsewhere(rng: Rng, schedule: Schedule) -> Schedule | None:
    """An Attend on another rank, which is sent what it does not have at home."""
    attends = list(schedule.attends())
    if not attends:
        return None
    at, op = attends[pick(rng, len(attends))]
    rank = other(rng, schedule.problem.ranks, op.rank)
    lacking = [
        replace(piece, tokens=piece.tokens - schedule.problem.home(piece.tensor).held(rank))
        for piece in (op.q, op.kv)
    ]
    carried = Exchange(tuple(Transfer(piece, op.rank, rank) for piece in lacking if piece), "carried")
    new = (carried, replace(op, rank=rank)) if carried.transfers else (replace(op, rank=rank),)
    return with_ops(schedule, schedule.ops[:at] + new + schedule.ops[at + 1 :])


def send_more(rng: Rng, schedule: Schedule) -> Schedule | None:
    """A transfer that nobody asked for, of something that is likely to be there."""
    problem = schedule.problem
    tensor = str(rng.choice(["q", "kv", "do", "dq", "dkv"] if schedule.backward else ["q", "kv", "o"]))
    src, to = pick(rng, problem.ranks), pick(rng, len(schedule.ops) + 1)
    pieces = [part for _, op in schedule.attends() for part in (op.q, op.kv) if op.rank == src]
    pieces = [p for p in pieces if (p.tensor == "kv") == tensor.endswith("kv")]
    tokens = problem.home(tensor).held(src)
    heads = Indices.span(0, problem.kv_heads if tensor.endswith("kv") else problem.heads)
    if pieces and rng.random() < 0.5:
        heads, tokens = pieces[0].heads, pieces[0].tokens
    piece = Piece(tensor, heads, tokens)
    if not piece:
        return None
    more = Exchange((Transfer(piece, src, other(rng, problem.ranks, src)),), "more")
    return with_ops(schedule, (*schedule.ops[:to], more, *schedule.ops[to:]))


KINDS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        drop_op,
        double_op,
        move_op_earlier,
        move_op_later,
        drop_transfer,
        double_transfer,
        repeat_transfer,
        move_transfer,
        send_elsewhere,
        send_from_elsewhere,
        turn_around,
        shrink_transfer,
        attend_elsewhere,
        shrink_queries,
        shrink_keys,
        shift_keys,
        carry_elsewhere,
        send_more,
    )
}


def pick(rng: Rng, count: int) -> int:
    return int(rng.integers(count))


def other(rng: Rng, ranks: int, rank: int) -> int:
    return (rank + 1 + pick(rng, ranks - 1)) % ranks


def with_ops(schedule: Schedule, ops: tuple[Op, ...]) -> Schedule:
    return replace(schedule, ops=ops)


def with_attend(rng: Rng, schedule: Schedule, change: Callable[[Attend], list[Attend]]) -> Schedule | None:
    places = [index for index, _ in schedule.attends()]
    if not places:
        return None
    at = places[pick(rng, len(places))]
    return with_ops(schedule, (*schedule.ops[:at], *change(schedule.ops[at]), *schedule.ops[at + 1 :]))


def with_transfer(
    rng: Rng, schedule: Schedule, change: Callable[[Transfer], list[Transfer]]
) -> Schedule | None:
    places = [index for index, op in enumerate(schedule.ops) if isinstance(op, Exchange)]
    if not places:
        return None
    at = places[pick(rng, len(places))]
    old = schedule.ops[at].transfers
    n = pick(rng, len(old))
    new = replace(schedule.ops[at], transfers=(*old[:n], *change(old[n]), *old[n + 1 :]))
    left = (new,) if new.transfers else ()
    return with_ops(schedule, schedule.ops[:at] + left + schedule.ops[at + 1 :])


def shrunk(rng: Rng, piece: Piece) -> list[Piece]:
    """Without a head, a token or a block of tokens; nothing, if nothing is left."""
    what = rng.choice(["heads", "tokens", "block"])
    if what == "heads":
        lost = piece.heads.array[pick(rng, piece.heads.size)]
        smaller = replace(piece, heads=piece.heads - Indices.of([lost]))
    else:
        lost = piece.tokens.array[pick(rng, piece.tokens.size)]
        gone = Indices.of([lost]) if what == "tokens" else Indices.span(lost // 8 * 8, lost // 8 * 8 + 8)
        smaller = replace(piece, tokens=piece.tokens - gone)
    return [smaller] if smaller else []
