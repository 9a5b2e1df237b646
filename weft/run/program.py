"""Program: one rank's part of a schedule as flat calls over named slots, with its buffers laid out."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from weft.run.arena import Arena
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
    _block: Tensor | None = None
    _lent: dict[str, Tensor] = field(default_factory=dict)
    _slots: dict[str, Planes] = field(default_factory=dict)
    """Views of the arena's block, made again when it has become another one."""

    def to(self, device: torch.device) -> None:
        """Put every index tensor on the device, so that running needs no copies from the host."""
        for at, step in enumerate(self.steps):
            moved = {f.name: _moved(getattr(step, f.name), device) for f in fields(step)}
            self.steps[at] = type(step)(**moved)

    def prepare(self, frame: Frame, arena: Arena, *, keep: bool, device: torch.device) -> dict[str, Tensor]:
        """Bind every buffer and its slots into a frame; returns the buffers to keep for the backward."""
        if self._block is None or not arena.has(self._block):
            self._block, self._lent = arena.lend(self.sizes, device)
            self._slots = {slot: r.bind(self._lent[r.buffer]) for slot, r in self.regions.items()}
        buffers, slots = self._lent, self._slots
        fresh: dict[str, Tensor] = {}
        if keep:
            # What the backward reads must survive other layers that run the same program.
            fresh = {name: self._new(name, device) for name in self.keep}
            buffers = buffers | fresh
            again = {s: r.bind(fresh[r.buffer]) for s, r in self.regions.items() if r.buffer in fresh}
            slots = slots | again
        frame.slots.update(slots)
        frame.outgoing = {key: buffers[name] for key, name in self.outgoing.items()}
        frame.incoming = {key: buffers[name] for key, name in self.incoming.items()}
        return fresh

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
