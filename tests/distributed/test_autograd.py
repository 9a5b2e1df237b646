"""How attention over ranks gets along with the rest of torch: compile, checkpoints, layers, strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft
from tests.distributed.jobs import Answer, Worlds, attend, check, problem
from tests.run.dense import Truth, dense, error, shard, unshard
from tests.worlds import SIZES

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def with_attention(wrap: Callable[[Attention], Attention], truth: Truth, plan: str) -> Answer:
    """Like `attend`, with something around the call."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weft.attention(q, k, v, plan=plan, scale=truth.scale, tokens=truth.problem.q.size)

    inputs = tuple(x.requires_grad_() for x in truth.inputs(dist.get_rank()))
    out = wrap(attention)(*inputs)
    out.backward(truth.slope(dist.get_rank()))
    return out.detach(), gradients(inputs)


def gradients(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.grad for x in inputs if x.grad is not None)


def compiled(attention: Attention) -> Attention:
    return torch.compile(attention, fullgraph=True, backend="aot_eager")


def checkpointed(attention: Attention) -> Attention:
    return lambda *inputs: checkpoint(attention, *inputs, use_reentrant=False)


def reentrant(attention: Attention) -> Attention:
    return lambda *inputs: checkpoint(attention, *inputs, use_reentrant=True)


def from_tokens_first(attention: Attention) -> Attention:
    """As models have it: [B, S, H, D] in memory, seen as [B, H, S, D]."""

    def strided(*inputs: Tensor) -> Tensor:
        return attention(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))

    return strided


def from_one_projection(attention: Attention) -> Attention:
    """q, k, v as slices of one tensor, whose rows are three times as long."""

    def sliced(*inputs: Tensor) -> Tensor:
        return attention(*torch.cat(inputs, dim=-1).chunk(3, dim=-1))

    return sliced


def two_layers(truth: Truth, plan: str) -> Answer:
    """The second layer's queries are the first one's output, so both forwards come before both backwards."""
    rank = dist.get_rank()
    q, k, v = (x.requires_grad_() for x in truth.inputs(rank))
    options = {"plan": plan, "scale": truth.scale, "tokens": truth.problem.q.size}
    out = weft.attention(weft.attention(q, k, v, **options), v, k, **options)
    return out.detach(), torch.autograd.grad(out, (q, k, v), truth.slope(rank))


def accumulated(truth: Truth, plan: str, times: int) -> tuple[Tensor, ...]:
    inputs = tuple(x.requires_grad_() for x in truth.inputs(dist.get_rank()))
    for _ in range(times):
        out = weft.attention(*inputs, plan=plan, scale=truth.scale)
        out.backward(truth.slope(dist.get_rank()))
    return gradients(inputs)


def summed(truth: Truth) -> tuple[Tensor, ...]:
    """The gradient of a sum is one number, expanded: no two of its elements lie apart."""
    inputs = tuple(x.requires_grad_() for x in truth.inputs(dist.get_rank()))
    weft.attention(*inputs, scale=truth.scale).sum().backward()
    return gradients(inputs)


def without_gradients(truth: Truth, plan: str) -> tuple[bool, bool]:
    inputs = [x.requires_grad_() for x in truth.inputs(dist.get_rank())]
    with torch.no_grad():
        bare = weft.attention(*inputs, plan=plan)
    return bare.requires_grad, torch.equal(bare, weft.attention(*inputs, plan=plan))


@pytest.mark.parametrize("plan", ["ulysses", "ring"])
@pytest.mark.parametrize("wrap", [compiled, checkpointed, reentrant, from_tokens_first, from_one_projection])
def test_attention_may_be(worlds: Worlds, wrap: Callable[[Attention], Attention], plan: str) -> None:
    truth = Truth.of(problem(2, 23))
    check(truth, worlds(2).run(with_attention, wrap, truth, plan), 5e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("plan", ["ulysses", "ring", "gather"])
def test_layers_may_share_a_plan(worlds: Worlds, size: int, plan: str) -> None:
    truth = Truth.of(problem(size, 23))
    layout = truth.problem.q
    q, k, v = (x.clone().requires_grad_() for x in truth.whole)
    expected = dense(dense(q, k, v, truth.scale), v, k, truth.scale)
    expected_grads = torch.autograd.grad(expected, (q, k, v), unshard(truth.slopes, layout))
    outs, grads = zip(*worlds(size).run(two_layers, truth, plan), strict=True)
    assert error(unshard(outs, layout), expected) < 5e-6
    for found, exact in zip(zip(*grads, strict=True), expected_grads, strict=True):
        assert error(unshard(found, layout), exact) < 5e-6


@pytest.mark.parametrize("plan", ["ulysses", "ring", "gather"])
def test_gradients_accumulate(worlds: Worlds, plan: str) -> None:
    truth = Truth.of(problem(3, 23))
    once, twice = (worlds(3).run(accumulated, truth, plan, times) for times in (1, 2))
    assert truth.gradient_error(once) < 5e-6
    for grads, doubled in zip(once, twice, strict=True):
        assert all(torch.equal(2 * x, y) for x, y in zip(grads, doubled, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_a_sum_is_right(worlds: Worlds, size: int) -> None:
    truth = Truth.of(problem(size, 23))
    q, k, v = (x.clone().requires_grad_() for x in truth.whole)
    expected = torch.autograd.grad(dense(q, k, v, truth.scale).sum(), (q, k, v))
    for rank, grads in enumerate(worlds(size).run(summed, truth)):
        assert all(
            error(x, shard(y, truth.problem.q, rank)) < 5e-6 for x, y in zip(grads, expected, strict=True)
        )


@pytest.mark.parametrize("plan", ["ulysses", "ring", "gather"])
def test_without_gradients_the_output_has_the_same_bits(worlds: Worlds, plan: str) -> None:
    assert worlds(3).run(without_gradients, Truth.of(problem(3, 23)), plan) == [(False, True)] * 3


def test_torch_compile_takes_a_new_group(worlds: Worlds) -> None:
    truth = Truth.of(problem(2, 23))
    check(truth, worlds(2).run(compiled_with_a_group, truth), 5e-6)


def compiled_with_a_group(truth: Truth) -> Answer:
    group = dist.new_group()  # that no call has been made with before

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weft.attention(q, k, v, mesh=group, scale=truth.scale)

    fn = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = tuple(x.requires_grad_() for x in truth.inputs(dist.get_rank()))
    out = fn(*inputs)
    return out.detach(), torch.autograd.grad(out, inputs, truth.slope(dist.get_rank()))


def test_a_call_after_all_this_is_still_right(worlds: Worlds) -> None:
    truth = Truth.of(problem(2, 23))
    check(truth, worlds(2).run(attend, truth, {}), 5e-6)
