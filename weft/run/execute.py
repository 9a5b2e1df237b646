"""Execute: run the programs of one rank, forward and backward, each lowered when it is first needed."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.core.codec import digest
from weft.core.errors import CommError, InputError
from weft.program.lower import lower
from weft.program.steps import Target
from weft.run import streams
from weft.run.arena import Arena
from weft.run.bind import Bound, RunFrame
from weft.run.kernels.tiles import TileSet
from weft.run.measure import trace

if TYPE_CHECKING:
    from weft.core.mask import BlockMask
    from weft.core.schedule import Schedule
    from weft.program.slots import Slot
    from weft.program.steps import Program
    from weft.run.comm import Comm, Lender
    from weft.run.copies import Planes, Slots
    from weft.run.kernels import AttentionKernel

trace.trace_from_environment()

CAPTURED = -1
"""In place of a stream: what graphs run, on whatever stream they are replayed."""
FORWARD, SAVING, BACKWARD = "forward", "forward that saves", "backward"


class Runner:
    """One rank's programs of a schedule over one transport, bound to the memory of an arena."""

    def __init__(self, schedule: Schedule, comm: Comm, arena: Arena, name: str) -> None:
        """`name` is what all ranks agreed to run: messages of calls with different names never meet."""
        self.schedule, self.comm, self.arena, self.name = schedule, comm, arena, name
        # Forward messages have even tags, so that the two directions of one plan never meet.
        self._tag = 2 * int(digest(name + schedule.digest)[:6], 16) if comm.size > 1 else 0
        self._bound: dict[tuple[str, Lender | None, int], Bound] = {}
        self._programs: dict[tuple[str, frozenset[int], bool, bool], Program] = {}
        self._reserved: set[str] = set()
        """Kinds of programs for which all ranks have made room in the memory that they share."""

    def schedule_of(self, kind: str) -> Schedule:
        del kind
        return self.schedule

    def program(
        self,
        kind: str,
        near: frozenset[int] = frozenset(),
        *,
        collective: bool = False,
        lands: bool = False,
    ) -> Program:
        """Return the lowered program of `kind`, which is cached."""
        key = kind, near, collective, lands
        if key not in self._programs:
            target = Target(near=near, collective=collective, save=self.saved_tensors(kind), lands=lands)
            self._programs[key] = lower(self.schedule_of(kind), self.comm.rank, target)
        return self._programs[key]

    def saved_tensors(self, kind: str) -> frozenset[str]:
        del kind
        return frozenset()

    def run_program(self, kind: str, frame: RunFrame, inputs: dict[str, Planes]) -> Bound:
        try:
            bound = self.begin(kind, frame, inputs)
            watch = trace.active
            bound.run(frame) if watch is None else watch.run(bound, frame)
            if frame.lender is not None:
                frame.lender.end()
        except CommError as error:
            from weft.run.agree import name_difference

            raise name_difference(self.comm, self.name, kind, error) from error
        return bound

    def begin(self, kind: str, frame: RunFrame, inputs: dict[str, Planes]) -> Bound:
        """Bind a program, if it is not yet, and give a frame its slots."""
        lender = frame.lender = frame.comm.begin(frame.device)
        stream = streams.current(frame.device)
        if stream and streams.is_capturing(frame.device):  # stream 0 cannot be captured
            bound = self._captured(kind, lender)
        else:
            bound = self._binding(kind, lender, stream, frame)
        named = bound.program.slots
        bound.begin(frame, {named[name]: planes for name, planes in inputs.items() if name in named})
        if lender is None:
            self._compare(kind, bound.tag + frame.tag, frame.device)
        return bound

    def _compare(self, kind: str, tag: int, device: torch.device) -> None:
        """Compare a repeated call: messages of collectives and of NCCL have no tags that identify it."""
        if device.type == "cpu" and self.comm.collective(device):
            from weft.run.agree import check_call

            check_call(self.comm, tag, self.name, kind)
        elif device.type == "cuda":
            self.arena.note(tag)

    def _binding(self, kind: str, lender: Lender | None, stream: int, frame: RunFrame) -> Bound:
        key = kind, lender, stream
        bound = self._bound.get(key)
        if bound is None or (self.arena.retired and bound in self.arena.retired):
            if lender:
                program = self.program(kind, lender.near, lands=lender.lands)
            else:
                program = self.program(kind, collective=frame.comm.collective(frame.device))
            bound = self._bound[key] = self._new_bound(kind, program, frame.device)
        if lender and kind not in self._reserved:  # ranks may be at different halves, not at different kinds
            lender.reserve(bound.window.num_bytes)
            self._reserved.add(kind)
        if not bound.calls:
            block = self.arena.block(frame.device, stream, bound)
            lent = lender.lend({"window": bound.window.num_bytes}, bound)["window"] if lender else None
            bound.bind(block, lent)
        return bound

    def _new_bound(self, kind: str, program: Program, device: torch.device) -> Bound:
        return Bound(program, self.schedule_of(kind), self._tag + (kind == BACKWARD), device)

    def _captured(self, kind: str, lender: Lender | None) -> Bound:
        """The program of an earlier run, which from now on is that of CUDA graphs: a capture can not bind."""
        key = kind, lender, CAPTURED
        if key not in self._bound:
            runs = [each for each, bound in self._bound.items() if each[:2] == key[:2] and bound.calls]
            if lender is not None:
                raise InputError(
                    "Messages in symmetric memory cannot be captured in a CUDA graph.",
                    hint="Set WEFT_TRANSPORT=group.",
                )
            if not runs:
                raise InputError(
                    "A call that is captured in a CUDA graph has never run.",
                    hint="Run it once with the same shapes, on any stream, before the capture.",
                )
            bound = self._bound[key] = self._bound.pop(runs[-1])
            self.arena.capture(bound)
        return self._bound[key]


class Executor(Runner):
    """One rank's attention. q, k, v are this rank's shards [B, H, rows, D]."""

    def __init__(
        self,
        schedule: Schedule,
        comm: Comm,
        kernel: AttentionKernel,
        *,
        keep: str = "auto",
        name: str = "",
        arena: Arena | None = None,
    ) -> None:
        """Executors that share an arena must run one after another, or on streams of their own."""
        super().__init__(schedule, comm, arena or Arena(), name)
        self.kernel, self._keep, self._mask_tag = kernel, keep, 0
        self.tiles = TileSet(schedule.attention[1])
        self.masked: dict[BlockMask, Executor] = {}
        """Where the schedule is one for any mask: by mask, the least recently used first."""
        self._reversed: list[Schedule] = []

    def for_mask(self, mask: BlockMask) -> Executor:
        """This executor for one of the masks that its schedule serves; programs and memory are shared."""
        other = copy(self)
        other.tiles = TileSet(mask, self.tiles.places)
        other.name = self.name.replace(self.schedule.attention[1].digest, mask.digest)
        other._mask_tag = 2 * int(digest(mask.digest)[:6], 16)
        return other

    def renewed(self, schedule: Schedule) -> Executor:
        """Return an executor for another schedule of the same attention, lowered for what this one has run.

        It may be made on another thread: no memory is allocated, and nothing runs on a device.
        """
        other = Executor(schedule, self.comm, self.kernel, keep=self._keep, name=self.name, arena=self.arena)
        for (kind, lender, stream), bound in list(self._bound.items()):  # a copy: the model's thread adds
            if stream != CAPTURED:
                to = bound.program.target
                program = other.program(kind, to.near, collective=to.collective, lands=to.lands)
                prepared = other._new_bound(kind, program, bound.device).prepare()
                other._bound[kind, lender, stream] = prepared
        return other

    @property
    def backward_schedule(self) -> Schedule:
        if not self._reversed:
            from weft.schedule.reverse import reverse

            self._reversed.append(reverse(self.schedule, keep=self._keep))
        return self._reversed[0]

    def schedule_of(self, kind: str) -> Schedule:
        return self.backward_schedule if kind == BACKWARD else self.schedule

    def saved_tensors(self, kind: str) -> frozenset[str]:
        if kind != SAVING:
            return frozenset()
        return frozenset({"q"} | {piece.tensor for piece in self.backward_schedule.kept[self.comm.rank]}) - {
            "o"
        }

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, keep: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """The output, and with `keep` what `backward` needs besides q, k, v and the output itself."""
        frame = self._frame(scale, q.device)
        bound = self.run_program(SAVING if keep else FORWARD, frame, {"home q": (q,), "home kv": (k, v)})
        slots, program = frame.slots, bound.program
        (out,) = slots[program.slots["home o"]]
        if not keep:
            return out, []
        return out, [_joined(slots[slot]) for _, slot in sorted(program.saved.items())]

    def _frame(self, scale: float, device: torch.device) -> RunFrame:
        frame = RunFrame(self.comm, self.kernel, scale, device, self.tiles)
        frame.tag = self._mask_tag
        return frame

    @cached_property
    def reads_output(self) -> bool:
        """Whether the backward reads the result: it does where outputs are computed at home."""
        names = [name for name, _ in self._saved]
        return sum(name.startswith("lse") for name in names) > sum(name.startswith("out") for name in names)

    @property
    def _saved(self) -> list[tuple[str, Slot]]:
        """Names and slots of what a forward saves, which are the same over every transport."""
        lowered = (program for (kind, *_), program in self._programs.items() if kind == SAVING)
        program = next(lowered, None) or self.program(SAVING)
        return sorted(program.saved.items())

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor | None,
        saved: list[Tensor],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank's shards; `out` may be None unless `reads_output`."""
        frame = self._frame(scale, grad.device)
        q, k, v = inputs
        tensors: dict[str, Planes] = {"home q": (q,), "home kv": (k, v), "home do": (grad,)}
        if out is not None:
            tensors["home o"] = (out,)
        for (name, slot), x in zip(self._saved, saved, strict=True):
            tensors[name] = x.unbind(0) if slot.shape[0] > 1 else (x,)
        bound = self.run_program(BACKWARD, frame, tensors)
        results: Slots = frame.slots
        (dq,), (dk, dv) = (results[bound.program.slots[name]] for name in ("home dq", "home dkv"))
        return dq, dk, dv


def _joined(planes: Planes) -> Tensor:
    """A saved slot as one tensor: keys and values are two halves of one."""
    if len(planes) == 1:
        return planes[0]
    first = planes[0]
    return first.as_strided((len(planes), *first.shape), (first.numel(), *first.stride()))
