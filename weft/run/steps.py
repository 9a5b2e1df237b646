"""The flat calls a compiled schedule consists of, each doing one thing to named slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.run.comm import Comm, Lender, Transit
from weft.run.kernels import Kernel, guarded
from weft.run.kernels.tiles import Tiles
from weft.run.places import Index, Planes, is_slice, move, pick, put

Message = tuple[int, int]
"""(op, peer)."""


class Frame:
    """One run of a program: slots and buffers by name, messages by (op, peer), and who does the work."""

    def __init__(self, comm: Comm, kernel: Kernel, scale: float, device: torch.device) -> None:
        self.comm, self.kernel, self.scale, self.device = comm, kernel, scale, device
        self.slots: dict[str, Planes] = {}
        self.buffers: dict[str, Tensor] = {}
        self.outgoing: dict[Message, str] = {}
        self.incoming: dict[Message, str] = {}
        """Buffers of messages, by name."""
        self.kept: dict[str, Tensor] = {}
        self.lender: Lender | None = None
        self.land: Callable[[Frame, str, Tensor], None]
        """What a program does with a message that lies elsewhere than in its buffer."""
        self.transits: dict[int, Transit] = {}
        self.started: set[str] = set()


@dataclass(frozen=True, eq=False)
class Copy:
    """Part of one slot into part of another; `add` for gradients that meet."""

    source: str
    source_index: Index
    target: str
    target_index: Index
    add: bool = False

    def run(self, frame: Frame) -> None:
        for given, into in zip(frame.slots[self.source], frame.slots[self.target], strict=True):
            move(given, self.source_index, into, self.target_index, add=self.add)


@dataclass(frozen=True, eq=False)
class View:
    """A slot that is part of another one: no copy is made."""

    source: str
    index: Index
    target: str

    def run(self, frame: Frame) -> None:
        frame.slots[self.target] = tuple(pick(x, self.index) for x in frame.slots[self.source])


@dataclass(frozen=True, eq=False)
class Post:
    """Start the messages of one exchange."""

    op: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    label: str
    tag: int

    def run(self, frame: Frame) -> None:
        frame.transits[self.op] = frame.comm.post(
            [(peer, frame.buffers[frame.outgoing[self.op, peer]]) for peer in self.sends],
            [(peer, frame.buffers[frame.incoming[self.op, peer]]) for peer in self.receives],
            self.label,
            self.tag,
        )


@dataclass(frozen=True, eq=False)
class Wait:
    """Until the message of an exchange from one peer is here."""

    op: int
    peer: int

    def run(self, frame: Frame) -> None:
        found = frame.transits[self.op].wait_for(self.peer)
        if found is not None:
            frame.land(frame, frame.incoming[self.op, self.peer], found)


@dataclass(frozen=True, eq=False)
class Fill:
    """Set a slot to zero before parts are added to it."""

    slot: str

    def run(self, frame: Frame) -> None:
        for plane in frame.slots[self.slot]:
            plane.zero_()


@dataclass(frozen=True, eq=False)
class New:
    """A slot of its own for a result that the caller will own; `shape` is [planes, B, heads, rows, D]."""

    slot: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def run(self, frame: Frame) -> None:
        planes, *shape = self.shape
        frame.slots[self.slot] = tuple(
            torch.empty(shape, dtype=self.dtype, device=frame.device) for _ in range(planes)
        )


@dataclass(frozen=True, eq=False)
class Cast:
    """The one place where sums become the caller's dtype; no copy where they already are."""

    source: str
    target: str
    dtype: torch.dtype

    def run(self, frame: Frame) -> None:
        frame.slots[self.target] = tuple(x.to(self.dtype) for x in frame.slots[self.source])


@dataclass(frozen=True, eq=False)
class Calculation:
    """What both directions of an Attend know: its operands in their slots, its tiles, its heads."""

    q: str
    q_index: Index
    kv: str
    kv_index: Index
    out: str
    lse: str
    """Slots of the output and log-sum-exp that belong to the query slot."""
    tiles: Tiles
    kv_of: Tensor | None
    """The key/value head of each query head, where they are not the same."""
    whole: bool
    """Every calculation on this query slot takes all of it, so the first one may simply assign."""
    sum_dtype: torch.dtype

    def operands(self, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        (q,) = frame.slots[self.q]
        k, v = (pick(x, self.kv_index) for x in frame.slots[self.kv])
        if self.kv_of is not None:
            k, v = (x.index_select(1, self.kv_of) for x in (k, v))
        return pick(q, self.q_index), k, v

    def rows(self, x: Tensor) -> Tensor:
        return pick(x, self.q_index)


@dataclass(frozen=True, eq=False)
class Attention(Calculation):
    """Partial attention, merged into the output of its query slot."""

    def run(self, frame: Frame) -> None:
        if self.out not in frame.started:
            frame.started.add(self.out)
            if self.whole:
                out, lse = frame.kernel.attend(*self.operands(frame), self.tiles, frame.scale)
                frame.slots[self.out], frame.slots[self.lse] = (out,), (lse.unsqueeze(-1),)
                return
            (q,) = frame.slots[self.q]
            frame.slots[self.out] = (torch.zeros(q.shape, dtype=self.sum_dtype, device=q.device),)
            empty = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=self.sum_dtype, device=q.device)
            frame.slots[self.lse] = (empty,)
        (all_out,), (all_lse,) = frame.slots[self.out], frame.slots[self.lse]
        into = self.rows(all_out), self.rows(all_lse).squeeze(-1)
        frame.kernel.attend(*self.operands(frame), self.tiles, frame.scale, into)
        if not is_slice(self.q_index):
            put(all_out, self.q_index, into[0], add=False)
            put(all_lse, self.q_index, into[1].unsqueeze(-1), add=False)


@dataclass(frozen=True, eq=False)
class Gradient(Calculation):
    """The backward of one partial attention: adds to the gradients of its query and key/value slots."""

    grad: str = ""
    dq: str = ""
    dkv: str = ""

    def run(self, frame: Frame) -> None:
        (grad,) = frame.slots[self.grad]
        (out,), (lse,) = frame.slots[self.out], frame.slots[self.lse]
        done = self.rows(out), guarded(self.rows(lse).squeeze(-1))
        operands = self.operands(frame)
        dq, dk, dv = frame.kernel.attend_backward(self.rows(grad), *operands, done, self.tiles, frame.scale)
        if self.kv_of is not None:
            heads = pick(frame.slots[self.kv][0], self.kv_index).shape[1]
            dk, dv = (self._by_kv_head(x, heads) for x in (dk, dv))
        self._add(frame, self.dq, self.q, self.q_index, (dq,))
        self._add(frame, self.dkv, self.kv, self.kv_index, (dk, dv))

    def _by_kv_head(self, x: Tensor, heads: int) -> Tensor:
        """Query heads that share a key/value head add their gradients."""
        assert self.kv_of is not None
        return x.new_zeros(x.shape[0], heads, *x.shape[2:]).index_add_(1, self.kv_of, x)

    def _add(self, frame: Frame, slot: str, like: str, index: Index, given: Planes) -> None:
        planes = frame.slots[like]
        if slot not in frame.started:
            frame.started.add(slot)
            if all(x.shape == plane.shape for x, plane in zip(given, planes, strict=True)):
                frame.slots[slot] = given
                return
            frame.slots[slot] = tuple(x.new_zeros(p.shape) for x, p in zip(given, planes, strict=True))
        for into, x in zip(frame.slots[slot], given, strict=True):
            put(into, index, x, add=True)
