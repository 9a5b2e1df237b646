"""Program: one rank's part of a schedule as flat calls over named slots, with its buffers laid out."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from weft.run.arena import Arena
from weft.run.comm import Lender
from weft.run.places import Planes
from weft.run.steps import Frame


class Step(Protocol):
    """One call of a program, a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def run(self, frame: Frame) -> None: ...


@dataclass(frozen=True, eq=False)
class Region:
    """Part of a flat buffer that is a slot: `shape` is [planes, B, heads, rows, D]."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def bind(self, buffer: Tensor) -> Planes:
        part = buffer[self.offset : self.offset + self.num_bytes]
        return part.view(self.dtype).view(self.shape).unbind(0)


class _Bound(NamedTuple):
    """Buffers and the slots in them, good as long as the arena's block is the same."""

    block: Tensor
    buffers: dict[str, Tensor]
    slots: dict[str, Planes]


@dataclass(eq=False)
class Program:
    """What one rank does in one direction. Buffers are lent by an arena for a run, unless they are kept."""

    steps: list[Step] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each flat buffer."""
    regions: dict[str, Region] = field(default_factory=dict)
    """Slots that live in buffers."""
    outgoing: dict[tuple[int, int], str] = field(default_factory=dict)
    incoming: dict[tuple[int, int], str] = field(default_factory=dict)
    """Buffer of each message, by (op, peer)."""
    keep: tuple[str, ...] = ()
    """Buffers that the backward program reads."""
    sums: tuple[str, ...] = ()
    """Slots of outputs and log-sum-exps, which the backward program reads too."""
    direct: dict[str, str] = field(default_factory=dict)
    """Results that are another slot itself, cast: no second copy of them is worth keeping."""
    _bound: dict[Lender | None, _Bound] = field(default_factory=dict)
    _landed: dict[tuple[str, int], dict[str, Planes]] = field(default_factory=dict)
    """Slots in messages that were read in place, by buffer and address."""

    def to(self, device: torch.device) -> None:
        """Put every index tensor on the device, so that running needs no copies from the host."""
        for at, step in enumerate(self.steps):
            moved = {f.name: _moved(getattr(step, f.name), device) for f in fields(step)}
            self.steps[at] = type(step)(**moved)

    def prepare(self, frame: Frame, arena: Arena, *, keep: bool, device: torch.device) -> dict[str, Tensor]:
        """Bind every buffer and its slots into a frame; returns the buffers to keep for the backward."""
        frame.lender = frame.comm.begin(device)
        bound = self._bound.get(frame.lender)
        if bound is None or not arena.has(bound.block):
            bound = self._bound[frame.lender] = self._bind(frame.lender, arena, device)
        frame.buffers.update(bound.buffers)
        frame.slots.update(bound.slots)
        fresh: dict[str, Tensor] = {}
        if keep:
            # What the backward reads must survive other layers that run the same program.
            fresh = {name: self._new(name, device) for name in self.keep}
            for name, buffer in fresh.items():
                frame.slots.update(self._slots(name, buffer))
            frame.kept = fresh
            if frame.lender is None:
                frame.buffers.update(fresh)
        frame.outgoing, frame.incoming, frame.land = self.outgoing, self.incoming, self._land
        return fresh

    @torch.inference_mode(mode=False)  # buffers outlive the mode of the call that makes them
    def _bind(self, lender: Lender | None, arena: Arena, device: torch.device) -> _Bound:
        """Buffers from the arena, except messages where peers read or write them in memory of their own."""
        near = lender.near if lender else frozenset()
        in_place = {name for (_, peer), name in self.incoming.items() if peer in near}
        messages = {*self.outgoing.values(), *self.incoming.values()} - in_place if lender else set()
        own = {name: size for name, size in self.sizes.items() if name not in messages | in_place}
        block, buffers = arena.lend(own, device)
        slots: dict[str, Planes] = {}
        if lender:
            buffers |= lender.lend({name: self.sizes[name] for name in self.sizes if name in messages})
        for name, buffer in buffers.items():
            slots |= self._slots(name, buffer)
        nowhere = {name: torch.empty(self.sizes[name], dtype=torch.uint8, device="meta") for name in in_place}
        return _Bound(block, buffers | nowhere, slots)

    def _slots(self, name: str, buffer: Tensor) -> dict[str, Planes]:
        return {slot: self.regions[slot].bind(buffer) for slot in self._slots_of.get(name, ())}

    @cached_property
    def _slots_of(self) -> dict[str, list[str]]:
        """Slots by the buffer that they live in."""
        found: dict[str, list[str]] = {}
        for slot, region in self.regions.items():
            found.setdefault(region.buffer, []).append(slot)
        return found

    def _land(self, frame: Frame, name: str, found: Tensor) -> None:
        """A message is used, and passed on, where it lies; only what the backward will read is copied."""
        frame.buffers[name] = found
        if name in frame.kept:
            frame.kept[name].copy_(found)
            return
        key = name, found.data_ptr()
        if key not in self._landed:
            self._landed[key] = self._slots(name, found)
        frame.slots.update(self._landed[key])

    def _new(self, name: str, device: torch.device) -> Tensor:
        return torch.empty(self.sizes[name], dtype=torch.uint8, device=device)

    def run(self, frame: Frame) -> None:
        for step in self.steps:
            step.run(frame)
        for transit in frame.transits.values():
            transit.finish()


def _moved(thing: Any, device: torch.device) -> Any:
    if isinstance(thing, Tensor):
        return thing.to(device)
    if isinstance(thing, tuple):
        return tuple(_moved(item, device) for item in thing)
    return thing
