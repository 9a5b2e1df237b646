"""Forward-mode AD and `torch.func` of attention and switches over real ranks, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import weft
from tests.cases import Case, cases, kinds, token_mask
from tests.distributed.jobs import Worlds, problem, tiles_with_empty_rows, works
from tests.run.dense import Truth, dense, error, shard
from weft.core.errors import DerivativeError, InputError
from weft.core.layout import Layout

WAYS = ("func", "dual")
# torch's own: it scripts its rules for forward-mode AD when the first is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def directions(truth: Truth) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(1)
    dtype = getattr(torch, truth.problem.dtype)
    return tuple(
        torch.randn(x.shape, generator=random, dtype=torch.float64).to(dtype).double() for x in truth.whole
    )


def tangent(way: str, fn: Callable[..., Tensor], inputs: Any, tangents: Any) -> Tensor:
    if way == "func":
        return torch.func.jvp(fn, tuple(inputs), tuple(tangents))[1]
    with forward_ad.dual_level():
        out = fn(*map(forward_ad.make_dual, inputs, tangents))
        return forward_ad.unpack_dual(out).tangent  # pyright: ignore[reportReturnType]


def dense_tangent(truth: Truth) -> Tensor:
    allowed = torch.from_numpy(token_mask(truth.mask))
    return tangent("func", lambda *x: dense(*x, truth.scale, allowed), truth.whole, directions(truth))


def rank_tangent(way: str, truth: Truth, options: dict[str, Any]) -> Tensor:
    rank, dtype = dist.get_rank(), getattr(torch, truth.problem.dtype)
    q, kv = truth.problem.q, truth.problem.kv
    pairs = zip(directions(truth), (q, kv, kv), strict=True)
    tangents = [shard(x, layout, rank).to(dtype) for x, layout in pairs]
    attention = lambda *x: weft.attention(*x, scale=truth.scale, **options)  # noqa: E731
    return tangent(way, attention, truth.inputs(rank), tangents)


def check_tangents(truth: Truth, answers: list[Tensor], tolerance: float = 1e-10) -> None:
    expected = dense_tangent(truth)
    for rank, found in enumerate(answers):
        assert error(found, shard(expected, truth.problem.q, rank, fill=0.0)) < tolerance


@settings(max_examples=12)
@given(case=cases(61, min_ranks=2, max_ranks=3), way=st.sampled_from(WAYS))
def test_tangents_of_random_attentions_are_those_of_dense_ones(worlds: Worlds, case: Case, way: str) -> None:
    """With any layout and mask: copies of a token have the same tangent, padded rows none."""
    truth = Truth.of(case.problem, case.mask)
    options = {"tokens": case.problem.q, "kv_tokens": case.problem.kv, "mask": case.mask, "plan": case.name}
    check_tangents(truth, worlds(case.problem.ranks).run(rank_tangent, way, truth, options))


@pytest.mark.parametrize(("size", "plan"), [(2, "auto"), (2, "ring"), *((3, plan) for plan in kinds(3)[:5])])
@pytest.mark.parametrize("ends", [(0, 0), (3, 2)])
def test_tangents_of_text_that_every_rank_holds(
    worlds: Worlds, size: int, plan: str, ends: tuple[int, int]
) -> None:
    prefix, suffix = ends
    layout = Layout.even(23, size, prefix=prefix, suffix=suffix)
    truth = Truth.of(problem(size, 23, q=layout, dtype="float64", heads=4, kv_heads=2))
    options = {"plan": plan, "prefix": prefix, "suffix": suffix}
    check_tangents(truth, worlds(size).run(rank_tangent, "func", truth, options))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_tangents_in_less_than_float64(worlds: Worlds, dtype: str, tolerance: float) -> None:
    truth = Truth.of(problem(3, 41, dtype=dtype, head_dim=8), tiles_with_empty_rows(3, 41, 41, 8))
    answers = worlds(3).run(rank_tangent, "func", truth, {"mask": truth.mask})
    check_tangents(truth, answers, tolerance)


def mean_flow(attention: Callable[..., Tensor], x: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    """The gradients of a loss against a target that is made of the tangent."""
    weight = torch.eye(5, dtype=torch.float64).requires_grad_()
    out, slope = torch.func.jvp(lambda *x: attention(*(y @ weight for y in x)), tuple(x), tuple(tangents))
    (out - (0.3 * slope + 0.1).detach()).square().sum().backward()
    assert weight.grad is not None
    return [out.detach(), weight.grad]


def rank_mean_flow(truth: Truth) -> list[Tensor]:
    rank = dist.get_rank()
    tangents = [shard(x, truth.problem.q, rank) for x in directions(truth)]
    return mean_flow(lambda *x: weft.attention(*x, scale=truth.scale), list(truth.inputs(rank)), tangents)


@pytest.mark.parametrize("size", [2, 3])
def test_a_loss_with_a_detached_tangent_has_the_gradients_of_one_process(worlds: Worlds, size: int) -> None:
    truth = Truth.of(problem(size, 23, dtype="float64"))
    out, grad = mean_flow(lambda *x: dense(*x, truth.scale), list(truth.whole), list(directions(truth)))
    answers = worlds(size).run(rank_mean_flow, truth)
    assert error(sum(found for _, found in answers), grad) < 1e-10  # pyright: ignore
    for rank, (found, _) in enumerate(answers):
        assert error(found, shard(out, truth.problem.q, rank)) < 1e-10


def changed_in_place(truth: Truth) -> tuple[Tensor, tuple[Tensor, ...]]:
    inputs = [x.requires_grad_() for x in truth.inputs(dist.get_rank())]
    out = weft.attention(*inputs, scale=truth.scale, plan="ulysses")
    before = out.detach().clone()
    out *= 2
    return before, torch.autograd.grad(out, inputs, truth.slope(dist.get_rank()) / 2)


def test_an_output_that_no_backward_reads_may_be_changed_in_place(worlds: Worlds) -> None:
    truth = Truth.of(problem(2, 23, dtype="float64", heads=4))
    outs, grads = zip(*worlds(2).run(changed_in_place, truth), strict=True)
    assert truth.output_error(outs) < 1e-10
    assert truth.gradient_error(grads) < 1e-10


def func_gradients(truth: Truth) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """By vjp, and by grad of a loss."""
    rank = dist.get_rank()
    inputs, slope = truth.inputs(rank), truth.slope(rank)
    attention = lambda *x: weft.attention(*x, scale=truth.scale)  # noqa: E731
    out, pull = torch.func.vjp(attention, *inputs)
    loss = torch.func.grad(lambda *x: (attention(*x) * slope).sum(), argnums=(0, 1, 2))
    return [(out, pull(slope)), (out, loss(*inputs))]


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_by_torch_func(worlds: Worlds, size: int) -> None:
    truth = Truth.of(problem(size, 23, dtype="float64"))
    for answers in zip(*worlds(size).run(func_gradients, truth), strict=True):
        outs, grads = zip(*answers, strict=True)
        assert truth.output_error(outs) < 1e-10
        assert truth.gradient_error(grads) < 1e-10


def moved(x: Tensor, *, async_op: bool = False) -> Tensor:
    dims = {"batch": 2, "time": 5, "space": 7}
    part = weft.split(x.sin(), "time", dims=dims)
    there = weft.switch(part, "time", "space", dims=dims, async_op=async_op)
    return weft.gather((there.wait() if async_op else there).square(), "space", dims=dims)


def moved_derivatives(x: Tensor, dx: Tensor) -> list[Tensor]:
    later = lambda x: moved(x, async_op=True)  # noqa: E731
    return [
        *(tangent(way, fn, [x], [dx]) for way in WAYS for fn in (moved, later)),
        torch.func.grad(lambda x: moved(x).sum())(x),
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_derivatives_of_switches(worlds: Worlds, size: int) -> None:
    x, dx = (torch.randn(2, 5, 7, dtype=torch.float64) for _ in range(2))
    answers = worlds(size).run(moved_derivatives, x, dx)
    for *tangents, _ in answers:
        assert all(error(each, (2 * x).sin() * dx) < 1e-12 for each in tangents)
    # The loss counts once on each rank; a whole tensor's gradient is partial.
    assert error(sum(grad for *_, grad in answers) / size, (2 * x).sin()) < 1e-12  # pyright: ignore


def second(attention: Any, q: Tensor) -> Any:
    (grad,) = torch.autograd.grad(attention(q.requires_grad_()).square().sum(), q, create_graph=True)
    return grad.square().sum().backward()


def second_of_switch(attention: Any, q: Tensor) -> Any:
    return torch.func.vmap(moved)(q.new_zeros(2, 2, 5, 7))


def backward_in_level(attention: Any, q: Tensor) -> Any:
    with forward_ad.dual_level():
        out = attention(forward_ad.make_dual(q.requires_grad_(), q.detach()))
        return out.sum().backward()


def undetached(attention: Any, q: Tensor) -> Any:
    out, slope = torch.func.jvp(attention, (q.requires_grad_(),), (q.detach(),))
    return (out - slope).square().sum().backward()


def batched_gradients(attention: Any, q: Tensor) -> Any:
    out = attention(q.requires_grad_())
    return torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True)


def in_place(attention: Any, q: Tensor) -> Any:
    out = attention(q.requires_grad_())
    out += 1
    return out.sum().backward()


def exported(attention: Any, q: Tensor, *, strict: bool = False) -> Any:
    model = torch.nn.Module()
    model.forward = attention
    return torch.export.export(model, (q,), strict=strict)


def compiled_jvp(attention: Any, q: Tensor) -> Any:
    return torch.compile(lambda q: torch.func.jvp(attention, (q,), (q,))[1], backend="eager")(q)


def distributed_tensor(attention: Any, q: Tensor) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return attention(DTensor.from_local(q, mesh, [Shard(2)]))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "double backward": (second, "gradient of its gradient"),
    "backward inside of the level": (backward_in_level, "tangent of its gradient"),
    "gradient of the tangent": (undetached, "gradient of its tangent"),
    "nested jvp": (
        lambda f, q: torch.func.jvp(lambda x: torch.func.jvp(f, (x,), (q,))[1], (q,), (q,)),
        "nested torch.func.jvp",
    ),
    "forward over reverse": (
        lambda f, q: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (q,), (q,)),
        "nested torch.func.jvp",
    ),
    "vmap": (lambda f, q: torch.func.vmap(f)(torch.stack((q, q))), "torch.vmap"),
    "jacrev": (lambda f, q: torch.func.jacrev(f)(q), "torch.vmap"),
    "vmap of a switch": (second_of_switch, "torch.vmap"),
    "is_grads_batched": (batched_gradients, "torch.vmap"),
    "in place": (in_place, "changed in place"),
    "export": (exported, "cannot be exported"),
    "compiled jvp": (compiled_jvp, "graph of torch.compile"),
    "DTensor": (distributed_tensor, "to_local"),
}


def refusals() -> dict[str, str]:
    """What each of them says, on this rank; the world works as before."""
    found = {}
    for name, (fn, _) in REFUSED.items():
        q = torch.randn(1, 2, 8 // dist.get_world_size() + 1, 4)
        try:
            fn(lambda q: weft.attention(q, q, q, plan="ring"), q)
            found[name] = "nothing"
        except Exception as error:  # noqa: BLE001
            cause = error if isinstance(error, DerivativeError | InputError) else error.__cause__
            found[name] = str(cause) if isinstance(cause, DerivativeError | InputError) else repr(error)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_not_computed_is_refused_by_a_sentence(worlds: Worlds, size: int) -> None:
    for found in worlds(size).run(refusals):
        wrong = {name: found[name] for name, (_, words) in REFUSED.items() if words not in found[name]}
        assert not wrong
    assert all(worlds(size).run(works))


def after_a_graph(truth: Truth, way: str) -> Tensor | str:
    """Forward-mode AD of a function that has been compiled, and has run."""
    q, k, v = truth.inputs(dist.get_rank())
    fn = torch.compile(
        lambda q: weft.attention(q, k, v, scale=truth.scale, tokens=truth.problem.q.size), backend="eager"
    )
    assert error(fn(q), shard(truth.answer[0], truth.problem.q, dist.get_rank())) < 1e-10
    try:
        return tangent(way, fn, [q], [shard(directions(truth)[0], truth.problem.q, dist.get_rank())])
    except Exception as refusal:  # noqa: BLE001
        return str(refusal)


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_compiled_before_loses_no_tangent_silently(worlds: Worlds, way: str) -> None:
    truth = Truth.of(problem(2, 23, dtype="float64"))
    q, k, v = truth.whole
    expected = tangent("func", lambda q: dense(q, k, v, truth.scale), [q], directions(truth)[:1])
    for rank, found in enumerate(worlds(2).run(after_a_graph, truth, way)):
        if isinstance(found, str):
            assert "graph of torch.compile" in found
        else:
            assert error(found, shard(expected, truth.problem.q, rank)) < 1e-10
