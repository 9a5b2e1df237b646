"""Verify: prove from the data alone that a schedule computes its attention, or redistributes its tensor.

The operations are walked once, in order, on boolean arrays over heads × token cells:

  coverage   every active (head, q block, kv block) is computed exactly once
  readiness  nothing is read on a rank before it has arrived, no output leaves before its last tile
  delivery   every output (backward: every gradient) gets home, once
  switching  every element of a tensor reaches each rank that is to hold it, once
  pairing    one list for all ranks: a transfer is both its send and its receive, and each operation
             waits only for earlier ones, so by induction over the list no rank waits forever
"""

from __future__ import annotations

import numpy as np

from weft.core.mask import BoolArray
from weft.core.problem import Switch
from weft.core.schedule import Attend, Schedule, Transfer
from weft.schedule.measure import ScheduleCost, measure
from weft.schedule.proof import AttentionProof, ScheduleProof


def verify(schedule: Schedule) -> ScheduleCost:
    """Raise a ScheduleError at the first operation that breaks a rule; else return the schedule's cost.

    >>> import weft
    >>> tokens = weft.Layout.even(2047, 5)
    >>> problem = weft.Problem(batch=1, heads=3, kv_heads=3, head_dim=64, q=tokens, kv=tokens)
    >>> verify(weft.build("ring", problem))
    ScheduleCost(5 ranks, 12,576,768 bytes in 20 messages, imbalance 1.001)
    """
    ops = list(enumerate(schedule.ops))
    if isinstance(schedule.problem, Switch):
        proof = _SwitchProof(schedule, schedule.problem)
        ops = ops[::-1] if schedule.backward else ops
    else:
        proof = _BackwardProof(schedule) if schedule.backward else _ForwardProof(schedule)
    for index, op in ops:
        proof.step(index, op)
    proof.end()
    return measure(schedule)


class _ForwardProof(AttentionProof):
    """Check that outputs leave only when complete and reach every rank that holds the query's token."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.arrived = np.zeros_like(self.held["q"])
        self.home = self.at_home("kv")

    def attended(self, op: Attend, rows: BoolArray, cols: BoolArray) -> None:
        pass

    def leave(self, transfer: Transfer) -> None:
        piece, src = transfer.piece, transfer.src
        if piece.tensor in self.held:
            self.require(self.held[piece.tensor][src], piece, f"rank {src} does not have")
        elif piece.tensor == "o":
            cells = self.cells.index(piece)
            here = (self.owner[cells] == src) | ~self.has_tiles[cells] | self.arrived[src][cells]
            if not here.all():
                self.fail(f"rank {src} does not compute all of this output.")
            if self.tiles_left[cells].any():
                self.fail("an output leaves before its last tile is merged.")
        else:
            self.fail(f"a forward schedule moves q, kv and o, not {piece.tensor!r}.")

    def arrive(self, transfer: Transfer) -> None:
        if transfer.piece.tensor == "o":
            cells = self.cells.index(transfer.piece)
            if (self.owner[cells] == transfer.dst).any():
                self.fail(f"rank {transfer.dst} computed some of this output itself.")
            self.copy_in(transfer, self.arrived)
        else:
            tensor = transfer.piece.tensor
            self.copy_in(transfer, self.held[tensor], self.home if tensor == "kv" else None)

    def end(self) -> None:
        self.check_all_done()
        for rank in range(self.problem.ranks):
            cells = self.cells.of(self.attention.q.held(rank), is_kv=False)
            here = (self.owner == rank) | self.arrived[rank] | ~self.has_tiles
            if not here[:, cells].all():
                head, cell = (int(axis[0]) for axis in np.nonzero(~here[:, cells]))
                block = self.q_block[cells[cell]]
                self.fail(f"output of head {head}, q block {block} never reaches rank {rank}.")


class _BackwardProof(AttentionProof):
    """Check that output gradients reach the ranks of their rows, and partial gradients go home once."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        ranks = self.problem.ranks
        self.home = {name: self.at_home(name) for name in ("q", "kv")}
        self.do_receiver = np.full((ranks, *self.owner.shape), -1, dtype=np.int64)
        self.partial = {name: np.zeros_like(self.held[name]) for name in ("q", "kv")}
        self.sent = {name: np.zeros_like(self.held[name]) for name in ("q", "kv")}

    def attended(self, op: Attend, rows: BoolArray, cols: BoolArray) -> None:
        q_cells, kv_cells = self.cells.index(op.q), self.cells.of(op.kv.tokens, is_kv=True)
        self.require(self.held["o"][op.rank], op.q, f"rank {op.rank} has not computed, so has no lse and")
        for holder in range(self.problem.ranks):
            late = rows & self.home["q"][holder][q_cells] & (self.do_receiver[holder][q_cells] != op.rank)
            if holder != op.rank and late.any():
                self.fail(f"rank {op.rank} does not have the output gradient that rank {holder} holds.")
        share = self.attention.heads // self.attention.kv_heads
        kv_rows = np.zeros((self.attention.kv_heads, len(kv_cells)), dtype=bool)
        np.logical_or.at(kv_rows, op.q.heads.array // share, cols)
        kv_heads = np.arange(self.attention.kv_heads)
        for name, cells, touched in (("q", q_cells, rows), ("kv", np.ix_(kv_heads, kv_cells), kv_rows)):
            if (touched & self.sent[name][op.rank][cells]).any():
                self.fail(f"it adds to d{name} that rank {op.rank} has already sent home.")
            self.partial[name][op.rank][cells] |= touched

    def leave(self, transfer: Transfer) -> None:
        piece, src = transfer.piece, transfer.src
        cells = self.cells.index(piece)
        if piece.tensor in ("q", "kv"):
            self.require(self.held[piece.tensor][src], piece, f"rank {src} does not have")
        elif piece.tensor == "do":
            self.require(self.home["q"][src], piece, f"rank {src} does not hold")
        elif piece.is_sum:
            name = piece.tensor[1:]
            if self.sent[name][src][cells].any():
                self.fail(f"rank {src} sends some of this gradient a second time.")
            if self.home[name][src][cells].any():
                self.fail(f"rank {src} is home to some of this gradient, which must stay.")
            self.sent[name][src][cells] = True
        else:
            self.fail(f"a backward schedule moves q, kv, do, dq and dkv, not {piece.tensor!r}.")

    def arrive(self, transfer: Transfer) -> None:
        piece, cells = transfer.piece, self.cells.index(transfer.piece)
        if piece.tensor in ("q", "kv"):
            self.copy_in(transfer, self.held[piece.tensor], self.home["kv"] if piece.tensor == "kv" else None)
        elif piece.tensor == "do":
            if (self.do_receiver[transfer.src][cells] >= 0).any():
                self.fail(f"rank {transfer.src} sends some of its output gradient a second time.")
            self.do_receiver[transfer.src][cells] = transfer.dst
        else:
            self.require(
                self.home[piece.tensor[1:]][transfer.dst], piece, f"rank {transfer.dst} is not home to"
            )

    def end(self) -> None:
        self.check_all_done()
        for name in ("q", "kv"):
            lost = self.partial[name] & ~self.sent[name] & ~self.home[name]
            if lost.any():
                rank, head, _ = (int(axis[0]) for axis in np.nonzero(lost))
                self.fail(f"d{name} of head {head}, computed on rank {rank}, never gets home.")


class _SwitchProof(ScheduleProof):
    """Check that elements reach every rank that is to hold them.

    A backward switch takes each partial gradient to every copy that it belongs to. It is correct if, run in
    reverse with the two ends of each transfer swapped, it takes each copy to where the partial gradients are.
    """

    def __init__(self, schedule: Schedule, problem: Switch) -> None:
        super().__init__(schedule, "x")
        self.after = problem.after

    def attend(self, op: Attend) -> None:  # noqa: ARG002
        self.fail("a switch has no Attend.")

    def _forward(self, transfer: Transfer) -> Transfer:
        back = self.schedule.backward
        return Transfer(transfer.piece, transfer.dst, transfer.src) if back else transfer

    def leave(self, transfer: Transfer) -> None:
        if transfer.piece.tensor != "x":
            self.fail(f"a switch moves x, not {transfer.piece.tensor!r}.")
        src = self._forward(transfer).src
        self.require(self.held["x"][src], transfer.piece, f"rank {src} does not have")

    def arrive(self, transfer: Transfer) -> None:
        self.copy_in(self._forward(transfer), self.held["x"])

    def end(self) -> None:
        self.at = (-1, None)
        for rank, held in enumerate(self.held["x"]):
            missing = ~held[self.after.held(rank).array]
            if missing.any():
                row = self.after.held(rank).array[int(np.nonzero(missing)[0][0])]
                self.fail(f"not all of {self.after.dim} {row} reaches rank {rank}.")
