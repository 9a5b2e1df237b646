"""Muon: its direction, and that a model learns by it; on several ranks: tests/distributed/test_resume.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.train.optimizer import Muon, make_optimizers, orthogonalize
from weft.train.recipe import TrainConfig


@pytest.mark.parametrize("shape", [(7, 7), (5, 13), (13, 5), (1, 6)])
def test_all_directions_count_alike(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(orthogonalize(matrix), full_matrices=False)
    before = torch.linalg.svd(matrix, full_matrices=False)
    assert ((s > 0.5) & (s < 1.3)).all()
    assert before.S.max() / before.S.min() > s.max() / s.min() or min(shape) == 1
    # The same directions: what was U S V is U S' V, so U' = U and V' = V taken together.
    whole = before.U @ before.Vh
    assert (u @ v - whole).abs().max() < 1e-10


def test_a_gradient_of_nothing_changes_nothing() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.zeros(3, 4)
    Muon([weight], 0.1).step()
    assert torch.equal(weight.detach(), torch.ones(3, 4))


def test_it_has_the_matrices_inside_blocks_and_every_weight_has_one_optimizer() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)]), "head": nn.Linear(4, 2)})
    groups = [o.param_groups for o in make_optimizers(model, TrainConfig(optimizer="muon"))]
    adams, [own] = groups
    assert own["params"] == [model["blocks"][0].weight]  # type: ignore[index]
    every = [weight for group in (*adams, own) for weight in group["params"]]
    assert {id(w) for w in every} == {id(w) for w in model.parameters()} and len(every) == 4
    assert len(make_optimizers(model, TrainConfig())) == 1


def test_a_decayed_matrix_shrinks_and_one_follows_its_gradient_downhill() -> None:
    target = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    weight = nn.Parameter(torch.zeros(6, 4))
    optimizer = Muon([weight], 0.1)
    first = (weight - target).square().sum().item()
    for _ in range(120):
        optimizer.zero_grad()
        (weight - target).square().sum().backward()
        optimizer.step()
    assert (weight - target).square().sum().item() < 0.05 * first
    still = nn.Parameter(torch.ones(2, 2))
    still.grad = torch.zeros(2, 2)
    Muon([still], 0.5, weight_decay=0.1).step()
    assert still.detach().allclose(torch.full((2, 2), 0.95))
