"""What the tests of real ranks have a rank do, and how they look at the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from tests.run.dense import Truth
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.run.spawn.pool import Pool

Worlds = Callable[[int], Pool]
Answer = tuple[Tensor, tuple[Tensor, ...]]
"""A rank's output and its gradients (dq, dk, dv)."""


def problem(ranks: int, tokens: int, **sizes: Any) -> Problem:
    """Small and odd; `kv` is a number of tokens too, or a Layout."""
    q = sizes.pop("q", Layout.even(tokens, ranks))
    kv = sizes.pop("kv", q)
    kv = Layout.even(kv, ranks) if isinstance(kv, int) else kv
    heads = sizes.pop("heads", 3)
    rest: dict[str, Any] = {"batch": 1, "kv_heads": heads, "head_dim": 5, "dtype": "float32"}
    return Problem(heads=heads, q=q, kv=kv, **(rest | sizes))


def attend(truth: Truth, options: dict[str, Any], rank: int | None = None) -> Answer:
    """`weft.attention` of this rank's shards, and its gradients."""
    rank = dist.get_rank() if rank is None else rank
    inputs, slope = truth.inputs(rank), truth.slope(rank)
    if options.get("layout") != "bshd":
        inputs = tuple(x.requires_grad_() for x in inputs)
        out = weft.attention(*inputs, scale=truth.scale, **options)
        return out.detach(), torch.autograd.grad(out, inputs, slope)
    inputs = tuple(x.transpose(1, 2).contiguous().requires_grad_() for x in inputs)
    out = weft.attention(*inputs, scale=truth.scale, **options)
    grads = torch.autograd.grad(out, inputs, slope.transpose(1, 2).contiguous())
    return out.detach().transpose(1, 2), tuple(grad.transpose(1, 2) for grad in grads)


def check(truth: Truth, answers: list[Answer], tolerance: float) -> None:
    assert truth.output_error([out for out, _ in answers]) < tolerance
    assert truth.gradient_error([grads for _, grads in answers]) < tolerance * truth.size


def works() -> bool:
    """Whether this world still attends as it should."""
    truth = Truth.of(problem(dist.get_world_size(), 11))
    out, _ = attend(truth, {})
    return truth.output_error_of(out, dist.get_rank()) < 5e-6


def tiles_with_empty_rows(heads: int, q_len: int, kv_len: int, block: int) -> BlockMask:
    """Half of the tiles; the first row of blocks and the last column have none."""
    random = torch.Generator().manual_seed(heads)
    shape = (heads, -(-q_len // block), -(-kv_len // block))
    tiles = torch.rand(shape, generator=random) < 0.5
    tiles[:, 0], tiles[:, :, -1] = False, False
    return BlockMask.from_tiles(tiles.numpy(), q_len=q_len, kv_len=kv_len, block_q=block)
