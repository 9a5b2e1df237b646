"""The oracle itself, against torch and by hand."""

from __future__ import annotations

import torch

from tests.run.dense import Truth, dense, error, shard, unshard
from weft.core.layout import Layout
from weft.core.problem import Problem


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_it_is_the_attention_of_torch() -> None:
    q, k, v = random(2, 6, 5, 3), random(2, 2, 7, 3), random(2, 2, 7, 3)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    assert error(dense(q, k, v, 0.3), theirs) < 1e-14


def test_a_mask_leaves_its_softmax_to_the_keys_it_allows() -> None:
    q, k, v = random(1, 1, 2, 3), random(1, 1, 4, 3), random(1, 1, 4, 3)
    allowed = torch.tensor([[[True, False, True, False], [False] * 4]])
    found = dense(q, k, v, 0.3, allowed)
    assert error(found[:, :, :1], dense(q[:, :, :1], k[:, :, ::2], v[:, :, ::2], 0.3)) < 1e-14
    assert not found[:, :, 1].any()


def test_a_row_that_sees_nothing_has_no_gradient_and_no_nan() -> None:
    q, k, v = (random(1, 1, 2, 3).requires_grad_() for _ in range(3))
    dense(q, k, v, 0.3, torch.zeros(1, 2, 2, dtype=torch.bool)).sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in (q, k, v))


def test_what_is_cut_by_a_layout_is_put_together_again() -> None:
    x, layout = random(1, 2, 7, 3), Layout.permuted([[6, 2], [0, 1, 5], [4, 3]]).padded(4)
    assert torch.equal(unshard([shard(x, layout, rank) for rank in range(3)], layout), x)


def test_copies_of_a_token_add_up() -> None:
    x, layout = random(1, 2, 7, 3), Layout.even(7, 3, prefix=2)
    copies = torch.tensor([3, 3, 1, 1, 1, 1, 1])[:, None]
    assert torch.equal(unshard([shard(x, layout, rank) for rank in range(3)], layout), x * copies)


def test_the_error_of_a_nan_is_infinite() -> None:
    assert error(torch.tensor([0.0, torch.nan]), torch.zeros(2)) == torch.inf


def test_the_numbers_of_a_16_bit_problem_have_16_bits() -> None:
    tokens = Layout.even(3, 1)
    problem = Problem(batch=1, heads=1, kv_heads=1, head_dim=2, q=tokens, kv=tokens, dtype="bfloat16")
    truth = Truth.of(problem)
    assert torch.equal(truth.inputs(0)[0].double(), truth.whole[0])
