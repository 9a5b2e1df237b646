"""Compile a schedule for one rank, forward and backward, once; run it as often as you like."""

from __future__ import annotations

from weft.core.schedule import Attend, Piece, Schedule
from weft.run.compiler import Compiler, tiles
from weft.run.places import Part, Place, cover
from weft.run.program import Program
from weft.run.steps import Attention, Gradient


def compile_forward(schedule: Schedule, rank: int, tag: int = 0) -> Compiler:
    """Exchanges are posted where they stand in the list; each wait comes right before the first use."""
    compiler = Compiler(schedule, rank, tag)
    outputs = compiler.sums("o", "q", "out of {}")
    for index, op in enumerate(schedule.ops):
        if not isinstance(op, Attend):
            compiler.post(index, op, {"o": outputs})
        elif op.rank == rank:
            compiler.program.steps.append(Attention(**compiler.calculation(op)))
    arrived = [place for _, _, place in compiler.arrivals if place.piece.tensor == "o"]
    compiler.finish("o", cover(compiler.home("o").piece, [*outputs, *arrived]))
    return compiler


def compile_backward(schedule: Schedule, forward: Compiler) -> Program:
    """Gradients of one rank; `forward` says where what was kept lies."""
    compiler = _BackwardCompiler(schedule, forward)
    dq, dkv = compiler.sums("dq", "q", "dq of {}"), compiler.sums("dkv", "kv", "dkv of {}")
    for index, op in enumerate(schedule.ops):
        if not isinstance(op, Attend):
            compiler.post(index, op, {"dq": dq, "dkv": dkv})
        elif op.rank == forward.rank:
            fields = compiler.calculation(op)
            q, kv = fields["q"], fields["kv"]
            grad = compiler.output_gradient(q)
            step = Gradient(**fields, grad=grad, dq=f"dq of {q}", dkv=f"dkv of {kv}")
            compiler.program.steps.append(step)
    for tensor, sums in (("dq", dq), ("dkv", dkv)):
        arrived = [place for _, _, place in compiler.arrivals if place.piece.tensor == tensor]
        local = cover(compiler.home(tensor).piece, sums)
        compiler.finish(tensor, local + [Part(place.piece, place) for place in arrived])
    forward.program.keep = tuple(sorted(compiler.kept))
    places = forward.operands["q"]
    forward.program.sums = tuple(f"{what} of {p.slot}" for p in places for what in ("out", "lse"))
    return compiler.program


class _BackwardCompiler(Compiler):
    """Operands that the forward kept are taken as they lie; the others are fetched again."""

    def __init__(self, schedule: Schedule, forward: Compiler) -> None:
        # Forward messages have even tags, so that the two directions of one plan never meet.
        super().__init__(schedule, forward.rank, forward.tag + 1)
        self.forward = forward
        self.kept: set[str] = set()
        self.kept_tensors = {"q"} | {piece.tensor for piece in schedule.kept[forward.rank]}

    def place_operand(self, place: Place) -> None:
        if place.piece.tensor not in self.kept_tensors:
            super().place_operand(place)
            return
        self.parts[place.slot] = []
        slot = place.slot
        if view := self.forward.views.get(slot):
            self.program.steps.append(view)
            slot = view.source
        if region := self.forward.program.regions.get(slot):
            self.kept.add(region.buffer)

    def output_gradient(self, q: str) -> str:
        """The gradient of an operand's output: from home and from every rank that got the output."""
        place = next(p for p in self.operands["q"] if p.slot == q)
        target = Place(f"do of {q}", Piece("do", place.piece.heads, place.piece.tokens))
        if target.slot in self.parts:
            return target.slot
        parts = [
            Part(piece, source) for source in self.places("do") if (piece := target.piece & source.piece)
        ]
        self.parts[target.slot] = parts
        if not self.as_view(target, parts):
            self.new_buffer(target, self.narrow if tiles(target.piece, parts) else self.wide)
            self.collect(target, parts)
        return target.slot
