"""Bind: give the slots of a program their tensors, and turn its steps into calls.

Slots of the workspace are bound once; the caller's tensors, results and what a kernel returns are looked up
in the frame of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.core.problem import Switch
from weft.program.slots import Slot
from weft.program.steps import Cast, Copy, Fill, Gradient, Post, Program, Step, View, Wait, accesses
from weft.program.workspace import assign, window
from weft.run.calculate import Calculation
from weft.run.copies import ATTENTION, Axes, Copier, Planes, SegmentMoves, Slots, in_turn, on_device, pick

if TYPE_CHECKING:
    from weft.core.schedule import Schedule
    from weft.run.comm import Comm, Lender, PendingExchange
    from weft.run.fused import FusedCopier
    from weft.run.kernels import AttentionKernel
    from weft.run.kernels.tiles import TileSet

Flats = dict[Slot, Tensor]
"""Buffers of messages, as bytes."""


class RunFrame:
    """One run of a program: tensors by slot, exchanges under way, communicator and kernel."""

    __slots__ = ("comm", "device", "flats", "kernel", "lender", "scale", "slots", "tag", "tiles", "transits")

    def __init__(
        self, comm: Comm, kernel: AttentionKernel, scale: float, device: torch.device, tiles: TileSet
    ) -> None:
        self.comm, self.kernel, self.scale, self.device, self.tiles = comm, kernel, scale, device, tiles
        self.lender: Lender | None = None
        self.tag = 0
        """What the mask of a call adds to the tag of a program that serves any."""
        self.slots: Slots = {}
        self.flats: Flats = {}
        self.transits: dict[int, PendingExchange] = {}


Call = Callable[[RunFrame], None]


class Bound:
    """A program with tensors: `calls` has one function for each of its steps."""

    def __init__(self, program: Program, schedule: Schedule, tag: int, device: torch.device) -> None:
        self.program, self.schedule, self.tag, self.device = program, schedule, tag, device
        problem = program.problem
        self.axes = Axes(problem.dims[1], problem.dims[0]) if isinstance(problem, Switch) else ATTENTION
        self.workspace, self.window = assign(program), window(program)
        self.num_bytes = self.workspace.num_bytes
        self.calls: list[Call] = []
        self.fixed: Slots = {}
        self.flats: Flats = {}
        self._slots = _by_root(program)
        self._landed: dict[tuple[Slot, int], Slots] = {}
        self._moves = SegmentMoves()

    def prepare(self) -> Bound:
        """Do the part of `bind` that needs no memory, on any thread."""
        for step in self.program.steps:
            for segment in step.segments if isinstance(step, Copy) else ():
                _ = self._moves.of(segment).parts
        return self

    def unbind(self) -> None:
        self.calls = []
        for views in (self.fixed, self.flats, self._landed):  # the copier has them too
            views.clear()

    @torch.inference_mode(mode=False)  # views outlive the mode of the call that makes them
    def bind(self, block: Tensor, lent: Tensor | None) -> None:
        self.unbind()
        for memory, spaces in ((block, self.workspace), (lent, self.window)):
            for root, (number, offset) in spaces.places.items():
                if number == 0 and memory is not None:
                    self._carve(root, memory.narrow(0, offset, root.num_bytes), self.fixed, self.flats)
        self.copier = copier_of(self.axes, self.device, self.fixed, self._moves)
        self._borrowed = [(slot, place) for slot, place in self.workspace.places.items() if place[0]]
        results = [root for root in self.program.roots if root.memory == "result"]
        self._fresh = [(root, _dtype(root)) for root in (*results, *self.program.saved.values())]
        self.calls = [self._call(step) for step in self.program.steps]
        for at, slots in self._last_uses().items():
            self.calls[at] = _freeing(self.calls[at], slots)
        self._moves.clear()

    def _last_uses(self) -> dict[int, list[Slot]]:
        """Return the slots that kernels returned, by the last step that reads them: then they are freed."""
        last: dict[Slot, int] = {}
        for at, step in enumerate(self.program.steps):
            last |= {slot: at for slot in chain.from_iterable(accesses(step)) if slot.memory == "kernel"}
        returned = set(self.program.slots.values())
        uses: dict[int, list[Slot]] = {}
        for slot, at in last.items():
            if slot not in returned:
                uses.setdefault(at, []).append(slot)
        return uses

    def _carve(self, root: Slot, flat: Tensor, slots: Slots, flats: Flats) -> None:
        """Make the views of all slots that lie in one stretch of memory."""
        for slot, offset in self._slots[root]:
            view = flat.narrow(0, offset, slot.num_bytes)
            flats[slot] = view
            if slot.shape:
                slots[slot] = view.view(_dtype(slot)).view(slot.shape).unbind(0)

    def begin(self, frame: RunFrame, inputs: Slots) -> None:
        """Give a frame its slots: those that are fixed, the caller's, and results of its own."""
        slots = frame.slots = self.fixed.copy()
        slots.update(inputs)
        for root, dtype in self._fresh:
            planes, *shape = root.shape
            new = partial(torch.empty, dtype=dtype, device=frame.device)
            if planes == 1:
                slots[root] = (new(shape),)
            elif root.memory == "saved":
                slots[root] = new(root.shape).unbind(0)
            else:
                slots[root] = tuple(new(shape) for _ in range(planes))
            if root.memory == "saved":  # it may be a message that is received there
                frame.flats[root] = _flat(slots[root])
        for slot, (number, offset) in self._borrowed:
            result, plane = self.workspace.results[number - 1]
            flat = _flat((slots[result][plane],)).narrow(0, offset, slot.num_bytes)
            self._carve(slot, flat, slots, frame.flats)

    def run(self, frame: RunFrame) -> None:
        for call in self.calls:
            call(frame)

    def flat(self, frame: RunFrame, slot: Slot) -> Tensor:
        """Return the bytes of a message."""
        flat = self.flats.get(slot, frame.flats.get(slot))
        if flat is None:  # a stretch of a tensor of the caller
            assert slot.parent is not None, f"{slot} has no memory"
            flat = _flat(frame.slots[slot.parent]).narrow(0, slot.offset, slot.num_bytes)
        return flat

    def _call(self, step: Step) -> Call:
        if isinstance(step, Post):
            return self._post(step)
        if isinstance(step, Wait):
            return self._wait(step)
        if isinstance(step, Copy):
            return self._copy(step)
        if isinstance(step, Fill):
            return self._fill(step)
        if isinstance(step, Cast):
            cast = self.copier.cast(step.source, step.target)
            return lambda frame: cast(frame.slots)
        if isinstance(step, View):
            return self._view(step)
        calculation = Calculation(step, self.schedule, self.device, self.fixed)
        if isinstance(step, Gradient):
            return lambda frame: calculation.gradient(frame.slots, frame.kernel, frame.tiles, frame.scale)
        return lambda frame: calculation.attend(frame.slots, frame.kernel, frame.tiles, frame.scale)

    def _post(self, step: Post) -> Call:
        label, tag, op, collective = f"op {step.op} ({step.label})", self.tag, step.op, step.collective
        nowhere = {
            slot: torch.empty(slot.num_bytes, dtype=torch.uint8, device="meta")
            for _, slot in step.receives
            if slot.memory == "peer" and not self.program.target.lands
        }
        known = self.flats | nowhere
        sends = [(peer, known.get(slot)) for peer, slot in step.sends]
        receives = [(peer, known.get(slot)) for peer, slot in step.receives]
        if all(flat is not None for _, flat in (*sends, *receives)):

            def post(frame: RunFrame) -> None:
                frame.transits[op] = frame.comm.post(sends, receives, label, tag + frame.tag)  # type: ignore[arg-type]

            def post_all(frame: RunFrame) -> None:
                frame.transits[op] = frame.comm.all_to_all(sends, receives, label)  # type: ignore[arg-type]

            return post_all if collective else post

        def post_in_place(frame: RunFrame) -> None:
            find = self.flat
            going = [(peer, find(frame, slot)) for peer, slot in step.sends]
            coming = [(peer, nowhere[s] if s in nowhere else find(frame, s)) for peer, s in step.receives]
            if collective:
                frame.transits[op] = frame.comm.all_to_all(going, coming, label)
            else:
                frame.transits[op] = frame.comm.post(going, coming, label, tag + frame.tag)

        return post_in_place

    def _wait(self, step: Wait) -> Call:
        op, peer, slot = step.op, step.peer, step.slot
        if step.sent:
            return lambda frame: frame.transits[op].wait_sent(peer)
        if slot.memory != "peer" or self.program.target.lands:
            return lambda frame: frame.transits[op].wait_for(peer)  # type: ignore[return-value]

        def land(frame: RunFrame) -> None:
            there = frame.transits[op].wait_for(peer)
            assert there is not None, f"{slot} did not stay in the memory of rank {peer}"
            key = slot, there.data_ptr()
            if key not in self._landed:
                self._landed[key] = {}
                self._carve(slot, there, self._landed[key], {})
            frame.flats[slot] = there
            frame.slots.update(self._landed[key])

        return land

    def _copy(self, step: Copy) -> Call:
        launches = self.copier.launches(step.segments, add=step.add)
        launch = launches[0] if len(launches) == 1 else in_turn(launches)
        return lambda frame: launch(frame.slots)

    def _fill(self, step: Fill) -> Call:
        slot, value, known = step.slot, step.value, None
        if slot in self.fixed:  # keys and values lie side by side
            known = (self.flats[slot].view(_dtype(slot)),)

        def fill(frame: RunFrame) -> None:
            for plane in known or frame.slots[slot]:
                plane.fill_(value)

        return fill

    def _view(self, step: View) -> Call:
        source, target = step.source, step.target
        assert target.piece is not None
        index = on_device(source.positions(target.piece), self.device)
        if source in self.fixed:
            self.fixed[target] = tuple(pick(x, index, self.axes) for x in self.fixed[source])
            return lambda _: None  # the view is there

        def view(frame: RunFrame) -> None:
            frame.slots[target] = tuple([pick(x, index, self.axes) for x in frame.slots[source]])

        return view


def copier_of(axes: Axes, device: torch.device, fixed: Slots, moves: SegmentMoves) -> Copier | FusedCopier:
    """Return fused copies where Triton runs on the device, else those of torch."""
    if device.type == "cuda":
        from weft.run import fused

        if fused.serves(device):
            return fused.FusedCopier(axes, device, fixed, moves)
    return Copier(axes, device, fixed, moves)


def _by_root(program: Program) -> dict[Slot, list[tuple[Slot, int]]]:
    """Return every slot of a program with its offset in the root that it lies in, by that root."""
    offsets: dict[Slot, dict[Slot, int]] = {}
    for step in program.steps:
        for slot in chain.from_iterable(accesses(step)):
            nested = [slot]
            while (parent := nested[-1].parent) is not None:
                nested.append(parent)
            offset = 0
            for each in reversed(nested):
                offset += each.offset
                offsets.setdefault(nested[-1], {})[each] = offset
    return {root: list(inside.items()) for root, inside in offsets.items()}


def _dtype(slot: Slot) -> torch.dtype:
    return getattr(torch, slot.dtype)


def _flat(planes: Planes) -> Tensor:
    """Return the bytes of a slot whose planes lie one after another."""
    if len(planes) == 1:
        return planes[0].view(-1).view(torch.uint8)
    return planes[0].as_strided((len(planes) * planes[0].numel(),), (1,)).view(torch.uint8)


def _freeing(call: Call, slots: list[Slot]) -> Call:
    def run(frame: RunFrame) -> None:
        call(frame)
        for slot in slots:
            del frame.slots[slot]

    return run
