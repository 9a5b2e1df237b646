"""The forward program of an attention: outputs are merged and go home."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from weft.core.schedule import Attend, Piece
from weft.program.lowering import Messages
from weft.program.operands import AttentionLowering, Operand
from weft.program.pieces import cover
from weft.program.steps import Attention, Cast, Fill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.program.lowering import RankOp
    from weft.program.slots import Slot


class ForwardLowering(AttentionLowering):
    """Lower a forward: merge partial outputs in float32 or better, and send outputs in the caller's dtype."""

    def begin(self, attends: list[Attend], ops: Sequence[RankOp]) -> None:
        super().begin(attends, ops)
        self.lands = False
        if self.operands["q"][1:] or not any([q.is_home for q in self.operands["q"]]):
            self.result = self.home_slot("o", "result")
            self.lands = self._can_land(ops)

    def _can_land(self, ops: Sequence[RankOp]) -> bool:
        """Whether outputs may be received into the result: they and what is computed here are all of it."""
        home = self.result.piece
        assert home is not None
        if (
            self.problem.batch > 1
            or self.result.order is not None
            or self.result.shape[3] != home.tokens.size
        ):
            return False
        pieces = [q.hull & home for q in self.operands["q"]]
        for _, op in ops:
            if isinstance(op, Messages) and "o" in op.tensors:
                pieces += [p for some in op.receives.values() for p in some if p.tensor == "o"]
        return sum(piece.cells for piece in pieces) == home.cells

    def landing(self, piece: Piece) -> Slot | None:
        if not (self.lands and piece.tensor == "o" and len(piece.heads.runs) == 1):
            return None
        if piece.tokens != self.result.tokens:
            return None
        slot = self.slot(f"part of {self.result.name}", "result", piece)
        slot.parent = self.result
        slot.offset = piece.heads.runs[0][0] * (self.result.num_bytes // self.result.shape[2])
        return slot

    def own_piece(self, op: Messages) -> Piece | None:
        if not self.lands or any(p.tensor != "o" for some in op.receives.values() for p in some):
            return None
        home = self.result.piece
        assert home is not None
        outputs = [(q, Piece("o", q.hull.heads, q.hull.tokens) & home) for q in self.operands["q"]]
        own = [(q, output) for q, output in outputs if output]
        # In a torus, outputs leave before those that stay are done.
        done = len(own) == 1 and own[0][0].written == own[0][0].readers
        return own[0][1] if done else None

    def sources(self, piece: Piece) -> list[Slot]:
        if piece.tensor != "o":
            return super().sources(piece)
        return [*self.arrived["o"], *(operand.sums[0] for operand in self.operands["q"] if operand.sums)]

    def attend(self, index: int, op: Attend) -> None:
        q, kv = next(self.reads)
        q_slot, kv_slot = self.ready(q, op.q), self.ready(kv, op.kv)
        if not q.sums:
            q.sums = self._sums(q)
            if q.partial:
                self.steps += [Fill(index, q.sums[0]), Fill(index, q.sums[1], -inf)]
        out, lse = q.sums
        first = not (q.written or q.partial)
        q.written += 1
        label = f"attend {self.brought_by(kv, op.kv)}"
        self.steps.append(Attention(index, label, q_slot, op.q, kv_slot, op.kv, out, lse, first))

    def _sums(self, q: Operand) -> tuple[Slot, Slot]:
        keeps = bool(self.target.save)
        memory = "saved" if keeps else "workspace"
        # A single attention computes all of it: without a merge, no float32 sum is needed.
        dtype = self.narrow if q.readers == 1 and not q.partial else self.wide
        out = self.slot(f"out of {q.name}", "workspace", Piece("o", q.hull.heads, q.hull.tokens), dtype)
        if dtype == self.narrow:
            out.memory = "result" if q.is_home else memory
        lse = self.lse(q, memory)
        if keeps:
            self.program.saved[lse.name] = lse
        return out, lse

    def finish(self) -> None:
        operands = self.operands["q"]
        if self.target.save:
            self._save(operands)
        if len(operands) == 1 and operands[0].is_home:
            out = operands[0].sums[0]
            if out.dtype == self.narrow:
                self.program.slots["home o"] = out
            else:
                self.steps.append(Cast(-1, out, self.home_slot("o", "result")))
            return
        piece = self.result.piece
        assert piece is not None
        self.put(self.result, cover(piece, self.sources(piece), self.result))

    def _save(self, operands: list[Operand]) -> None:
        """Save outputs in the caller's dtype, as the backward reads them; results are there anyway."""
        for q in operands:
            if q.is_home:
                continue
            out = saved = q.sums[0]
            if out.dtype != self.narrow:
                assert out.piece is not None
                saved = self.slot(out.name, "saved", out.piece, self.narrow)
                self.steps.append(Cast(-1, out, saved))
            self.program.saved[out.name] = saved
