"""Program: the steps of one rank for a schedule, a flat list over named slots.

`lower` writes it; the executor binds slots to tensors and runs it, the simulator prices its steps, traces
name them, `workspace` assigns memory to slots, and `prove` checks that no two accesses race.

Steps run in list order on the compute stream, except what a Post starts: it waits for all earlier steps of
the compute stream, then reads its sends and writes its receives on the communication stream. A
Wait orders the compute stream behind one message: its arrival, or (`sent`) the end of the reading of its
buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from weft.core.problem import Problem, Switch
from weft.core.schedule import Piece
from weft.program.slots import Slot


@dataclass(frozen=True)
class Target:
    """The transport of a program, and what a backward needs of it."""

    near: frozenset[int] = frozenset()
    """Peers that read each other's messages in place, in a window of memory that they share."""
    collective: bool = False
    """Whether an exchange between all ranks runs as one all_to_all."""
    save: frozenset[str] = frozenset()
    """Tensors ("q", "kv") that a backward reads again; empty for inference."""
    lands: bool = False
    """Messages of near peers are copied into the workspace: kernels do not read them over a link."""


class CopySegment(NamedTuple):
    """A rectangle of heads and tokens that goes from one slot to another."""

    source: Slot
    target: Slot
    piece: Piece


class Post(NamedTuple):
    """Start the messages of one exchange on the communication stream, after all earlier steps."""

    op: int
    label: str
    sends: tuple[tuple[int, Slot], ...]
    receives: tuple[tuple[int, Slot], ...]
    collective: bool = False
    """Run as one all_to_all of all ranks; sends and receives lie in one buffer each, by rank."""

    @property
    def num_bytes(self) -> int:
        return sum(slot.num_bytes for _, slot in self.sends)

    def __str__(self) -> str:
        sends = [f"{slot.name} → rank {peer}" for peer, slot in self.sends]
        receives = [f"{slot.name} ← rank {peer}" for peer, slot in self.receives]
        return f"post {self.label}: {', '.join(sends + receives)}"


class Wait(NamedTuple):
    """Order the compute stream behind a message from `peer`, or behind the reading of the one sent to it."""

    op: int
    label: str
    peer: int
    slot: Slot
    sent: bool = False

    @property
    def num_bytes(self) -> int:
        return self.slot.num_bytes

    def __str__(self) -> str:
        return f"{span_name(self)}: {self.slot.name}"


class Copy(NamedTuple):
    """Copy (or add) rectangles between slots, casting where the dtypes differ."""

    op: int
    segments: tuple[CopySegment, ...]
    add: bool = False
    label: str = "copy"

    @property
    def num_bytes(self) -> int:
        return sum(s.piece.cells * s.target.unit for s in self.segments)

    def __str__(self) -> str:
        pairs = [f"{segment.source.name} → {segment.target.name}" for segment in self.segments]
        return f"{'add' if self.add else 'copy'} {', '.join(dict.fromkeys(pairs))}"


class View(NamedTuple):
    """Let `target` be a view of `source`: no bytes move."""

    op: int
    source: Slot
    target: Slot
    label: str = "view"
    num_bytes: int = 0

    def __str__(self) -> str:
        return f"view {self.source.name} → {self.target.name}"


class Fill(NamedTuple):
    """Set a slot to one value."""

    op: int
    slot: Slot
    value: float = 0.0
    label: str = "copy"

    @property
    def num_bytes(self) -> int:
        return self.slot.num_bytes

    def __str__(self) -> str:
        return f"fill {self.slot.name} with {self.value}"


class Cast(NamedTuple):
    """Convert a whole slot to the dtype of another."""

    op: int
    source: Slot
    target: Slot
    label: str = "copy"

    @property
    def num_bytes(self) -> int:
        return self.target.num_bytes

    def __str__(self) -> str:
        return f"cast {self.source.name} → {self.target.name}"


class Attention(NamedTuple):
    """Partial attention of `q_piece` to `kv_piece`, merged into `out` and `lse`; `first` overwrites them."""

    op: int
    label: str
    q: Slot
    q_piece: Piece
    kv: Slot
    kv_piece: Piece
    out: Slot
    lse: Slot
    first: bool
    num_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.label}: {self.q.name} × {self.kv.name} → {self.out.name}"


class Gradient(NamedTuple):
    """The backward of one partial attention: dq and dkv of its pieces, added to their slots."""

    op: int
    label: str
    q: Slot
    q_piece: Piece
    kv: Slot
    kv_piece: Piece
    out: Slot
    lse: Slot
    grad: Slot
    dq: Slot
    dkv: Slot
    first: tuple[bool, bool]
    """Whether dq and dkv are the first to be written to their slots."""
    num_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.label}: {self.q.name} × {self.kv.name} → {self.dq.name}, {self.dkv.name}"


Step = Post | Wait | Copy | View | Fill | Cast | Attention | Gradient


def span_name(step: Step, peer: int = -1) -> str:
    """Return the name of a step in timelines, or of the message that a Post sends to `peer`."""
    if isinstance(step, Post):
        return f"post {step.label}" if peer < 0 else f"send {step.label} → {peer}"
    if isinstance(step, Wait):
        return f"finish {step.label}" if step.sent else f"wait {step.label} ← {step.peer}"
    return step.label


def accesses(step: Step) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """Return the slots that a step reads and those that it writes, on its own stream."""
    if isinstance(step, Post):
        return tuple(slot for _, slot in step.sends), tuple(slot for _, slot in step.receives)
    if isinstance(step, Copy):
        sources = tuple(segment.source for segment in step.segments)
        targets = tuple(segment.target for segment in step.segments)
        return (sources + targets if step.add else sources), targets
    if isinstance(step, Cast):
        return (step.source,), (step.target,)
    if isinstance(step, Fill):
        return (), (step.slot,)
    if isinstance(step, Attention):
        sums = (step.out, step.lse)
        return (step.q, step.kv, *(() if step.first else sums)), sums
    if isinstance(step, Gradient):
        sums = (step.dq, step.dkv)
        old = tuple(slot for slot, first in zip(sums, step.first, strict=True) if not first)
        return (step.q, step.kv, step.out, step.lse, step.grad, *old), sums
    return (), ()  # a View names memory, and a Wait orders it


@dataclass(eq=False)
class Program:
    """The steps of one rank in one direction of a schedule."""

    rank: int
    problem: Problem | Switch
    target: Target
    steps: list[Step] = field(default_factory=list[Step])
    slots: dict[str, Slot] = field(default_factory=dict[str, Slot])
    """Slots of the caller, and slots that a backward shares, by name: `home q`, `out of q0`."""
    saved: dict[str, Slot] = field(default_factory=dict[str, Slot])
    """Forward: slots that the backward reads, by their names there."""

    @cached_property
    def roots(self) -> list[Slot]:
        """Every slot that has memory of its own, in order of first use."""
        slots = [*self.slots.values()]
        for step in self.steps:
            for some in accesses(step):
                slots += some
        return list(dict.fromkeys([slot if slot.parent is None else slot.root for slot in slots]))

    @cached_property
    def attends(self) -> bool:
        """Whether it computes attention, or only moves tensors."""
        return any(isinstance(step, Attention | Gradient) for step in self.steps)

    @cached_property
    def bytes_sent(self) -> int:
        return sum(step.num_bytes for step in self.steps if isinstance(step, Post))

    def exchanges(self) -> Iterator[tuple[int, Post]]:
        for at, step in enumerate(self.steps):
            if isinstance(step, Post):
                yield at, step
