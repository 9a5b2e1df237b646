"""Attention as one torch operation, on one rank: torch's own checks, torch.compile, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

import weft
from tests.run.dense import Truth, dense, error
from weft.core.errors import DerivativeError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.masks.random import random_mask
from weft.plan.choose import choose
from weft.run import opaque
from weft.run.opaque import QKV, CallOptions
from weft.run.world import world_of

Attention = Callable[..., Tensor]


def alone(tokens: int, **sizes: Any) -> Problem:
    layout = Layout.even(tokens, 1)
    rest = {"batch": 2, "heads": 3, "kv_heads": 3, "head_dim": 5, "q": layout, "kv": layout}
    return Problem(**(rest | {"dtype": "float64"} | sizes))


def causal(tokens: int, block: int, heads: int = 3, *, shift: int = 0) -> BlockMask:
    blocks = -(-tokens // block)
    tiles = np.tril(np.ones((heads, blocks, blocks), dtype=bool), shift)
    return BlockMask.from_tiles(tiles, q_len=tokens, kv_len=tokens, block_q=block)


def both_ways(fn: Attention, truth: Truth, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    inputs = [x.requires_grad_() for x in truth.inputs(0)]
    out = fn(*inputs, scale=truth.scale, **options)
    return out.detach(), torch.autograd.grad(out, inputs, truth.slope(0))


def assert_right(truth: Truth, out: Tensor, grads: tuple[Tensor, ...]) -> None:
    assert truth.output_error([out]) < 1e-10
    assert truth.gradient_error([grads]) < 1e-10


def compiled() -> Attention:
    torch.compiler.reset()
    return torch.compile(
        lambda q, k, v, **options: weft.attention(q, k, v, **options), backend="aot_eager", fullgraph=True
    )


@pytest.mark.parametrize("mask", [None, causal(17, 4, heads=6, shift=-1)], ids=["dense", "empty row"])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_one_rank_alone_equals_dense_attention(kv_heads: int, mask: BlockMask | None) -> None:
    truth = Truth.of(alone(17, heads=6, kv_heads=kv_heads), mask)
    assert_right(truth, *both_ways(weft.attention, truth, mask=mask))


def test_the_scale_is_that_of_torch_unless_told() -> None:
    q, k, v = (torch.randn(1, 2, 7, 3, dtype=torch.float64) for _ in range(3))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert error(weft.attention(q, k, v), theirs) < 1e-12


@pytest.mark.parametrize("scale", [0.0, -0.7, 3])
def test_any_finite_scale_serves(scale: float) -> None:
    truth = Truth.of(alone(11), scale=scale)
    assert_right(truth, *both_ways(weft.attention, truth))


class Plain:
    """What a graph calls: an attention with the options that it is given."""

    def called(self, qkv: QKV, options: CallOptions) -> Tensor:
        return weft.attention(*qkv, scale=options.scale)


@pytest.mark.parametrize("heads", [(3, 3), (6, 2)])
def test_torch_finds_nothing_wrong_with_the_operation(heads: tuple[int, int]) -> None:
    truth = Truth.of(alone(7, heads=heads[0], kv_heads=heads[1], dtype="float32"))
    callee = Plain()
    number = opaque.number_of(callee)
    inputs = [x.requires_grad_() for x in truth.inputs(0)]
    # Its gradient exists once, for the forward that saved it: what runs twice in a test cannot have one.
    for keep, qkv in ((False, [x.detach() for x in inputs]), (True, inputs)):
        options = (None, None, 0.3, [], keep)
        torch.library.opcheck(
            opaque.call_op, (None, number, *qkv, *options), test_utils=("test_schema", "test_faketensor")
        )


def test_torch_compile_takes_it_in_one_graph() -> None:
    truth = Truth.of(alone(17))
    assert_right(truth, *both_ways(compiled(), truth))


def test_torch_compile_knows_one_mask_from_another() -> None:
    fn = compiled()
    for mask in (causal(17, 4), causal(17, 4, shift=-1), causal(17, 4)):
        truth = Truth.of(alone(17), mask)
        assert_right(truth, *both_ways(fn, truth, mask=mask))


@pytest.mark.parametrize("how", ["layout", "plan", "schedule"])
def test_torch_compile_takes_every_option(how: str) -> None:
    truth = Truth.of(alone(17))
    plan = choose(truth.problem, truth.mask)
    options = {
        "layout": {"tokens": truth.problem.q},
        "plan": {"plan": plan},
        "schedule": {"plan": plan.schedule},
    }
    assert_right(truth, *both_ways(compiled(), truth, **options[how]))


def test_torch_compile_knows_one_length_from_another() -> None:
    fn = compiled()
    for tokens in (17, 19, 23):
        truth = Truth.of(alone(tokens))
        assert_right(truth, *both_ways(fn, truth))


def test_torch_compile_knows_one_scale_from_another() -> None:
    fn = compiled()
    for scale in (0.1, 0.2, 0.3):
        truth = Truth.of(alone(17), scale=scale)
        assert_right(truth, *both_ways(fn, truth))


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    truth = Truth.of(alone(11))
    q, k, v = truth.inputs(0)
    v.requires_grad_()
    weft.attention(q, k, v, scale=truth.scale).backward(truth.slope(0))
    assert q.grad is None
    assert k.grad is None
    assert v.grad is not None
    assert error(v.grad, truth.answer[1][2]) < 1e-10


def test_one_tensor_may_be_query_key_and_value() -> None:
    x = torch.randn(1, 2, 7, 3, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(weft.attention(x, x, x, scale=0.3).sum(), x)
    (expected,) = torch.autograd.grad(dense(x, x, x, 0.3).sum(), x)
    assert error(found, expected) < 1e-10


@pytest.mark.parametrize("spoiled", ["input", "output"])
def test_what_is_changed_in_place_before_the_backward_is_noticed(spoiled: str) -> None:
    q, k, v = (torch.randn(1, 2, 7, 3) for _ in range(3))
    out = weft.attention(q.requires_grad_(), k, v)
    with pytest.raises(DerivativeError, match="changed in place"):
        {"input": k, "output": out}[spoiled].mul_(2)
        out.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_the_same(mode: Callable[[], Any]) -> None:
    truth = Truth.of(alone(11))
    q, k, v = (x.requires_grad_() for x in truth.inputs(0))
    with mode():
        bare = weft.attention(q, k, v)
    assert not bare.requires_grad
    assert torch.equal(bare, weft.attention(q, k, v))


def test_executors_that_are_not_used_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that change from step to step must not pile up, and a backward still finds its executor."""
    monkeypatch.setattr("weft.run.attention.MAX_EXECUTORS", 3)
    known = world_of(None, 60.0).executors
    q, k, v = (torch.randn(1, 2, 24, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    masks = [random_mask(2, 24, 24, block=4, density=0.5, seed=seed) for seed in range(8)]
    first = weft.attention(q, k, v, mask=masks[0])
    gone = ref(list(known.values())[-1])
    for mask in masks[1:]:
        weft.attention(q, k, v, mask=mask)
    assert len(known) == 3
    assert gone() is not None, "a backward is still to come"
    order = list(known)
    weft.attention(q, k, v, mask=masks[-3])
    assert list(known) == [*order[1:], order[0]], "what was used last is the last to go"
    (late,) = torch.autograd.grad(first.sum(), q)
    del first
    assert gone() is None
    (anew,) = torch.autograd.grad(weft.attention(q, k, v, mask=masks[0]).sum(), q)
    assert torch.equal(late, anew)
