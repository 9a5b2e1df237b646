"""Partial attentions merged by log-sum-exp."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.run.dense import dense, error
from weft.run.kernels.merge import merge_
from weft.run.kernels.reference import ReferenceKernel
from weft.run.kernels.tiles import Tiles

Part = tuple[Tensor, Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(q: Tensor, k: Tensor, v: Tensor, cuts: list[int]) -> list[Part]:
    """The attention to each slice of the keys, with its log-sum-exp."""
    found = []
    for start, stop in itertools.pairwise([0, *cuts, k.shape[2]]):
        tiles = Tiles(None, q.shape[2], stop - start, q.shape[2], stop - start)
        found.append(ReferenceKernel().attend(q, k[:, :, start:stop], v[:, :, start:stop], tiles, 0.5))
    return found


def empty_like(part: Part) -> Part:
    return torch.zeros_like(part[0]), torch.full_like(part[1], -torch.inf)


def merged(parts: list[Part]) -> Part:
    into = parts[0][0].clone(), parts[0][1].clone()
    for part in parts[1:]:
        assert merge_(into, part) is into
    return into


@given(
    cuts=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    gain=st.sampled_from((1.0, 30.0, 1e3)),
    data=st.data(),
)
def test_parts_in_any_order_equal_one_softmax(cuts: list[int], gain: float, data: st.DataObject) -> None:
    q, k, v = random(2, 3, 5, 4) * gain, random(2, 3, 11, 4, seed=1), random(2, 3, 11, 4, seed=2)
    order = data.draw(st.permutations(parts(q, k, v, sorted(cuts))))
    out, lse = merged(list(order))
    assert error(out, dense(q, k, v, 0.5)) < 1e-10
    assert error(lse, (q @ k.mT * 0.5).logsumexp(-1)) < 1e-10


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_empty_part_changes_nothing_wherever_it_comes(at: int) -> None:
    pieces = parts(random(1, 2, 3, 4), random(1, 2, 7, 4), random(1, 2, 7, 4), [3])
    with_empty = [*pieces[:at], empty_like(pieces[0]), *pieces[at:]]
    for x, y in zip(merged(pieces), merged(with_empty), strict=True):
        assert torch.equal(x, y)


def test_empty_parts_alone_stay_empty_and_are_no_nan() -> None:
    (part,) = parts(random(1, 1, 3, 4), random(1, 1, 2, 4), random(1, 1, 2, 4), [])
    out, lse = merged([empty_like(part)] * 3)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("first", [True, False])
def test_a_nan_stays_a_nan_in_its_row_and_in_no_other(first: bool) -> None:
    q = random(1, 1, 3, 4)
    q[:, :, 1] = torch.nan
    one, other = parts(q, random(1, 1, 7, 4), random(1, 1, 7, 4), [3])
    out, lse = merged([one, other] if first else [other, one])
    assert out.isnan().all(-1).squeeze().tolist() == [False, True, False]
    assert lse.isnan().squeeze().tolist() == [False, True, False]


def test_a_nan_of_one_part_is_not_hidden_by_the_other() -> None:
    one, other = parts(random(1, 1, 3, 4), random(1, 1, 7, 4), random(1, 1, 7, 4), [3])
    one[0][:, :, 1], one[1][:, :, 1] = torch.nan, torch.nan
    for pair in ([one, other], [other, one]):
        assert merged(pair)[0].isnan().any(-1).squeeze().tolist() == [False, True, False]


def test_a_part_that_outweighs_the_other_by_far_is_taken_whole() -> None:
    light, heavy = (torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -1e30)), parts_of_one()
    for pair in ([light, heavy], [heavy, light]):
        assert np.array_equal(merged(pair)[0].numpy(), heavy[0].numpy())


def parts_of_one() -> Part:
    return torch.tensor([[[[0.1, 0.7]]]]), torch.tensor([[[1e30]]])
