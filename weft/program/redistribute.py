"""The program of a switch of the sharded dim."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from weft.core.indices import Indices
from weft.core.problem import Switch
from weft.core.schedule import Attend, Piece
from weft.program.exchanges import Exchanges
from weft.program.pieces import Messages, Part
from weft.program.places import overlap
from weft.program.slots import Slot
from weft.program.steps import Cast, Copy, Fill, Segment


class Redistribution(Exchanges):
    """A switch of the sharded dim: one exchange, in place where a part lies in one stretch."""

    def begin(self, attends: list[Attend], parts: Sequence[Part]) -> None:
        assert isinstance(self.schedule.problem, Switch) and not attends
        self.problem = self.schedule.problem
        before, after = self.problem.before, self.problem.after
        old = Piece("x", Indices.span(0, after.size), before.held(self.rank))
        new = Piece("x", after.held(self.rank), Indices.span(0, before.size))
        if self.schedule.backward:
            old, new = new, old
        arriving = [
            p for _, op in parts if isinstance(op, Messages) for ps in op.receives.values() for p in ps
        ]
        self.own = old & new
        # Copies of a gathered tensor each have a gradient of their own, which add up.
        self.summed = overlap([*arriving, *([self.own] if self.own else [])])
        self.x = self.slot("home x", "input", old)
        self.result = self.slot("home y", "result", new, self.wide if self.summed else self.narrow)
        self.program.slots |= {"home x": self.x, "home y": self.result}

    def shape(self, piece: Piece, rows: int) -> tuple[int, ...]:
        sizes = list(self.problem.shape)
        at, to = self.problem.dims
        sizes[at] = rows
        if to is not None:
            sizes[to] = piece.heads.size
        return 1, *sizes

    def attend(self, index: int, op: Attend) -> None:
        raise AssertionError(f"op {index}, {op}: a switch attends to nothing")

    def exchange(self, index: int, op: Messages) -> None:
        if (
            self.problem.row_elements
        ):  # else another axis of the mesh leaves all ranks of this one with nothing
            super().exchange(index, op)

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

    def _stretch(self, whole: Slot, piece: Piece) -> Slot | None:
        """A part of a tensor, if it lies in one stretch of its memory."""
        heads, rows = whole.positions(piece)
        at, to = self.problem.dims
        cut = [(at, rows)] if to is None else [(at, rows), (to, heads)]
        cut = [(dim, which) for dim, which in cut if which != slice(0, whole.shape[1 + dim])]
        part = self.slot(f"{whole.name} {piece}", whole.memory, piece, whole.dtype)
        part.parent = whole
        if len(cut) == 1:
            dim, which = cut[0]
            if not isinstance(which, slice) or prod(whole.shape[1 : 1 + dim]) != 1:
                return None
            part.offset = which.start * (whole.num_bytes // whole.shape[1 + dim])
        return part if len(cut) < 2 else None

    def finish(self) -> None:
        arrived = self.arrived["x"]
        if self.summed:
            self.steps.append(Fill(-1, self.result))
        if self.own and not any(slot.piece is self.own for slot in arrived):
            self.steps.append(Copy(-1, (Segment(self.x, self.result, self.own),), self.summed))
        pending: list[Segment] = []
        for slot in arrived:
            assert slot.piece is not None
            self.wait_at(slot)
            if slot.parent is not self.result:
                pending.append(Segment(slot, self.result, slot.piece))
            # One collective brings all of it at once; single messages are unpacked as they come.
            if pending and (slot is arrived[-1] or not self.target.collective):
                self.steps.append(Copy(-1, tuple(pending), self.summed))
                pending = []
        if self.summed and self.narrow != self.wide:
            result = self.slot("home y", "result", self.result.piece or self.own, self.narrow)
            self.result.memory = "workspace"
            self.steps.append(Cast(-1, self.result, result))
            self.program.slots["home y"] = result
