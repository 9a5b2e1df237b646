"""The program of a switch of the sharded dim."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from weft.core.indices import Indices
from weft.core.problem import Switch
from weft.core.schedule import Attend, Piece
from weft.program.lowering import Lowering, Messages
from weft.program.pieces import overlap
from weft.program.steps import Cast, Copy, CopySegment, Fill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.program.lowering import RankOp
    from weft.program.slots import Slot


class Redistribution(Lowering):
    """A switch of the sharded dim: one exchange, in place where a piece lies in one stretch."""

    def begin(self, attends: list[Attend], ops: Sequence[RankOp]) -> None:
        assert isinstance(self.schedule.problem, Switch) and not attends
        self.problem = self.schedule.problem
        before, after = self.problem.before, self.problem.after
        old = Piece("x", Indices.span(0, after.size), before.held(self.rank))
        new = Piece("x", after.held(self.rank), Indices.span(0, before.size))
        if self.schedule.backward:
            old, new = new, old
        arriving = [p for _, op in ops if isinstance(op, Messages) for ps in op.receives.values() for p in ps]
        self.own = old & new
        # Copies of a gathered tensor each have a gradient of their own, which add up.
        self.summed = overlap([*arriving, *([self.own] if self.own else [])])
        self.x = self.slot("home x", "input", old)
        self.result = self.slot("home y", "result", new, self.wide if self.summed else self.narrow)
        self.program.slots |= {"home x": self.x, "home y": self.result}

    def attend(self, index: int, op: Attend) -> None:
        raise AssertionError(f"op {index}, {op}: a switch has no attends")

    def sources(self, piece: Piece) -> list[Slot]:
        del piece
        return [self.x]

    def lying(self, piece: Piece, number: int) -> Slot | None:
        del number
        return None if self.target.near else self.cut(piece)

    def cut(self, piece: Piece) -> Slot | None:
        return self._stretch(self.x, piece)

    def own_piece(self, op: Messages) -> Piece | None:
        del op
        return self.own or None

    def landing(self, piece: Piece) -> Slot | None:
        return None if self.summed else self._stretch(self.result, piece)

    def _stretch(self, tensor: Slot, piece: Piece) -> Slot | None:
        """The slot of a piece of a tensor, if it lies in one stretch of its memory."""
        heads, rows = tensor.positions(piece)
        at, to = self.problem.dims
        cut = [(at, rows)] if to is None else [(at, rows), (to, heads)]
        cut = [(dim, which) for dim, which in cut if which != slice(0, tensor.shape[1 + dim])]
        slot = self.slot(f"{tensor.name} {piece}", tensor.memory, piece, tensor.dtype)
        slot.parent = tensor
        if len(cut) == 1:
            dim, which = cut[0]
            if not isinstance(which, slice) or prod(tensor.shape[1 : 1 + dim]) != 1:
                return None
            slot.offset = which.start * (tensor.num_bytes // tensor.shape[1 + dim])
        return slot if len(cut) < 2 else None

    def finish(self) -> None:
        arrived = self.arrived["x"]
        if self.summed:
            self.steps.append(Fill(-1, self.result))
        if self.own and not any(slot.piece is self.own for slot in arrived):
            self.steps.append(Copy(-1, (CopySegment(self.x, self.result, self.own),), self.summed))
        pending: list[CopySegment] = []
        for slot in arrived:
            assert slot.piece is not None
            self.wait_at(slot)
            if slot.parent is not self.result:
                pending.append(CopySegment(slot, self.result, slot.piece))
            # One collective brings all of it at once; single messages are unpacked as they come.
            if pending and (slot is arrived[-1] or not self.target.collective):
                self.steps.append(Copy(-1, tuple(pending), self.summed))
                pending = []
        if self.summed and self.narrow != self.wide:
            result = self.slot("home y", "result", self.result.piece or self.own, self.narrow)
            self.result.memory = "workspace"
            self.steps.append(Cast(-1, self.result, result))
            self.program.slots["home y"] = result
