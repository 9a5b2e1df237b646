"""The baselines of `bench.switching` on gloo ranks: the answers of one process, the bytes of the formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.baselines import METHODS, Trunk, bytes_of_layer
from bench.stdit import STDiT
from tests.diffusers.toys import normal, seeded
from tests.worlds import SIZES
from weft.core.indices import split_evenly
from weft.run.spawn.pool import Pool
from weft.run.world import world_of

Answer = tuple[Tensor, Tensor, dict[str, Tensor], int, int]
"""Output, gradients of the condition and of parameters by name, bytes sent forward and backward."""


def answer(method: str | None, shape: tuple[int, ...], depth: int, heads: int) -> Answer:
    made = Trunk(seeded(STDiT(2, width=12, heads=heads, depth=depth)))  # pyright: ignore
    model = METHODS[method](made) if method else made
    condition = normal(shape[0], 12, seed=3).requires_grad_()
    slope = normal(*shape, seed=7)
    if method:
        slope = slope[:, slice(*split_evenly(shape[1], dist.get_world_size())[dist.get_rank()])]
    sent = [world_of(None, 60.0).comm.bytes_sent]
    out = model(normal(*shape), condition)
    sent.append(world_of(None, 60.0).comm.bytes_sent)
    (out * slope).sum().backward()
    sent.append(world_of(None, 60.0).comm.bytes_sent)
    assert condition.grad is not None
    grads = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    return out.detach(), condition.grad, grads, sent[1] - sent[0], sent[2] - sent[1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", SIZES)
def test_a_method_is_what_one_process_does(worlds: Callable[[int], Pool], size: int, method: str) -> None:
    shape = (2, 7, 5, 12)
    whole, at_condition, at_weights, *_ = answer(None, shape, 2, 4)
    answers: list[Answer] = worlds(size).run(answer, method, shape, 2, 4)
    out = torch.cat([found[0] for found in answers], 1)
    assert (out - whole).abs().max() < 1e-10 * whole.abs().max()
    total = torch.stack([found[1] for found in answers]).sum(0)
    assert (total - at_condition).abs().max() < 1e-10 * at_condition.abs().max()
    for name, grad in at_weights.items():
        parts = [found[2][name] for found in answers if name in found[2]]
        if parts[0].shape == grad.shape and len(parts) == size:  # the whole weight, on all ranks
            assert (torch.stack(parts).sum(0) - grad).abs().max() < 1e-10 * grad.abs().max(), name
        else:
            assert method == "megatron"
            squares = sum(part.square().sum() for part in parts)
            assert abs(squares - grad.square().sum()) < 1e-10 * grad.square().sum(), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_sends_what_the_formula_says(worlds: Callable[[int], Pool], size: int, method: str) -> None:
    shape = (2, 2 * size, 3 * size, 12)
    M = 2 * shape[1] * shape[2] * 12 * 8
    one, two = (worlds(size).run(answer, method, shape, depth, size) for depth in (1, 2))
    for less, more in zip(one, two, strict=True):
        assert less[3] == more[3] - less[3] == bytes_of_layer(method, M, size)
