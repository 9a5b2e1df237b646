"""Select: which blocks of keys each block of queries attends to, by a score for the pair and a budget.

One query stands for its block. A block of keys has the mass that its keys have, Σ exp: the score of a mean
of keys would miss the one that counts. Samples of a batch are further heads, so that each has a mask of
its own. Each rank scores some of the heads, with all tokens, and what it has chosen is sent as bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.core.indices import split_evenly
from weft.core.mask import BlockMask
from weft.models.scores import of_all_heads
from weft.run.kernels.proxies import at_a_time
from weft.run.kernels.select import top_k
from weft.run.world import World
from weft.train.cubes import Cubes

Shares = npt.NDArray[np.float64]
"""Of keys, or of blocks of keys, by head."""


class Scores(Protocol):
    """Of blocks, for this rank's part of the heads."""

    def of(self, head: int, rows: Tensor) -> Tensor:
        """[rows, blocks of keys], the best first, of some blocks of queries."""
        ...


@dataclass(frozen=True, eq=False)
class Masses:
    """Of a query for each block [heads, rows, r] and keys [heads, keys, r], so many of which are a block."""

    queries: Tensor
    keys: Tensor
    block: int

    def of(self, head: int, rows: Tensor) -> Tensor:
        keys = self.keys[head].mT
        some = max(1, at_a_time(keys.device) // keys.shape[1])
        return torch.cat([self._of(each, keys) for each in self.queries[head, rows].split(some)])

    def _of(self, queries: Tensor, keys: Tensor) -> Tensor:
        scores = queries @ keys
        if self.block == 1:
            return scores
        scores.sub_(scores.amax(1, keepdim=True)).exp_()  # no log: it would change no order
        whole = scores.shape[1] // self.block * self.block
        found = scores[:, :whole].unflatten(1, (-1, self.block)).sum(-1)
        if whole == scores.shape[1]:
            return found
        return torch.cat((found, scores[:, whole:].sum(1, keepdim=True)), 1)


@dataclass(frozen=True, eq=False)
class Near:
    """The same for all heads: how near blocks are."""

    nearness: Tensor

    def of(self, head: int, rows: Tensor) -> Tensor:  # noqa: ARG002 - that of Scores
        return self.nearness[rows]


def select(scores: Scores, budgets: Shares, cubes: Cubes, world: World, device: torch.device) -> BlockMask:
    """The best tiles, a share of them for each head; the same on all ranks."""
    heads = range(*split_evenly(len(budgets), world.comm.size)[world.comm.rank])
    rows = torch.arange(cubes.rows, device=device)
    tiles = torch.ones(len(heads), cubes.rows, cubes.cols, dtype=torch.bool, device=device)
    for at, head in enumerate(heads):
        if (count := cubes.blocks(budgets[head])) < cubes.cols:
            tiles[at] = top_k(scores.of(at, rows)[None], count, keep=cubes.keep).active[0]
    # The plan is made on the host, so it is waited for once.
    chosen = of_all_heads(tiles.cpu().numpy(), len(budgets), world, device)
    return chosen.mask(**_sizes(cubes))


def nearest(budgets: Shares, cubes: Cubes) -> BlockMask:
    """The tiles around each block; made once, and nobody has to be asked."""
    counts = tuple(cubes.blocks(share) for share in budgets)
    if counts not in cubes.windows:
        tiles = {n: top_k(cubes.nearness[None], n, keep=cubes.keep).active[0].numpy() for n in {*counts}}
        stacked = np.stack([tiles[count] for count in counts])
        cubes.windows[counts] = BlockMask.from_tiles(stacked, **_sizes(cubes))
    return cubes.windows[counts]


def _sizes(cubes: Cubes) -> dict[str, int]:
    tokens = {"q_len": cubes.tokens, "kv_len": cubes.tokens}
    return tokens | {"block_q": cubes.block, "block_k": cubes.block_k}
