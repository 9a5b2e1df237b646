"""What programs really compute: all ranks on real bytes, in the worst order that nothing forbids.

It knows nothing of `prove`. Memory begins as NaN, and messages move when it hurts most:

late    A buffer to receive into is NaN from its Post on. Ranks run until all of them are stuck; only then is
        one message read from its sender's memory, if possible when the sender is about to write it again, and
        it is delivered when its receiver waits.
early   A message moves as soon as both ends are posted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.cases import token_mask
from weft.core.mask import BlockMask
from weft.core.problem import Switch
from weft.core.schedule import Piece
from weft.program.slots import Slot
from weft.program.steps import Attention, Cast, Copy, Fill, Gradient, Post, Program, Step, Wait
from weft.program.workspace import Workspace, window

ORDERS = ("late", "early")
POISON = 0xFF  # NaN in every dtype


class StuckError(Exception):
    """No rank can go on, or a step waits for what was never posted."""


@dataclass(eq=False)
class Letter:
    """One message: its ends, once they are posted, and its bytes, once they are read."""

    sender: Rank | None = None
    receiver: Rank | None = None
    source: Slot | None = None
    target: Slot | None = None
    data: Tensor | None = None


def run(
    programs: Sequence[Program],
    workspaces: Sequence[Workspace],
    inputs: Sequence[Mapping[str, Tensor]],
    mask: BlockMask | None,
    scale: float,
    order: str,
    seed: int = 0,
) -> list[dict[str, Tensor]]:
    """Return what each rank has in the end in the slots of `slots` and `saved`, as [planes, …] tensors."""
    allowed = None if mask is None else torch.from_numpy(token_mask(mask))
    ranks = [Rank(*each, allowed, scale) for each in zip(programs, workspaces, inputs, strict=True)]
    World(ranks, order, np.random.default_rng(seed)).run()
    return [
        {name: rank.tensor(slot) for name, slot in {**rank.program.slots, **rank.program.saved}.items()}
        for rank in ranks
    ]


class World:
    """Ranks that take turns, and the letters between them by (op, source, target)."""

    def __init__(self, ranks: list[Rank], order: str, rng: np.random.Generator) -> None:
        self.ranks, self.late, self.rng = ranks, order == "late", rng
        self.letters: dict[tuple[int, int, int], Letter] = {}

    def run(self) -> None:
        while running := [rank for rank in self.ranks if rank.at < len(rank.steps)]:
            free = [rank for rank in running if not self.is_stuck(rank)]
            if free:
                rank = free[0] if self.late else free[int(self.rng.integers(len(free)))]
                self.step(rank)
            elif not self.late or not self.move_one(running):
                raise StuckError(f"ranks wait at steps {[rank.at for rank in self.ranks]}")

    def letter(self, rank: Rank, op: int, peer: int, *, sent: bool) -> Letter:
        ends = (rank.program.rank, peer) if sent else (peer, rank.program.rank)
        return self.letters.setdefault((op, *ends), Letter())

    def waited(self, rank: Rank) -> tuple[Wait, Letter] | None:
        step = rank.steps[rank.at]
        return (
            (step, self.letter(rank, step.op, step.peer, sent=step.sent)) if isinstance(step, Wait) else None
        )

    def is_stuck(self, rank: Rank) -> bool:
        waited = self.waited(rank)
        if waited and not (waited[1].sender if waited[0].sent else waited[1].receiver):
            raise StuckError(f"{waited[0]} was not posted")
        return waited is not None and waited[1].data is None

    def move_one(self, stuck: list[Rank]) -> bool:
        """Read one message; one whose sender waits for that, or has nothing left to do, if there is one."""
        waits = [self.waited(rank) for rank in stuck]
        ready = [pair for pair in waits if pair and pair[1].sender and pair[1].receiver]
        late = [pair for pair in ready if pair[0].sent or pair[1].sender not in stuck]
        if ready:
            pairs = late or ready
            self.move(pairs[int(self.rng.integers(len(pairs)))][1])
        return bool(ready)

    def move(self, letter: Letter) -> None:
        assert letter.sender and letter.receiver and letter.source and letter.target
        data = letter.sender.origin(letter.source)
        if letter.target.root.memory == "peer":
            letter.data = data  # in place
            if letter.receiver.program.target.lands and not self.late:
                self.deliver(letter)
            return
        letter.data = data.clone()
        if not self.late:
            self.deliver(letter)

    def deliver(self, letter: Letter) -> None:
        assert letter.receiver and letter.target and letter.data is not None
        if letter.receiver.is_in_place(letter.target):
            letter.receiver.landed[letter.target.root] = letter.data
            return
        if letter.target.root.memory == "peer":
            letter.receiver.origins[letter.target.root] = letter.data
        into = letter.receiver.bytes(letter.target)
        into.copy_(letter.data)

    def step(self, rank: Rank) -> None:
        step = rank.steps[rank.at]
        waited = self.waited(rank)
        if waited and not step.sent and (self.late or rank.is_in_place(waited[1].target)):  # type: ignore[union-attr]
            self.deliver(waited[1])
        elif isinstance(step, Post):
            self.post(rank, step)
        elif not waited:
            rank.compute(step)
        rank.at += 1

    def post(self, rank: Rank, step: Post) -> None:
        letters: list[Letter] = []
        for peer, slot in step.sends:
            letters.append(self.letter(rank, step.op, peer, sent=True))
            letters[-1].sender, letters[-1].source = rank, slot
        for peer, slot in step.receives:
            letters.append(self.letter(rank, step.op, peer, sent=False))
            letters[-1].receiver, letters[-1].target = rank, slot
            if self.late and not rank.is_in_place(slot):
                rank.bytes(slot).fill_(POISON)
        for letter in letters:
            if not self.late and letter.sender and letter.receiver:
                self.move(letter)


class Rank:
    """One rank's memory, and the arithmetic of its steps in float64."""

    def __init__(
        self,
        program: Program,
        workspace: Workspace,
        inputs: Mapping[str, Tensor],
        allowed_HST: Tensor | None,
        scale: float,
    ) -> None:
        self.program, self.steps, self.at = program, program.steps, 0
        self.allowed_HST, self.scale = allowed_HST, scale
        self.landed: dict[Slot, Tensor] = {}
        self.origins: dict[Slot, Tensor] = {}
        """Of messages that were copied here: where they lie in the memory of their owners."""
        shared = torch.full((workspace.num_bytes,), POISON, dtype=torch.uint8)
        lent = torch.full((window(program).num_bytes,), POISON, dtype=torch.uint8)
        self.memory: dict[Slot, Tensor] = {}
        for root in {*program.roots, *(slot.root for slot in program.saved.values())}:
            if root not in workspace.places:
                self.memory[root] = torch.full((root.num_bytes,), POISON, dtype=torch.uint8)
        for slot, (number, start) in workspace.places.items():
            block = shared
            if number:
                result, plane = workspace.results[number - 1]
                block = self.memory[result].chunk(result.shape[0])[plane] if result.num_bytes else shared[:0]
            self.memory[slot] = block[start : start + slot.num_bytes]
        for slot, (_, start) in window(program).places.items():
            self.memory[slot] = lent[start : start + slot.num_bytes]
        for name, slot in program.slots.items():
            if name in inputs:
                self.memory[slot] = inputs[name].contiguous().flatten().view(torch.uint8).clone()

    def bytes(self, slot: Slot, memory: Mapping[Slot, Tensor] | None = None) -> Tensor:
        start, each = 0, slot
        while each.parent is not None:
            start, each = start + each.offset, each.parent
        block = self.landed[each] if each in self.landed else (memory or self.memory)[each]
        return block[start : start + slot.num_bytes]

    def origin(self, slot: Slot) -> Tensor:
        return self.bytes(slot, self.origins if slot.root in self.origins else None)

    def is_in_place(self, slot: Slot | None) -> bool:
        return slot is not None and slot.root.memory == "peer" and not self.program.target.lands

    def tensor(self, slot: Slot) -> Tensor:
        """A copy of a slot in its own dtype and shape."""
        return self.bytes(slot).clone().view(getattr(torch, slot.dtype)).view(slot.shape)

    def cells(self, slot: Slot, piece: Piece | None) -> tuple[Slot, Tensor, Tensor, tuple[Tensor, Tensor]]:
        """A slot that is no view, a copy of it, that copy as [heads, rows, …], and where in it a piece is."""
        while slot.parent is not None and slot.parent.piece is not None:
            slot, piece = slot.parent, piece or slot.piece
        copy = by_cell = self.tensor(slot)
        heads, rows = 2, 3
        if isinstance(self.program.problem, Switch):
            at, to = self.program.problem.dims
            heads, rows = (copy.ndim if to is None else 1 + to), 1 + at
            by_cell = copy.unsqueeze(-1) if to is None else copy
        by_cell = by_cell.movedim((heads, rows), (0, 1))
        h, r = (slice(None), slice(None)) if piece is None else slot.positions(piece)
        index = [torch.arange(size)[where] for size, where in zip(by_cell.shape, (h, r), strict=False)]
        return slot, copy, by_cell, (index[0][:, None], index[1][None, :])

    def load(self, slot: Slot, piece: Piece | None) -> Tensor:
        _, _, x, index = self.cells(slot, piece)
        return x[index].double()

    def store(self, slot: Slot, piece: Piece | None, values: Tensor, *, add: bool = False) -> None:
        whole, copy, x, index = self.cells(slot, piece)
        x[index] = (x[index].double() + values if add else values).to(x.dtype)
        self.bytes(whole).copy_(copy.flatten().view(torch.uint8))

    def compute(self, step: Step) -> None:
        if isinstance(step, Copy):
            for segment in step.segments:
                values = self.load(segment.source, segment.piece)
                self.store(segment.target, segment.piece, values, add=step.add)
        elif isinstance(step, Cast):
            self.store(step.target, None, self.load(step.source, None))
        elif isinstance(step, Fill):
            self.store(step.slot, None, torch.full_like(self.load(step.slot, None), step.value))
        elif isinstance(step, Attention):
            self.attend(step)
        elif isinstance(step, Gradient):
            self.differentiate(step)

    # B batch · H query heads · S query rows · T key rows · D channels; cells are [H, S, planes, B, D]

    def rows(self, slot: Slot, piece: Piece) -> Tensor:
        return self.load(slot, piece)[:, :, 0].permute(2, 0, 1, 3)

    def scores(self, step: Attention | Gradient) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q_BHSD, kv = self.rows(step.q, step.q_piece), self.load(step.kv, step.kv_piece)
        problem = self.program.problem
        assert not isinstance(problem, Switch) and self.allowed_HST is not None
        own = step.q_piece.heads.array // (problem.heads // problem.kv_heads)
        kv_of = torch.from_numpy(np.searchsorted(step.kv_piece.heads.array, own))
        k_BHTD, v_BHTD = (kv[kv_of, :, plane].permute(2, 0, 1, 3) for plane in (0, 1))
        heads, rows, columns = (
            torch.from_numpy(x.array) for x in (step.q_piece.heads, step.q_piece.tokens, step.kv_piece.tokens)
        )
        allowed_HST = self.allowed_HST[heads][:, rows][:, :, columns]
        scores_BHST = (q_BHSD @ k_BHTD.mT * self.scale).masked_fill(~allowed_HST, -torch.inf)
        return scores_BHST, q_BHSD, k_BHTD, v_BHTD, kv_of

    def attend(self, step: Attention) -> None:
        scores_BHST, _, _, v_BHTD, _ = self.scores(step)
        lse_BHS = scores_BHST.logsumexp(-1)
        out_BHSD = (scores_BHST - finite(lse_BHS)).exp() @ v_BHTD
        if not step.first:
            had_BHS = self.rows(step.lse, step.q_piece)[..., 0]
            total_BHS = had_BHS.logaddexp(lse_BHS)
            had_BHSD = self.rows(step.out, step.q_piece) * (had_BHS[..., None] - finite(total_BHS)).exp()
            out_BHSD = had_BHSD + out_BHSD * (lse_BHS[..., None] - finite(total_BHS)).exp()
            lse_BHS = total_BHS
        self.store(step.out, step.q_piece, cells(out_BHSD))
        self.store(step.lse, step.q_piece, cells(lse_BHS[..., None]))

    def differentiate(self, step: Gradient) -> None:
        scores_BHST, q_BHSD, k_BHTD, v_BHTD, kv_of = self.scores(step)
        grad_BHSD, out_BHSD = (self.rows(slot, step.q_piece) for slot in (step.grad, step.out))
        weights_BHST = (scores_BHST - finite(self.rows(step.lse, step.q_piece)[..., 0])).exp()
        delta_BHS1 = (grad_BHSD * out_BHSD).sum(-1, keepdim=True)
        slope_BHST = weights_BHST * (grad_BHSD @ v_BHTD.mT - delta_BHS1) * self.scale
        dkv = torch.cat([cells(slope_BHST.mT @ q_BHSD), cells(weights_BHST.mT @ grad_BHSD)], dim=2)
        by_head = dkv.new_zeros(step.kv_piece.heads.size, *dkv.shape[1:]).index_add_(0, kv_of, dkv)
        self.store(step.dq, step.q_piece, cells(slope_BHST @ k_BHTD), add=not step.first[0])
        self.store(step.dkv, step.kv_piece, by_head, add=not step.first[1])


def cells(x_BHSD: Tensor) -> Tensor:
    """[H, S, 1, B, D]."""
    return x_BHSD.permute(1, 2, 0, 3).unsqueeze(2)


def finite(lse_BHS: Tensor) -> Tensor:
    """[B, H, S, 1]; rows that see nothing get weights of 0."""
    return lse_BHS.masked_fill(lse_BHS == -torch.inf, torch.inf).unsqueeze(-1)
