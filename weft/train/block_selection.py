"""Select the key blocks of each query block, by a score for each pair and a budget per head.

One query represents its block. A key block scores the sum of the exponentials of its keys: a mean of keys
would hide the one that counts. Samples of a batch are further heads, so that each has a mask of its own. Each
rank scores some of the heads, with all tokens, and sends its selection as bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.core.indices import split_evenly
from weft.core.mask import BlockMask
from weft.run.kernels.proxies import elements_per_chunk
from weft.run.kernels.select import top_k
from weft.run.world import World
from weft.sparse.pooling import gather_tiles
from weft.train.cubes import Cubes

Shares = npt.NDArray[np.float64]
"""Of keys, or of key blocks, by head."""


BlockScores = Callable[[int, Tensor], Tensor]
"""Of one of this rank's heads and some query blocks: [rows, key blocks]; higher is better."""


def key_mass(queries: Tensor, keys: Tensor, block: int) -> BlockScores:
    """Score by a query of each block [heads, rows, r] and keys [heads, keys, r], `block` of them a block."""
    chunk = max(1, elements_per_chunk(keys.device) // keys.shape[1])

    def of_chunk(queries: Tensor, keys: Tensor) -> Tensor:
        scores = queries @ keys
        if block == 1:
            return scores
        scores.sub_(scores.amax(1, keepdim=True)).exp_()  # no log, which would not change the order
        full = scores.shape[1] // block * block
        mass = scores[:, :full].unflatten(1, (-1, block)).sum(-1)
        if full == scores.shape[1]:
            return mass
        return torch.cat((mass, scores[:, full:].sum(1, keepdim=True)), 1)

    return lambda head, rows: torch.cat(
        [of_chunk(some, keys[head].mT) for some in queries[head, rows].split(chunk)]
    )


def select_blocks(
    scores: BlockScores, budgets: Shares, cubes: Cubes, world: World, device: torch.device
) -> BlockMask:
    """Keep the best tiles, a share of them for each head; the same on all ranks."""
    heads = range(*split_evenly(len(budgets), world.comm.size)[world.comm.rank])
    rows = torch.arange(cubes.rows, device=device)
    tiles = torch.ones(len(heads), cubes.rows, cubes.cols, dtype=torch.bool, device=device)
    for i, head in enumerate(heads):
        if (count := cubes.blocks(budgets[head])) < cubes.cols:
            tiles[i] = top_k(scores(i, rows)[None], count, keep=cubes.keep).active[0]
    # Planning is on the host: one synchronization for all heads.
    return gather_tiles(tiles.cpu().numpy(), len(budgets), world, device).mask(**cubes.mask_sizes)


def nearest_blocks(budgets: Shares, cubes: Cubes) -> BlockMask:
    """Keep the tiles around each block; computed once for all steps, without communication."""
    counts = tuple(cubes.blocks(share) for share in budgets)
    if counts not in cubes.windows:
        tiles = {n: top_k(cubes.proximity[None], n, keep=cubes.keep).active[0].numpy() for n in {*counts}}
        stacked = np.stack([tiles[count] for count in counts])
        cubes.windows[counts] = BlockMask.from_tiles(stacked, **cubes.mask_sizes)
    return cubes.windows[counts]
