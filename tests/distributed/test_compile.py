"""torch.compile of parallelized blocks and of weft.attention: whole graphs that serve any sizes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from tests.diffusers.toys import normal
from tests.distributed.jobs import Worlds
from tests.run.dense import dense
from weft.core.layout import Layout

Step = tuple[Tensor, list[Tensor]]
Grid = tuple[int, int, int]

SIZES = (17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
GRIDS: tuple[Grid, ...] = (
    (1, 1, 17), (3, 3, 5), (1, 1, 5), (1, 1, 31), (2, 3, 2), (1, 1, 7), (1, 1, 11), (1, 1, 29), (2, 2, 6),
    (1, 1, 13),
)  # fmt: skip
MODELS = (
    "wan", "wan-ti2v", "wan-vace", "skyreels", "flux", "flux2", "ovis", "longcat", "ltx", "qwen",
    "qwen-padded", "hunyuan", "hunyuan-replace", "hunyuan-1.5", "hunyuan-image",
)  # fmt: skip


def graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def stepped(model: Any, given: dict[str, Any]) -> Step:
    out = model(**given)[0]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        return out, []
    loss = (out * normal(*out.shape, seed=7, dtype=out.dtype)).sum()
    grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return out.detach(), list(grads)


def steps(
    name: str, grids: tuple[Grid, ...], backend: str = "", train: bool = True, **options: Any
) -> tuple[list[Step], int, int]:
    """A step of each size in turn, and of each once more; how many graphs there are in between and after."""
    from tests.diffusers.zoo import ZOO

    torch.compiler.reset()
    model: Any = ZOO[name].make(torch.float32).train(train).requires_grad_(train)
    if dist.is_initialized():
        weft.parallelize(model, **options)
    if backend:
        model.compile_repeated_blocks(fullgraph=True, backend=backend)
    inputs = [ZOO[name].inputs(batch=1, grid=grid, dtype=torch.float32) for grid in grids]
    before = graphs() if backend else 0
    first = [stepped(model, given) for given in inputs]
    between = graphs() if backend else 0
    again = [stepped(model, given) for given in reversed(inputs)]
    return first + again, between - before, (graphs() if backend else 0) - between


@cache
def alone(name: str, grids: tuple[Grid, ...]) -> list[Step]:
    pytest.importorskip("diffusers")
    return steps(name, grids)[0]


def check(expected: list[Step], answers: list[list[Step]], limit: float = 2e-5) -> None:
    for at, (out, grads) in enumerate(expected):
        most = max((float(grad.abs().max()) for grad in grads), default=0.0)
        assert all((each[at][0] - out).abs().max() <= limit * out.abs().max() for each in answers)
        for by_rank, grad in zip(zip(*(each[at][1] for each in answers), strict=True), grads, strict=True):
            assert (torch.stack(by_rank).mean(0) - grad).abs().max() <= limit * most


def check_sizes(worlds: Worlds, name: str, size: int, backend: str, kinds: int) -> None:
    answers = worlds(size).run(steps, name, GRIDS, backend)
    check(alone(name, GRIDS), [found for found, _, _ in answers])
    assert all(again == 0 for _, _, again in answers), "a size that is known compiles nothing"
    assert all(made <= kinds for _, made, _ in answers), answers[0][1:]


def test_blocks_are_whole_graphs_for_any_sequence_of_sizes(worlds: Worlds) -> None:
    """Of the first block, which cuts, and of the others: for the first size, one frame, and all others."""
    check_sizes(worlds, "wan", 2, "eager", 6)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_all_models_are_whole_graphs_for_any_sequence_of_sizes(worlds: Worlds, name: str, size: int) -> None:
    check_sizes(worlds, name, size, "aot_eager", 16)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["wan", "flux"])
def test_inductor_keeps_what_backwards_read(worlds: Worlds, name: str) -> None:
    check_sizes(worlds, name, 2, "inductor", 6)


def sparse(method: str, train: bool) -> tuple[float, float, int]:
    """The largest differences of outputs and gradients between compiled and plain blocks."""
    grids = ((3, 4, 4), (1, 4, 6), (2, 4, 4))
    plain, *_ = steps("wan", grids, sparse=method, train=train)
    compiled, _, again = steps("wan", grids, "eager", sparse=method, train=train)
    pairs = list(zip(plain, compiled, strict=True))
    outs = max(float((a - b).abs().max() / a.abs().max()) for (a, _), (b, _) in pairs)
    grads = [float((x - y).abs().max()) for (_, a), (_, b) in pairs for x, y in zip(a, b, strict=True)]
    return outs, max(grads, default=0.0), again


def check_sparse(worlds: Worlds, size: int, method: str, train: bool) -> None:
    pytest.importorskip("diffusers")
    for outs, grads, again in worlds(size).run(sparse, method, train):
        assert (outs < 2e-5, grads < 2e-5, again) == (True, True, 0), (outs, grads, again)


def test_sparse_attention_is_one_operation_of_a_graph(worlds: Worlds) -> None:
    check_sparse(worlds, 2, "topk:0.4,dense_steps=0,dense_layers=0", train=False)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("method", ["sta", "radial", "svg", "topk:0.4,dense_steps=0,dense_layers=0"])
def test_all_sparse_attention_compiles(worlds: Worlds, method: str, train: bool, size: int) -> None:
    check_sparse(worlds, size, method, train)


def attended(kind: str, dynamic: bool | None) -> tuple[float, int]:
    """The largest error of outputs and gradients over lengths in turn, and how many graphs they took."""
    torch.compiler.reset()
    rank, size, before = dist.get_rank(), dist.get_world_size(), graphs()

    def attention(q: Tensor, k: Tensor, v: Tensor, tokens: Any) -> Tensor:
        return 2 * weft.attention(q + 1, k, v, tokens=tokens)

    fn = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    worst = 0.0
    for n in (*SIZES, *reversed(SIZES)):
        layout = Layout.even(n, size)
        start, stop = layout.shards[rank][0]
        whole = [normal(1, 2, n, 8, seed=seed).requires_grad_() for seed in (n, n + 1, n + 2)]
        own = [x.detach()[:, :, start:stop].requires_grad_() for x in whole]
        out = fn(*own, {"number": n, "layout": layout, "nothing": None}[kind])
        expected = 2 * dense(whole[0] + 1, *whole[1:], 8**-0.5)
        pairs = [
            (out, expected),
            *zip(
                *(torch.autograd.grad(x.sin().sum(), of) for x, of in ((out, own), (expected, whole))),
                strict=True,
            ),
        ]
        worst = max(worst, *(float((x - y[:, :, start:stop]).detach().abs().max()) for x, y in pairs))
    return worst, graphs() - before


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", ["number", "layout", "nothing"])
def test_attention_compiles_for_lengths_that_change(worlds: Worlds, kind: str, dynamic: bool | None) -> None:
    for worst, made in worlds(2).run(attended, kind, dynamic):
        assert (worst < 1e-10, made <= 2) == (True, True), (worst, made)
