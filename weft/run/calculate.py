"""Calculate: run one partial attention, or its gradient, on the slots of a program."""

# torch's own types are incomplete here.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from weft.core.schedule import Attend
from weft.program.steps import Attention, Gradient
from weft.run.copies import Index, Planes, Slots, is_slice, on_device, pick, put
from weft.run.kernels import Accumulator, guarded

if TYPE_CHECKING:
    from weft.core.indices import IntArray
    from weft.core.schedule import Schedule
    from weft.program.slots import Slot
    from weft.run.kernels import AttentionKernel
    from weft.run.kernels.tiles import TileSet


class Calculation:
    """Operands in their slots and the heads that share keys; the tiles are those of each run."""

    def __init__(
        self, step: Attention | Gradient, schedule: Schedule, device: torch.device, fixed: Slots
    ) -> None:
        """`fixed` are slots whose memory is the same in every run: views of them are made once."""
        self.step = step
        problem, mask = schedule.attention
        op = schedule.ops[step.op]
        assert isinstance(op, Attend)
        self.op = op
        self.is_full = mask.is_dense  # then no row is without keys
        q_at, kv_at = (
            on_device(slot.positions(piece), device)
            for slot, piece in ((step.q, step.q_piece), (step.kv, step.kv_piece))
        )
        # Sums lie in the order of the operand's tokens, wherever the operand itself lies.
        self.sum_at = on_device(step.out.positions(step.q_piece), device)
        self.in_place = is_slice(self.sum_at)
        self.q, self.kv = _view(step.q, q_at, fixed), _view(step.kv, kv_at, fixed)
        self.out, self.lse = _view(step.out, self.sum_at, fixed), _view(step.lse, self.sum_at, fixed)
        if isinstance(step, Gradient):
            self.grad = _view(step.grad, on_device(step.grad.positions(step.q_piece), device), fixed)
            self.dkv_at = on_device(step.dkv.positions(step.kv_piece), device)
        share = problem.heads // problem.kv_heads
        kv_of = np.searchsorted(op.kv.heads.array, op.q.heads.array // share)
        group = -(-op.q.heads.size // op.kv.heads.size)
        self.aligned = np.array_equal(kv_of, np.arange(op.kv.heads.size).repeat(group))
        same = self.aligned and group == 1
        self.kv_of = None if same else torch.from_numpy(kv_of).to(device)
        self.members = () if same else tuple(torch.from_numpy(x).to(device) for x in _members(kv_of))

    def operands(self, slots: Slots, kernel: AttentionKernel) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v; heads that share keys get copies of them unless the kernel finds them itself."""
        k, v = self.kv(slots)
        if self.kv_of is not None and not (self.aligned and kernel.grouped):
            k, v = k.index_select(1, self.kv_of), v.index_select(1, self.kv_of)
        return self.q(slots)[0], k, v

    def attend(self, slots: Slots, kernel: AttentionKernel, tiles: TileSet, scale: float) -> None:
        step = self.step
        assert isinstance(step, Attention)
        (out,), (lse,) = self.out(slots), self.lse(slots)
        operands, active = self.operands(slots, kernel), tiles.of(self.op)
        kernel.attend(*operands, active, scale, Accumulator(out, lse.squeeze(-1), step.first))
        if not self.in_place:
            put(slots[step.out][0], self.sum_at, out, add=False)
            put(slots[step.lse][0], self.sum_at, lse, add=False)

    def gradient(self, slots: Slots, kernel: AttentionKernel, tiles: TileSet, scale: float) -> None:
        step = self.step
        assert isinstance(step, Gradient)
        (grad,), (out,), (lse,) = self.grad(slots), self.out(slots), self.lse(slots)
        lse = lse.squeeze(-1)
        done = out, lse if self.is_full else guarded(lse)
        operands, active = self.operands(slots, kernel), tiles.of(self.op)
        dq, dk, dv = kernel.attend_backward(grad, *operands, done, active, scale)
        heads = step.kv_piece.heads.size
        if dk.shape[1] != heads or not self.aligned:
            dk, dv = (self._by_kv_head(x, heads) for x in (dk, dv))
        _add(slots, step.dq, self.sum_at, (dq,), first=step.first[0])
        _add(slots, step.dkv, self.dkv_at, (dk, dv), first=step.first[1])

    def _by_kv_head(self, x: Tensor, heads: int) -> Tensor:
        """Add the gradients of query heads that share a key/value head, always in the same order."""
        wide = torch.promote_types(x.dtype, torch.float32)
        sums = torch.zeros(x.shape[0], heads, *x.shape[2:], dtype=wide, device=x.device)
        for targets, sources in zip(self.members[::2], self.members[1::2], strict=True):
            sums.index_add_(1, targets, x.index_select(1, sources).to(wide))
        return sums


def _members(kv_of: IntArray) -> list[IntArray]:
    """(kv heads, query heads) of the first query head of each kv head, of the second, and so on.

    No kv head is twice in one of them: sums of them need no atomic additions.
    """
    number = np.arange(len(kv_of)) - np.searchsorted(kv_of, kv_of)
    rounds = [np.flatnonzero(number == n) for n in range(number.max(initial=-1) + 1)]
    return [each for heads in rounds for each in (kv_of[heads], heads)]


def _view(slot: Slot, index: Index, fixed: Slots) -> Callable[[Slots], Planes]:
    """Part of a slot: a view made once where its memory is fixed, else made or gathered in each run."""
    if is_slice(index) and index == (slice(0, slot.shape[2]), slice(0, slot.shape[3])):
        return lambda slots: slots[slot]
    if slot in fixed and is_slice(index):
        views = tuple(pick(x, index) for x in fixed[slot])
        return lambda _: views
    return lambda slots: tuple([pick(x, index) for x in slots[slot]])


def _add(slots: Slots, slot: Slot, index: Index, values: Planes, *, first: bool) -> None:
    if slot.memory == "kernel":
        slots[slot] = values
        return
    for into, x in zip(slots[slot], values, strict=True):
        into.copy_(x) if first else put(into, index, x, add=True)
