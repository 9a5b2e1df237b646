"""Lower: turn a schedule into the program of one rank. The only place that decides what a rank does.

An operand of an attention is used where it lies: in the caller's tensor (ring, hop 0), in the message that
brought it (ring, later hops); only what comes from several places is put together (Ulysses). A message that
equals one that came, or an operand, is sent as it lies. Steps are ordered for memory: before an exchange is
posted, the gradients that have arrived are added to their sum, and what earlier exchanges sent is released.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weft.core.problem import Problem, Switch
from weft.core.schedule import Attend, Exchange, Schedule
from weft.program.lowering import Lowering, Messages
from weft.program.pieces import Pieces
from weft.program.steps import Program, Target

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from weft.program.lowering import RankOp

INFERENCE = Target()


def lower(schedule: Schedule, rank: int, target: Target = INFERENCE) -> Program:
    """Return what `rank` does when it runs a schedule, forward or backward."""
    return _lower_ranks(schedule, (rank,), target)[0]


def lower_all(schedule: Schedule, target: Target = INFERENCE) -> list[Program]:
    """Return the programs of all ranks, in one pass over the schedule."""
    with without_collector():
        return _lower_ranks(schedule, range(schedule.problem.ranks), target)


def _lower_ranks(schedule: Schedule, ranks: Iterable[int], target: Target) -> list[Program]:
    direction, pieces = _direction(schedule), Pieces()
    ops = _ops_by_rank(schedule, ranks, pieces)
    return [_write(direction(schedule, rank, target, pieces), own) for rank, own in ops.items()]


def _direction(schedule: Schedule) -> type[Lowering]:
    if isinstance(schedule.problem, Switch):
        from weft.program.redistribute import Redistribution

        return Redistribution
    if schedule.backward:
        from weft.program.backward import BackwardLowering

        return BackwardLowering
    from weft.program.forward import ForwardLowering

    return ForwardLowering


def _ops_by_rank(schedule: Schedule, ranks: Iterable[int], numbers: Pieces) -> dict[int, list[RankOp]]:
    """Each rank's share of every operation, in one pass over the schedule."""
    ops: dict[int, list[RankOp]] = {rank: [] for rank in ranks}
    every = schedule.problem.ranks
    for index, op in enumerate(schedule.ops):
        if isinstance(op, Attend):
            if op.rank in ops:
                ops[op.rank].append((index, op))
            continue
        collective = len(op.transfers) >= every * (every - 1) > 0 and _is_bulk(op, schedule.problem)
        if len(ops) < every:  # most transfers involve other ranks only
            op = Exchange(tuple([t for t in op.transfers if t.src in ops or t.dst in ops]), op.label)  # noqa: PLW2901
        tensors = frozenset([transfer.piece.tensor for transfer in op.transfers])
        by_rank: dict[int, Messages] = {}
        for (src, dst), pieces in op.messages.items():
            message = numbers.message(pieces)
            for rank, peer in ((src, dst), (dst, src)):
                if rank in ops:
                    if rank not in by_rank:
                        by_rank[rank] = Messages(op.label, {}, {}, collective, tensors)
                    (by_rank[rank].sends if rank == src else by_rank[rank].receives)[peer] = message
        for rank, messages in by_rank.items():
            ops[rank].append((index, messages))
    return ops


def _is_bulk(op: Exchange, problem: Problem | Switch) -> bool:
    """Whether one all_to_all can do an exchange: between any two ranks there is a message."""
    pairs = {(transfer.src, transfer.dst) for transfer in op.transfers}
    gathers = isinstance(problem, Switch) and problem.dims[1] is None  # every message of a rank is the same
    # The messages lie in one buffer without gaps, so their items must be of one size.
    by_tensor = {transfer.piece.tensor: transfer.piece for transfer in op.transfers}
    mixed = len({piece.is_sum for piece in by_tensor.values()}) > 1
    return len(pairs) == problem.ranks * (problem.ranks - 1) and not gathers and not mixed


def _write(lowering: Lowering, ops: list[RankOp]) -> Program:
    lowering.begin([op for _, op in ops if isinstance(op, Attend)], ops)
    for index, op in ops:
        if isinstance(op, Attend):
            lowering.attend(index, op)
        else:
            from weft.program.exchanges import exchange

            exchange(lowering, index, op)
    lowering.finish()
    lowering.wait_for_all()
    return lowering.program


@contextmanager
def without_collector() -> Generator[None]:
    """Pause the garbage collector: among a million values without cycles it would take half of the time.

    Drop what is no longer needed before the end, or the collector looks through it all the same.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
