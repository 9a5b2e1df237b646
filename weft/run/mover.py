"""Mover: one rank's part of a switch, compiled: cut out what leaves, put in its place what comes.

One copy on each side, and none where a part lies in one stretch: it is sent, or received, in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from weft.core.codec import digest
from weft.core.indices import Indices
from weft.core.problem import Switch
from weft.core.schedule import Piece, Schedule
from weft.run import trace
from weft.run.arena import Arena
from weft.run.comm import Comm
from weft.run.program import Program, Region
from weft.run.steps import Frame, Post, Wait
from weft.schedule.reverse import reverse

Shape = tuple[int, ...]


class Flight(NamedTuple):
    """A run of which all messages are under way."""

    frame: Frame
    left: list[Any]
    """Steps that are still to be run."""


@dataclass(frozen=True)
class _Part:
    """A stretch of one dim; all of the tensor, if there is no such dim."""

    dim: int | None
    start: int
    size: int

    def of(self, x: Tensor) -> Tensor:
        return x if self.dim is None else x.narrow(self.dim, self.start, self.size)

    def shape(self, whole: Shape) -> Shape:
        return tuple(self.size if at == self.dim else size for at, size in enumerate(whole))


@dataclass(frozen=True, eq=False)
class _Step:
    """A function of a frame, as a program wants it."""

    do: Callable[[Frame], None]

    def run(self, frame: Frame) -> None:
        self.do(frame)


class Mover:
    """Runs a switch, or the backward of one, on tensors of one shape."""

    def __init__(self, schedule: Schedule, line: tuple[Comm, Arena], shape: Shape, *, name: str) -> None:
        """`shape` is of a rank's shard: forward, with the first of the problem's dims cut.

        `name` is what all ranks agreed to run: messages of calls with different names never meet.
        """
        assert isinstance(schedule.problem, Switch)
        self.schedule, self.shape, self.at, self.name = schedule, shape, schedule.problem.dims, name
        self.comm, self.arena = line
        self.problem, self.rank = schedule.problem, self.comm.rank
        self.dtype: torch.dtype = getattr(torch, self.problem.dtype)
        # Copies of a gathered tensor each have a gradient of their own.
        self.adds = schedule.backward and self.at[1] is None
        self.wide = torch.promote_types(self.dtype, torch.float32) if self.adds else self.dtype
        self.result = self._result()
        self.program = self._program()

    @cached_property
    def adjoint(self) -> Mover:
        line, back = (self.comm, self.arena), f"{self.name} backward"
        found = Mover(reverse(self.schedule), line, self.result, name=back)
        found.__dict__["adjoint"] = self
        return found

    def _result(self) -> Shape:
        before, after = self.problem.before, self.problem.after
        back, (source, target) = self.schedule.backward, self.at
        sizes = list(self.shape)
        sizes[source] = before.rows(self.rank) if back else before.size
        if target is not None:
            sizes[target] = after.size if back else after.rows(self.rank)
        return tuple(sizes)

    def _ends(self, piece: Piece) -> tuple[_Part, _Part]:
        """Where a piece lies in the tensor that it leaves and in the one that it comes to."""
        old = _part(self.at[0], piece.tokens)
        new = _part(self.at[1], piece.heads)
        return (old, new) if self.schedule.backward else (new, old)

    def _program(self) -> Program:
        program, tag = Program(), 2 * int(digest(self.name)[:6], 16)
        # Another axis of the mesh may leave all ranks of this one with nothing.
        empty = any(size == 0 for at, size in enumerate(self.shape) if at not in self.at)
        transfers = [] if empty else [t for _, t in self.schedule.transfers()]
        going = {t.dst: self._ends(t.piece)[0] for t in transfers if t.src == self.rank}
        coming = {t.src: self._ends(t.piece)[1] for t in transfers if t.dst == self.rank}
        for way, parts, whole, messages in (
            ("to", going, self.shape, program.outgoing),
            ("from", coming, self.result, program.incoming),
        ):
            for peer, part in parts.items():
                region = Region(f"{way} {peer}", 0, (1, *part.shape(whole)), self.dtype)
                program.regions[region.buffer], messages[0, peer] = region, region.buffer
                program.sizes[region.buffer] = region.num_bytes
        program.steps.append(_Step(self._new))
        if going or coming:
            program.steps.append(_Step(lambda frame: self._pack(frame, going, coming)))
            label = getattr(self.schedule.ops[0], "label", "")
            program.steps.append(Post(0, tuple(going), tuple(coming), label, tag))
        mine = Piece("x", self.problem.after.held(self.rank), self.problem.before.held(self.rank))
        if mine:
            leaves, comes = self._ends(mine)
            program.steps.append(_Step(lambda frame: self._own(frame, leaves, comes)))
        for peer, part in coming.items():
            program.steps += [Wait(0, peer), _Step(lambda frame, p=peer, at=part: self._place(frame, p, at))]
        return program

    def _new(self, frame: Frame) -> None:
        frame.slots["result"] = (torch.empty(self.result, dtype=self.wide, device=frame.device),)

    def _pack(self, frame: Frame, going: dict[int, _Part], coming: dict[int, _Part]) -> None:
        (x,), (result,) = frame.slots["x"], frame.slots["result"]
        for peer, at in going.items():
            if frame.lender is None and (part := at.of(x)).is_contiguous():
                frame.buffers[f"to {peer}"] = _flat(part)
            else:
                frame.slots[f"to {peer}"][0].copy_(at.of(x))
        for peer, at in coming.items():
            if frame.lender is None and not self.adds and (part := at.of(result)).is_contiguous():
                frame.buffers[f"from {peer}"] = _flat(part)
                del frame.slots[f"from {peer}"]

    def _own(self, frame: Frame, leaves: _Part, comes: _Part) -> None:
        comes.of(frame.slots["result"][0]).copy_(leaves.of(frame.slots["x"][0]))

    def _place(self, frame: Frame, peer: int, at: _Part) -> None:
        if came := frame.slots.get(f"from {peer}"):
            part = at.of(frame.slots["result"][0])
            part.add_(came[0]) if self.adds else part.copy_(came[0])

    def run(self, x: Tensor) -> Tensor:
        frame = self._frame(x, self.comm, self.arena)
        trace.run(self.program, self.schedule, frame)
        return self._end(frame)

    def start(self, x: Tensor) -> Flight:
        """Send what leaves; `finish` waits for what comes."""
        # Memory that is lent for a call is free again before other calls end, so messages go by the group.
        comm = getattr(self.comm, "base", self.comm)
        frame = self._frame(x, comm, Arena())
        steps, before = self.program.steps, comm.bytes_sent
        waits = next((i for i, step in enumerate(steps) if isinstance(step, Wait)), len(steps))
        for step in steps[:waits]:
            step.run(frame)
        if comm is not self.comm:
            self.comm.bytes_sent += comm.bytes_sent - before
        return Flight(frame, steps[waits:])

    def finish(self, flight: Flight) -> Tensor:
        frame, left = flight
        for step in left:
            step.run(frame)
        for transit in frame.transits.values():
            transit.finish()
        return self._end(frame)

    def _frame(self, x: Tensor, comm: Comm, arena: Arena) -> Frame:
        frame = Frame(comm, cast("Any", None), 1.0, x.device)
        self.program.prepare(frame, arena, keep=False, device=x.device)
        frame.slots["x"] = (x,)
        return frame

    def _end(self, frame: Frame) -> Tensor:
        return frame.slots["result"][0].to(self.dtype)


def _part(dim: int | None, held: Indices) -> _Part:
    ((start, stop),) = held.runs  # shards of a dim are contiguous
    return _Part(dim, start, stop - start)


def _flat(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
