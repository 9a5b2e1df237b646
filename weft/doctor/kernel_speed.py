"""Measure the speed of an attention kernel on a GPU, and of torch's dense attention of the same shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.run.kernels import AttentionKernel
from weft.run.kernels.rules import KernelSpec
from weft.run.kernels.tiles import Tiles
from weft.run.measure.stopwatch import device_seconds

HEADS, TOKENS, BLOCK, DENSITY = 16, 8192, 128, 0.25
"""A shape that fills a GPU; DENSITY is the share of active tiles where it is sparse."""
ROUNDS = 5
PRODUCTS = {False: 4, True: 10}
"""FLOP per query, key and head dim, by direction: two products forward, five backward."""


@torch.no_grad()
def speeds(kernel: AttentionKernel, work: KernelSpec, device: torch.device) -> dict[str, float]:
    """Return tflops of the active tiles, and torch_tflops of torch's attention over all of them."""
    random = torch.Generator(device).manual_seed(0)
    shape, dtype = (1, HEADS, TOKENS, work.head_dim), getattr(torch, work.dtype)
    q, k, v, grad = (torch.randn(shape, generator=random, device=device, dtype=dtype) for _ in range(4))
    tiles, scale = _tiles(work.sparse), work.head_dim**-0.5
    density = 1.0 if tiles.active is None else float(tiles.active.mean())
    if work.backward:
        # Times do not depend on values, and the backend may have no forward for these tiles.
        lse = torch.full(shape[:3], math.log(TOKENS), device=device)
        done = torch.zeros_like(q), lse
        own = median_seconds(lambda: kernel.attend_backward(grad, q, k, v, done, tiles, scale), device)
    else:
        own = median_seconds(lambda: kernel.attend(q, k, v, tiles, scale), device)
    theirs = median_seconds(_torch_call(q, k, v, grad, backward=work.backward), device)
    flops = PRODUCTS[work.backward] * HEADS * TOKENS**2 * work.head_dim
    return {"tflops": flops * density / own / 1e12, "torch_tflops": flops / theirs / 1e12}


def _tiles(sparse: bool) -> Tiles:  # noqa: FBT001
    if not sparse:
        return Tiles(None, TOKENS, TOKENS, TOKENS, TOKENS)
    blocks = TOKENS // BLOCK
    active = np.random.default_rng(0).random((HEADS, blocks, blocks)) < DENSITY
    return Tiles(active, BLOCK, BLOCK, TOKENS, TOKENS)


def _torch_call(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, backward: bool) -> Callable[[], object]:
    if not backward:
        return lambda: F.scaled_dot_product_attention(q, k, v)
    with torch.enable_grad():
        q, k, v = leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    return median(device_seconds(call, device, ROUNDS))
