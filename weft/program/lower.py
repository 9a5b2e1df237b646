"""Lower: turn a schedule into the program of one rank. The only place that decides what a rank does.

An operand of an attention is used where it lies: in the caller's tensor (ring, hop 0), in the message that
brought it (ring, later hops); only what comes from several places is put together (Ulysses). A message that
equals one that came, or an operand, is sent as it lies. Steps are ordered for memory: before an exchange is
posted, the gradients that have arrived are added to their sum, and what earlier exchanges sent is released.
"""

from __future__ import annotations

from weft.core.collector import without_collector
from weft.core.problem import Switch
from weft.core.schedule import Schedule
from weft.program.backward import BackwardLowering
from weft.program.forward import ForwardLowering
from weft.program.lowering import Lowering
from weft.program.pieces import Pieces, parts_of
from weft.program.redistribute import Redistribution
from weft.program.steps import Program, Target

INFERENCE = Target()


def lower(schedule: Schedule, rank: int, target: Target = INFERENCE) -> Program:
    """Return what `rank` does when it runs a schedule, forward or backward."""
    pieces = Pieces()
    parts = parts_of(schedule, (rank,), pieces)
    return _kind(schedule)(schedule, rank, target, pieces).write(parts[rank])


def lower_all(schedule: Schedule, target: Target = INFERENCE) -> list[Program]:
    """Return the programs of all ranks, in one pass over the schedule."""
    kind, pieces = _kind(schedule), Pieces()
    with without_collector():
        parts = parts_of(schedule, range(schedule.problem.ranks), pieces)
        return [kind(schedule, rank, target, pieces).write(own) for rank, own in parts.items()]


def _kind(schedule: Schedule) -> type[Lowering]:
    if isinstance(schedule.problem, Switch):
        return Redistribution
    return BackwardLowering if schedule.backward else ForwardLowering
