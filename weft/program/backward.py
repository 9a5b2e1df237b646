"""The backward program of an attention: gradients are summed, where they are computed and at home."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.schedule import Attend, Piece
from weft.program.lowering import Messages
from weft.program.operands import AttentionLowering, Operand
from weft.program.pieces import RangeMap, cover, overlap
from weft.program.steps import Cast, Copy, CopySegment, Fill, Gradient, accesses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.program.lowering import RankOp
    from weft.program.slots import Slot


class _HomeGradient:
    """A gradient at home: where it is put together, and whether its pieces overlap, so that they add up."""

    def __init__(self, home: Slot, pieces: list[Piece]) -> None:
        self.home, self.summed = home, overlap(pieces)
        self.sum: Slot | None = None
        self.taken = 0
        """Arrivals that have been added."""


class BackwardLowering(AttentionLowering):
    """Gradients are summed in float32 or better; operands that the forward saved are taken as they lie."""

    def begin(self, attends: list[Attend], ops: Sequence[RankOp]) -> None:
        super().begin(attends, ops)
        self.kept = frozenset(["q"]) | {piece.tensor for piece in self.schedule.kept[self.rank]}
        self.home["do"] = self.home_slot("do", "input")
        if any([q.is_home for q in self.operands["q"]]):
            self.home["o"] = self.home_slot("o", "input")
        self.grads: dict[str, Slot] = {}
        self.sums: dict[int, Slot] = {}
        """Gradients of operands, by the number of their piece."""
        self.by_tokens = {
            f"d{name}": RangeMap((*run, i) for i, o in enumerate(some) for run in o.hull.tokens.runs)
            for name, some in self.operands.items()
        }
        """Numbers of operands by the tokens of their gradients."""
        self.results: dict[str, _HomeGradient] = {}
        for tensor in ("dq", "dkv"):
            home = self.home_slot(tensor, "result")
            assert home.piece is not None
            local = [operand.hull & home.piece for operand in self.operands[tensor[1:]]]
            arriving = [
                piece
                for _, op in ops
                if isinstance(op, Messages) and tensor in op.tensors
                for pieces in op.receives.values()
                for piece in pieces
                if piece.tensor == tensor
            ]
            self.results[tensor] = _HomeGradient(home, [piece for piece in local if piece] + arriving)

    def sources(self, piece: Piece) -> list[Slot]:
        if not piece.is_sum:
            return super().sources(piece)
        exact = self.sums.get(self.pieces.number(piece))
        if exact is not None:  # operands do not overlap: no other has any of it
            return [exact]
        operands = self.operands[piece.tensor[1:]]
        by_tokens = self.by_tokens[piece.tensor]
        meeting = {i for run in piece.tokens.runs for i in by_tokens.overlapping(*run)}
        return [operands[i].sums[0] for i in sorted(meeting) if operands[i].sums]

    def lying(self, piece: Piece, number: int) -> Slot | None:
        if not piece.is_sum:
            return super().lying(piece, number)
        slot = self.sums.get(number)
        return slot if slot is not None and slot.memory == self.buffer_memory else None

    def attend(self, index: int, op: Attend) -> None:
        q, kv = next(self.reads)
        q_slot, kv_slot = self.ready(q, op.q), self.ready(kv, op.kv)
        out = self.home["o"] if q.is_home else self._saved(f"out of {q.name}", q, self.narrow)
        lse = self.program.slots.get(f"lse of {q.name}") or self.lse(q, "saved")
        self.program.slots[lse.name] = lse
        grad = self._output_gradient(index, q)
        first = self._start(index, q), self._start(index, kv)
        label = f"gradient {self.brought_by(kv, op.kv)}"
        fields = (q_slot, op.q, kv_slot, op.kv, out, lse, grad, q.sums[0], kv.sums[0], first)
        self.steps.append(Gradient(index, label, *fields))
        for operand in (q, kv):
            operand.written += 1
            if operand.written == operand.readers:
                self._add_home("d" + operand.hull.tensor, operand.sums[0])

    def _saved(self, name: str, q: Operand, dtype: str) -> Slot:
        if name not in self.program.slots:
            piece = Piece("o", q.hull.heads, q.hull.tokens)
            self.program.slots[name] = self.slot(name, "saved", piece, dtype)
        return self.program.slots[name]

    def _start(self, index: int, operand: Operand) -> bool:
        """Whether a gradient is the first of its operand and all of it, so that it need not be added."""
        if operand.sums:
            return False
        hull = operand.hull
        piece = Piece("d" + hull.tensor, hull.heads, hull.tokens)
        only = operand.readers == 1 and not operand.partial
        slot = self.slot(f"d{operand.name}", "kernel" if only else "workspace", piece)
        operand.sums = (slot,)
        self.sums[self.pieces.number(piece)] = slot
        if operand.partial:
            self.steps.append(Fill(index, slot))
        return not operand.partial

    def _output_gradient(self, index: int, q: Operand) -> Slot:
        """The gradient of an operand's output: from home and from every rank that got the output."""
        if q.name in self.grads:
            return self.grads[q.name]
        piece = Piece("do", q.hull.heads, q.hull.tokens)
        target = self.slot(f"do of {q.name}", "workspace", piece)
        places = [self.home["do"], *self.arrived["do"]]
        segments = [CopySegment(slot, target, piece & slot.piece) for slot in places if slot.piece]
        segments = [segment for segment in segments if segment.piece]
        adds = overlap([segment.piece for segment in segments])
        if len(segments) == 1 and (view := self.view(target.name, segments[0].source, piece)):
            target = view
        elif adds:
            target = self.slot(target.name, "workspace", piece, self.wide)
            self.add(index, target, [segment._replace(target=target) for segment in segments])
        else:
            self.put(target, segments, index)
        self.grads[q.name] = target
        return target

    def add(self, index: int, target: Slot, segments: list[CopySegment], *, started: bool = False) -> None:
        """Add segments to a sum; the first of all overwrites, if it covers the sum."""
        for segment in segments:
            self.wait_at(segment.source)
        if not started and self.fills(target, segments[:1]):
            self.steps.append(Copy(index, (segments[0],)))
            segments = segments[1:]
        elif not started:
            self.steps.append(Fill(index, target))
        if segments:
            self.steps.append(Copy(index, tuple(segments), add=True))

    def _add_home(self, tensor: str, slot: Slot, index: int = -1) -> None:
        """Add what a slot has of a gradient at home to its sum."""
        result = self.results[tensor]
        home = result.home
        assert home.piece is not None and slot.piece is not None
        shard = slot.piece & home.piece
        if not (result.summed and shard):
            return
        started = result.sum is not None
        if result.sum is None:
            rows = self.problem.home(tensor).rows(self.rank)
            same = self.narrow == self.wide
            result.sum = (
                home if same else self.slot(f"sum {tensor}", "workspace", home.piece, self.wide, rows)
            )
            result.sum.order = home.order
        self.add(index, result.sum, [CopySegment(slot, result.sum, shard)], started=started)

    def _keep_apart(self) -> None:
        """Give gradients that must outlive the next attention slots of their own: kernels write one slot."""
        gradients = [at for at, step in enumerate(self.steps) if isinstance(step, Gradient)]
        following = dict(zip(gradients, [*gradients[1:], len(self.steps)], strict=False))
        written = {
            slot: following[at]
            for at in gradients
            for slot in accesses(self.steps[at])[1]
            if slot.memory == "kernel"
        }
        for at, step in enumerate(self.steps):
            for slot in accesses(step)[0]:
                if at > written.get(slot, at):
                    slot.memory = "workspace"

    def consume(self) -> None:
        for tensor, result in self.results.items():
            if result.summed:
                arrived = self.arrived[tensor]
                for slot in arrived[result.taken :]:
                    self._add_home(tensor, slot)
                result.taken = len(arrived)

    def finish(self) -> None:
        self._keep_apart()
        self.consume()
        for tensor, result in self.results.items():
            home = result.home
            assert home.piece is not None
            if result.summed:
                if result.sum is not None and result.sum is not home:
                    self.steps.append(Cast(-1, result.sum, home))
                continue
            places = [*(o.sums[0] for o in self.operands[tensor[1:]] if o.sums), *self.arrived[tensor]]
            segments = cover(home.piece, places, home)
            whole = len(segments) == 1 and self.fills(home, segments) and segments[0].source.piece
            if whole and home.order is None and whole.is_like(home.piece):
                source = segments[0].source
                if source.dtype == home.dtype and source.memory == "kernel":
                    self.program.slots[home.name] = source  # what the kernel returned is the result
                else:
                    self.wait_at(source)
                    self.steps.append(Cast(-1, source, home))
            else:
                self.put(home, segments)
