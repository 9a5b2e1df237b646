"""Lower: turn a schedule into the program of one rank. The only place that decides what a rank does.

An operand of an attention is used where it lies: in the caller's tensor (ring, hop 0), in the message that
brought it (ring, later hops); only what comes from several places is put together (Ulysses). A message that
equals one that came, or an operand, is sent as it lies. Steps are ordered for memory: before an exchange is
posted, the gradients that have arrived are added to their sum, and the buffers of exchanges that have ended are
free.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

from weft.core.indices import Indices
from weft.core.problem import Switch
from weft.core.schedule import Attend, Piece, Schedule
from weft.schedule.lowering import Lowering, Messages, Part, Pieces, parts_of
from weft.schedule.operands import AttentionLowering, Operand
from weft.schedule.places import cover, overlap
from weft.schedule.program import Attention, Cast, Copy, Fill, Gradient, Program, Segment, Slot, Target

INFERENCE = Target()


def lower(schedule: Schedule, rank: int, target: Target = INFERENCE) -> Program:
    """Return what `rank` does when it runs a schedule, forward or backward."""
    return _kind(schedule)(schedule, rank, target, Pieces()).write(parts_of(schedule, (rank,))[rank])


def lower_all(schedule: Schedule, target: Target = INFERENCE) -> list[Program]:
    """Return the programs of all ranks, in one pass over the schedule."""
    kind, pieces = _kind(schedule), Pieces()
    parts = parts_of(schedule, range(schedule.problem.ranks))
    return [kind(schedule, rank, target, pieces).write(own) for rank, own in parts.items()]


def _kind(schedule: Schedule) -> type[Lowering]:
    if isinstance(schedule.problem, Switch):
        return _Redistribution
    return _Backward if schedule.backward else _Forward


class _Forward(AttentionLowering):
    """Outputs are merged in float32 or better and leave in the caller's dtype."""

    def begin(self, attends: list[Attend], parts: Sequence[Part]) -> None:
        super().begin(attends, parts)
        self.lands = False
        if self.operands["q"][1:] or not any(self.is_home(q.hull) for q in self.operands["q"]):
            self.result = self.home_slot("o", "result")
            self.lands = self._can_land(parts)

    def _can_land(self, parts: Sequence[Part]) -> bool:
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
        for _, op in parts:
            if isinstance(op, Messages):
                pieces += [p for some in op.receives.values() for p in some if p.tensor == "o"]
        cells = sum(piece.heads.size * piece.tokens.size for piece in pieces)
        return cells == home.heads.size * home.tokens.size

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
        own = [part for q in self.operands["q"] if (part := Piece("o", q.hull.heads, q.hull.tokens) & home)]
        return own[0] if len(own) == 1 else None

    def sources(self, piece: Piece) -> list[Slot]:
        if piece.tensor != "o":
            return super().sources(piece)
        return [*self.arrived["o"], *(operand.sums[0] for operand in self.operands["q"] if operand.sums)]

    def attend(self, index: int, op: Attend) -> None:
        q, kv = self.operand(op.q), self.operand(op.kv)
        if not q.sums:
            q.sums = self._sums(q)
            if q.partial:
                self.steps += [Fill(index, q.sums[0]), Fill(index, q.sums[1], -inf)]
        out, lse = q.sums
        first = not (q.written or q.partial)
        q.written += 1
        label = f"attend {self.brought_by(op.kv)}"
        assert q.slot is not None and kv.slot is not None
        self.steps.append(Attention(index, label, q.slot, op.q, kv.slot, op.kv, out, lse, first))

    def _sums(self, q: Operand) -> tuple[Slot, Slot]:
        keeps = bool(self.target.save)
        memory = "saved" if keeps else "workspace"
        out = self.slot(f"out of {q.name}", "workspace", Piece("o", q.hull.heads, q.hull.tokens), self.wide)
        if self.narrow == self.wide:
            out.memory = "result" if self.is_home(q.hull) else memory
        lse = self.lse(q, memory)
        if keeps:
            self.program.saved[lse.name] = lse
        return out, lse

    def finish(self) -> None:
        operands = self.operands["q"]
        if self.target.save:
            self._save(operands)
        if len(operands) == 1 and self.is_home(operands[0].hull):
            out = operands[0].sums[0]
            if self.narrow == self.wide:
                self.program.slots["home o"] = out
            else:
                self.steps.append(Cast(-1, out, self.home_slot("o", "result")))
            return
        piece = self.result.piece
        assert piece is not None
        self.put(self.result, cover(piece, self.sources(piece), self.result))

    def _save(self, operands: list[Operand]) -> None:
        """Save outputs in the caller's dtype, as the backward reads them, unless they are the result itself."""
        for q in operands:
            if self.is_home(q.hull):
                continue
            out = kept = q.sums[0]
            if self.narrow != self.wide:
                assert out.piece is not None
                kept = self.slot(out.name, "saved", out.piece, self.narrow)
                self.steps.append(Cast(-1, out, kept))
            self.program.saved[out.name] = kept


class _Result:
    """A gradient at home: where it is put together, and whether parts of it overlap, so that they add up."""

    def __init__(self, home: Slot, parts: list[Piece]) -> None:
        self.home, self.summed = home, overlap(parts)
        self.sum: Slot | None = None
        self.taken = 0
        """Arrivals that have been added."""


class _Backward(AttentionLowering):
    """Gradients are summed in float32 or better; operands that the forward saved are taken as they lie."""

    def begin(self, attends: list[Attend], parts: Sequence[Part]) -> None:
        super().begin(attends, parts)
        self.kept = {"q"} | {piece.tensor for piece in self.schedule.kept[self.rank]}
        self.home["do"] = self.home_slot("do", "input")
        if any(self.is_home(q.hull) for q in self.operands["q"]):
            self.home["o"] = self.home_slot("o", "input")
        self.grads: dict[str, Slot] = {}
        self.sums: dict[int, Slot] = {}
        """Gradients of operands, by the number of their piece."""
        self.results: dict[str, _Result] = {}
        for tensor in ("dq", "dkv"):
            home = self.home_slot(tensor, "result")
            assert home.piece is not None
            local = [part for operand in self.operands[tensor[1:]] if (part := operand.hull & home.piece)]
            arriving = [
                piece
                for _, op in parts
                if isinstance(op, Messages)
                for pieces in op.receives.values()
                for piece in pieces
                if piece.tensor == tensor
            ]
            self.results[tensor] = _Result(home, local + arriving)

    def place(self, operand: Operand) -> None:
        tensor = operand.hull.tensor
        if tensor in self.kept and not self.place_at_home(operand):
            operand.slot = self.slot(operand.name, "saved", operand.hull)
            self.program.slots[operand.name] = operand.slot
            operand.is_view = True
        elif operand.slot is None:
            super().place(operand)

    def sources(self, piece: Piece) -> list[Slot]:
        if not piece.is_sum:
            return super().sources(piece)
        return [operand.sums[0] for operand in self.operands[piece.tensor[1:]] if operand.sums]

    def lying(self, piece: Piece, number: int) -> Slot | None:
        if not piece.is_sum:
            return super().lying(piece, number)
        slot = self.sums.get(number)
        return slot if slot is not None and slot.memory == self.buffer_memory else None

    def attend(self, index: int, op: Attend) -> None:
        q, kv = self.operand(op.q), self.operand(op.kv)
        out = self.home["o"] if self.is_home(q.hull) else self._saved(f"out of {q.name}", q, self.narrow)
        lse = self.program.slots.get(f"lse of {q.name}") or self.lse(q, "saved")
        self.program.slots[lse.name] = lse
        grad = self._output_gradient(index, q)
        first = self._start(index, q), self._start(index, kv)
        label = f"gradient {self.brought_by(op.kv)}"
        assert q.slot is not None and kv.slot is not None
        fields = (q.slot, op.q, kv.slot, op.kv, out, lse, grad, q.sums[0], kv.sums[0], first)
        self.steps.append(Gradient(index, label, *fields))
        for operand in (q, kv):
            operand.written += 1
            if operand.written == operand.readers:
                self._add_local(operand)

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
        segments = [
            Segment(slot, target, part) for slot in places if slot.piece and (part := piece & slot.piece)
        ]
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

    def add(self, index: int, target: Slot, segments: list[Segment], *, started: bool = False) -> None:
        """Add parts to a sum; the first of all overwrites, if it is all of it."""
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
        if not (result.summed and (part := slot.piece & home.piece)):
            return
        started = result.sum is not None
        if result.sum is None:
            rows = self.problem.home(tensor).rows(self.rank)
            same = self.narrow == self.wide
            result.sum = (
                home if same else self.slot(f"sum {tensor}", "workspace", home.piece, self.wide, rows)
            )
            result.sum.order = home.order
        self.add(index, result.sum, [Segment(slot, result.sum, part)], started=started)

    def _add_local(self, operand: Operand) -> None:
        self._add_home("d" + operand.hull.tensor, operand.sums[0])

    def consume(self) -> None:
        for tensor, result in self.results.items():
            if result.summed:
                arrived = self.arrived[tensor]
                for slot in arrived[result.taken :]:
                    self._add_home(tensor, slot)
                result.taken = len(arrived)

    def finish(self) -> None:
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
            if (
                whole
                and home.order is None
                and (whole.heads, whole.tokens) == (home.piece.heads, home.piece.tokens)
            ):
                source = segments[0].source
                if source.dtype == home.dtype and source.memory == "kernel":
                    self.program.slots[home.name] = source  # what the kernel returned is the result
                else:
                    self.wait_at(source)
                    self.steps.append(Cast(-1, source, home))
            else:
                self.put(home, segments)


class _Redistribution(Lowering):
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
        for slot in arrived:
            assert slot.piece is not None
            self.wait_at(slot)
            if slot.parent is not self.result:
                self.steps.append(Copy(-1, (Segment(slot, self.result, slot.piece),), self.summed))
        if self.summed and self.narrow != self.wide:
            result = self.slot("home y", "result", self.result.piece or self.own, self.narrow)
            self.result.memory = "workspace"
            self.steps.append(Cast(-1, self.result, result))
            self.program.slots["home y"] = result
