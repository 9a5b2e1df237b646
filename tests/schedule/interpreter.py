"""What a schedule really computes: all ranks in NumPy, token by token, NaN for "not here".

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


class MissingError(Exception):
    """An operation reads what is not on its rank."""


def changes_result(schedule: Schedule, seed: int = 0) -> bool:
    """Whether the schedule fails to compute dense attention, or its gradients."""
    try:
        found = Machine(schedule, seed).run()
    except MissingError:
        return True
    return not all(np.allclose(got, want, atol=1e-9) for got, want in found)


class Machine:
    """All ranks' memories; `run` gives pairs of what came out and what should have."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        rng = np.random.default_rng(seed)
        problem = self.problem = schedule.problem
        self.schedule = schedule
        self.share = problem.heads // problem.kv_heads
        self.active_HTN = token_mask(schedule.mask)
        ranks, q_shape = problem.ranks, (problem.heads, problem.q.size, DIM)
        q_HTD = rng.normal(size=q_shape)
        kv_KND = rng.normal(size=(problem.kv_heads, problem.kv.size, 2 * DIM))
        # Each copy of a replicated row has an output, and so a gradient, of its own.
        self.own_do_RHTD = rng.normal(size=(ranks, *q_shape)) + at_home(np.zeros(q_shape), problem.q)
        self.here: dict[str, Array] = {
            "q": at_home(q_HTD, problem.q),
            "kv": at_home(kv_KND, problem.kv),
            "o": np.full((ranks, *q_shape), np.nan),
            "do": np.nan_to_num(self.own_do_RHTD),  # a sum: what has not arrived adds nothing
            "dq": np.zeros((ranks, *q_shape)),
            "dkv": np.zeros((ranks, *kv_KND.shape)),
        }
        self.num_RHTD, self.den_RHT = np.zeros((ranks, *q_shape)), np.zeros((ranks, *q_shape[:2]))
        self.lse_RHT = np.full((ranks, *q_shape[:2]), np.nan)
        self.reference(q_HTD, kv_KND)
        whole = {"q": q_HTD, "kv": kv_KND, "o": self.full_lse_HT}
        for rank, pieces in enumerate(schedule.kept):
            for piece in pieces:
                memory = self.lse_RHT if piece.tensor == "o" else self.here[piece.tensor]
                memory[rank][index(piece)] = whole[piece.tensor][index(piece)]

    def reference(self, q_HTD: Array, kv_KND: Array) -> None:
        """Dense attention and its gradients, in one place."""
        k_HND, v_HND = (part.repeat(self.share, axis=0) for part in np.split(kv_KND, 2, axis=2))
        e_HTN = np.exp(q_HTD @ k_HND.swapaxes(1, 2)) * self.active_HTN
        den_HT = e_HTN.sum(axis=2)
        self.full_lse_HT = np.log(np.where(den_HT > 0, den_HT, 1))
        p_HTN = e_HTN * np.exp(-self.full_lse_HT)[..., None]
        self.o_HTD = p_HTN @ v_HND
        do_HTD = np.nansum(self.own_do_RHTD, axis=0)
        delta_HT = (do_HTD * self.o_HTD).sum(axis=2)
        ds_HTN = p_HTN * (do_HTD @ v_HND.swapaxes(1, 2) - delta_HT[..., None])
        self.dq_HTD = ds_HTN @ k_HND
        dkv_HND = np.concatenate([ds_HTN.swapaxes(1, 2) @ q_HTD, p_HTN.swapaxes(1, 2) @ do_HTD], axis=2)
        self.dkv_KND = dkv_HND.reshape(-1, self.share, *dkv_HND.shape[1:]).sum(axis=1)

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
        source = {"o": self.output, "do": self.own_do_RHTD.__getitem__}.get(
            piece.tensor, self.here[piece.tensor].__getitem__
        )
        values = source(rank)[index(piece)]
        if np.isnan(values).any():
            raise MissingError(piece, rank)
        return values

    def scores(self, op: Attend) -> tuple[Array, Array, Array, Array]:
        """exp(q·k) on active pairs, with the q, k and v that were read for it; kv heads repeated."""
        groups = op.q.heads.array // self.share
        if not set(groups) <= set(op.kv.heads):
            raise MissingError(op)
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
            raise MissingError(op)
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
