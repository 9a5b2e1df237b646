"""Profiler: how sparse attention is, and how much of it a selection finds, on sampled queries.

sparsity   1 - the share of keys that hold `mass` of a query's softmax: its critical keys.
needed     the share of blocks of keys whose best, as they are selected for groups of queries, hold `mass`.
coverage   the mass that is selected at the budgets of now; while a block is dense, the mass of as many
           predicted keys as are critical.
recall     the mass that is selected, of that of each query's own best blocks, equally many.
keys       the same of single predicted keys, as many as are critical: what prediction alone loses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.indices import IntArray
from weft.run.switch import gather
from weft.run.world import World
from weft.train.cubes import Cubes
from weft.train.select import Scores, Shares

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Profile:
    """By head, where it is an array."""

    needed: Shares
    sparsity: Shares
    coverage: float
    recall: float
    keys: float


@dataclass(frozen=True, eq=False)
class Seen:
    """Sampled queries in this rank's heads, which are samples × heads."""

    places: IntArray
    true: Tensor
    """[heads, places, all keys]: scores."""
    guess: Tensor | None
    """The same, predicted."""
    scores: Scores
    samples: int


def profile(seen: Seen, budgets: Shares | None, mass: float, cubes: Cubes, world: World) -> Profile:
    """Together, the same on all ranks; samples are averaged."""
    weights = seen.true.double().softmax(-1)
    curves, single = weights.new_zeros(len(weights), 2, cubes.cols), weights.new_zeros(len(weights), 2)
    groups = torch.from_numpy(seen.places // cubes.block)
    kept = cubes.kept[groups].to(weights.device)
    for at, each in enumerate(weights):
        blocks = F.pad(each, (0, -each.shape[1] % cubes.block_k)).unflatten(1, (cubes.cols, -1)).sum(2)
        order = seen.scores.of(at, groups).masked_fill(kept, torch.inf).sort(descending=True, stable=True)[1]
        curves[at, 0] = blocks.gather(1, order).cumsum(1).mean(0)
        curves[at, 1] = blocks.sort(descending=True)[0].cumsum(1).mean(0)
        single[at] = _single(each, mass, None if seen.guess is None else seen.guess[at])
    found = torch.cat((curves.flatten(1), single), 1)
    heads = sum(count for (count,) in world.comm.gather_numbers([len(found)]))
    dims = {"head": heads, "number": found.shape[1]}
    every = gather(found, "head", dims=dims, mesh=world, stage="profile").cpu().numpy()
    return _read(every.reshape(seen.samples, -1, found.shape[1]).mean(0), budgets, mass, cubes)


def _single(weights: Tensor, mass: float, guess: Tensor | None) -> Tensor:
    """The share of keys that are critical, and the mass of as many predicted ones; means over queries."""
    best = weights.sort(descending=True)[0].cumsum(1)
    count = (best < mass - 1e-12).sum(1, keepdim=True).clamp(max=best.shape[1] - 1)
    if guess is not None:
        best = weights.gather(1, guess.sort(descending=True)[1]).cumsum(1)
    return torch.stack(((count + 1).double().mean() / best.shape[1], best.gather(1, count).mean()))


def _read(every: FloatArray, budgets: Shares | None, mass: float, cubes: Cubes) -> Profile:
    heads, single = np.arange(len(every)), every[:, -2:]
    curves = every[:, :-2].reshape(len(every), 2, cubes.cols)
    needed = (curves[:, 0] < mass - 1e-9).sum(1).clip(max=cubes.cols - 1) + 1
    counts = needed if budgets is None else np.array([cubes.blocks(share) for share in budgets])
    found, best = curves[heads, :, counts - 1].T
    chosen = counts < cubes.cols  # heads that keep all keys tell nothing of the choice
    chosen = chosen if chosen.any() else ~chosen
    return Profile(
        needed=needed / cubes.cols,
        sparsity=1 - single[:, 0],
        coverage=float((single[:, 1] if budgets is None else found[chosen]).mean()),
        recall=float((found / best)[chosen].mean()),
        keys=float(single[:, 1].mean() / mass),
    )
