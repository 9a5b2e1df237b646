"""What a schedule really computes: all ranks in NumPy, one number a (head, token, channel), NaN for "not here".

It knows nothing of `verify`: it moves and attends as the operations say, and the numbers tell.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.cases import token_mask
from weft.core.layout import Layout
from weft.core.schedule import Attend, Exchange, Piece, Schedule

# R ranks · H heads · K key/value heads · T query tokens · N key tokens · D channels
Array = npt.NDArray[np.float64]
DIM = 2


class Missing(Exception):
    """An operation reads what is not on its rank."""


def changes_result(schedule: Schedule, seed: int = 0) -> bool:
    """Whether the schedule fails to compute dense attention, or its gradients."""
    try:
        found = Machine(schedule, seed).run()
    except Missing:
        return True
    return not all(np.allclose(got, want, atol=1e-9) for got, want in found)


class Machine:
    """All ranks' memories; `run` gives pairs of what came out and what should have."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        rng = np.random.default_rng(seed)
        problem = self.problem = schedule.problem
        self.schedule = schedule
        self.share = problem.heads // problem.kv_heads
        q_shape, kv_shape = (problem.heads, problem.q.size), (problem.kv_heads, problem.kv.size)
        self.active_HTN = token_mask(schedule.mask)
        self.do_RHTD = rng.normal(size=(problem.ranks, *q_shape, DIM))  # each copy of a row has its own
        q, kv = rng.normal(size=(*q_shape, DIM)), rng.normal(size=(*kv_shape, 2 * DIM))
        self.reference(q, kv)
        self.here: dict[str, Array] = {
            "q": at_home(q, problem.q),
            "kv": at_home(kv, problem.kv),
            "o": np.full((problem.ranks, *q_shape, DIM), np.nan),
            "dq": np.zeros((problem.ranks, *q_shape, DIM)),
            "dkv": np.zeros((problem.ranks, *kv_shape, 2 * DIM)),
        }
        home = at_home(np.zeros(q.shape), problem.q)
        self.do_RHTD = self.do_RHTD + home
        self.here["do"] = np.nan_to_num(self.do_RHTD)  # what has not arrived adds nothing
        self.num_RHTD, self.den_RHT = np.zeros((problem.ranks, *q.shape)), np.zeros((problem.ranks, *q_shape))
        self.lse_RHT = np.full((problem.ranks, *q_shape), np.nan)
        for rank, pieces in enumerate(schedule.kept):
            for piece in pieces:
                where = index(piece)
                if piece.tensor == "o":
                    self.lse_RHT[rank][where] = self.full_lse_HT[where]
                else:
                    self.here[piece.tensor][rank][where] = {"q": q, "kv": kv}[piece.tensor][where]

    def reference(self, q_HTD: Array, kv_KND: Array) -> None:
        """Dense attention and its gradients, in one place."""
        k_HND, v_HND = (part.repeat(self.share, axis=0) for part in np.split(kv_KND, 2, axis=2))
        e_HTN = np.exp(q_HTD @ k_HND.swapaxes(1, 2)) * self.active_HTN
        den_HT = e_HTN.sum(axis=2)
        self.full_lse_HT = np.log(np.where(den_HT > 0, den_HT, 1))
        p_HTN = e_HTN * np.exp(-self.full_lse_HT)[..., None]
        self.o_HTD = p_HTN @ v_HND
        held = at_home(np.zeros_like(self.o_HTD), self.problem.q) == 0
        self.all_do_HTD = (self.do_RHTD * held).sum(axis=0)
        self.delta_HT = (self.all_do_HTD * self.o_HTD).sum(axis=2)
        dp_HTN = self.all_do_HTD @ v_HND.swapaxes(1, 2) - self.delta_HT[..., None]
        self.dq_HTD = (p_HTN * dp_HTN) @ k_HND
        dk_HND, dv_HND = (p_HTN * dp_HTN).swapaxes(1, 2) @ q_HTD, p_HTN.swapaxes(1, 2) @ self.all_do_HTD
        self.dkv_KND = self.over_group(np.concatenate([dk_HND, dv_HND], axis=2))

    def over_group(self, x_HND: Array) -> Array:
        return x_HND.reshape(-1, self.share, *x_HND.shape[1:]).sum(axis=1)

    def run(self) -> list[tuple[Array, Array]]:
        for op in self.schedule.ops:
            if isinstance(op, Exchange):
                self.exchange(op)
            elif self.schedule.backward:
                self.attend_backward(op)
            else:
                self.attend(op)
        if self.schedule.backward:
            found = {"dq": self.dq_HTD, "dkv": self.dkv_KND}
            return [(self.at_last(name), want) for name, want in found.items()]
        held = [(rank, self.problem.q.held(rank).array) for rank in range(self.problem.ranks)]
        return [(self.output(rank)[:, tokens], self.o_HTD[:, tokens]) for rank, tokens in held]

    def at_last(self, name: str) -> Array:
        """A gradient is the sum over the copies of its tensor; what stayed elsewhere is lost."""
        copies = self.here[name]
        return (copies * (at_home(np.zeros(copies.shape[1:]), self.problem.home(name)) == 0)).sum(axis=0)

    def output(self, rank: int) -> Array:
        den_HT = self.den_RHT[rank]
        own_HTD = self.num_RHTD[rank] / np.where(den_HT > 0, den_HT, 1)[..., None]
        return np.where(np.isnan(self.here["o"][rank]), own_HTD, self.here["o"][rank])

    def exchange(self, op: Exchange) -> None:
        """All are read before any is written: they travel at the same time."""
        moved = [(t, self.read(t.piece, t.src)) for t in op.transfers]
        for transfer, values in moved:
            there, where = self.here[transfer.piece.tensor][transfer.dst], index(transfer.piece)
            adds = transfer.piece.is_sum or transfer.piece.tensor == "do"
            there[where] = there[where] + values if adds else values

    def read(self, piece: Piece, rank: int) -> Array:
        source = {"o": self.output, "do": self.do_RHTD.__getitem__}.get(
            piece.tensor, self.here[piece.tensor].__getitem__
        )
        values = source(rank)[index(piece)]
        if np.isnan(values).any():
            raise Missing(piece, rank)
        return values

    def scores(self, op: Attend) -> tuple[Array, Array, Array, Array]:
        """exp(q·k) on active pairs, with the q, k and v that were read for it; kv heads repeated."""
        groups = op.q.heads.array // self.share
        if not set(groups) <= set(op.kv.heads):
            raise Missing(op)
        q_HTD, kv_KND = self.read(op.q, op.rank), self.read(op.kv, op.rank)
        kv_HND = kv_KND[np.searchsorted(op.kv.heads.array, groups)]
        active = self.active_HTN[np.ix_(op.q.heads.array, op.q.tokens.array, op.kv.tokens.array)]
        k_HND, v_HND = np.split(kv_HND, 2, axis=2)
        return np.exp(q_HTD @ k_HND.swapaxes(1, 2)) * active, q_HTD, k_HND, v_HND

    def attend(self, op: Attend) -> None:
        e_HTN, _, _, v_HND = self.scores(op)
        self.num_RHTD[op.rank][index(op.q)] += e_HTN @ v_HND
        self.den_RHT[op.rank][index(op.q)] += e_HTN.sum(axis=2)

    def attend_backward(self, op: Attend) -> None:
        where = index(op.q)
        e_HTN, q_HTD, k_HND, v_HND = self.scores(op)
        lse_HT, do_HTD = self.lse_RHT[op.rank][where], self.here["do"][op.rank][where]
        if np.isnan(lse_HT).any():
            raise Missing(op)
        p_HTN = e_HTN * np.exp(-lse_HT)[..., None]
        delta_HT = (do_HTD * self.o_HTD[where]).sum(axis=2)
        ds_HTN = p_HTN * (do_HTD @ v_HND.swapaxes(1, 2) - delta_HT[..., None])
        self.here["dq"][op.rank][where] += ds_HTN @ k_HND
        dkv_HND = np.concatenate([ds_HTN.swapaxes(1, 2) @ q_HTD, p_HTN.swapaxes(1, 2) @ do_HTD], axis=2)
        rows = np.ix_(op.q.heads.array // self.share, op.kv.tokens.array)
        np.add.at(self.here["dkv"][op.rank], rows, dkv_HND)


def index(piece: Piece) -> tuple[npt.NDArray[np.int64], ...]:
    return np.ix_(piece.heads.array, piece.tokens.array)


def at_home(whole: Array, layout: Layout) -> Array:
    """[ranks, …]: each rank's own tokens of a whole tensor, NaN elsewhere."""
    found = np.full((layout.ranks, *whole.shape), np.nan)
    for rank in range(layout.ranks):
        found[rank][:, layout.held(rank).array] = whole[:, layout.held(rank).array]
    return found
