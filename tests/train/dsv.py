"""Sparse attention in training, and what it is held against: one process, dense, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import weft
from tests.diffusers import toys
from tests.diffusers.toys import normal, seeded
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid
from weft.run.world import World
from weft.train.cubes import Cubes
from weft.train.dsv import DSV
from weft.train.recipe import SparseConfig
from weft.video.transformer import DiTConfig, VideoDiT

on_ranks = partial(toys.on_ranks, timeout=100.0)  # a machine may be busy
GRID = TokenGrid(3, 5, 7, prefix=8)
CUBE = (2, 2, 2)
CUBES = Cubes(GRID, CUBE, None)
CONFIG = DiTConfig(words=11, length=8, video=(3, 10, 14), patch=(1, 2, 2), width=36, depth=2, heads=3)
PART = SparseConfig(cube=CUBE, stage1=0, gate=2.0, profile_every=1, profile_rarely=1, rows=13, rank=6)
BUDGETS = np.array([0.15, 0.4, 1.0])
"""Of which one head is dense."""


def model(*, coarse: bool = False, again: bool = False) -> Any:
    """With attention that has something to select, in training."""
    made = VideoDiT(CONFIG)
    if coarse:
        method(SparseConfig(coarse=True)).prepare(made)
    seeded(made)
    for block in made.blocks:
        block.attn.norm_q.weight.data += 5
    if again:
        made.enable_gradient_checkpointing()
    return made.train()


def inputs(batch: int = 2, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    T, H, W = CONFIG.video
    words = torch.randint(11, (batch, 8), generator=torch.Generator().manual_seed(3))
    video = normal(batch, T, CONFIG.channels, H, W, seed=seed)
    return video, torch.linspace(0.9, 0.2, batch).double(), words


def method(part: SparseConfig = PART, budgets: Any = BUDGETS) -> DSV:
    """With given budgets, in the middle of a run."""
    made = DSV(part, heads=CONFIG.heads, width=CONFIG.width, depth=CONFIG.depth)
    made.dispatcher.budgets = lambda _: budgets
    made.begin(7)
    return made


def sparse(world: World | None, dsv: DSV, plan: str = "auto", **how: Any) -> Any:
    return weft.parallelize(model(coarse=dsv.config.coarse, **how), mesh=world, sparse=dsv, plan=plan)


def masks(dsv: DSV) -> list[BlockMask]:
    """By layer, of the last forward."""
    last = max(run for _, run, _ in dsv._masks)
    return [
        mask for (_, run, _), mask in sorted(dsv._masks.items(), key=lambda item: item[0][0]) if run == last
    ]


class Masked(TorchFunctionMode):
    """Each attention of a model in turn: dense, by booleans over pairs of tokens."""

    def __init__(self, given: Sequence[BlockMask]) -> None:
        super().__init__()
        self.given, self.calls = given, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        seen = pairs(self.given[self.calls]).unflatten(0, args[0].shape[:2])
        self.calls += 1
        return F.scaled_dot_product_attention(*args, attn_mask=seen)


def pairs(mask: BlockMask) -> Tensor:
    """[heads, queries, keys] of tokens as the model has them."""
    tiles = mask.tiles.repeat(mask.block_q, axis=1).repeat(mask.block_k, axis=2)
    place = CUBES.place
    return torch.from_numpy(tiles[:, place][:, :, place])
