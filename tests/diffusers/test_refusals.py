"""What weft cannot split is refused, in a sentence that names the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.diffusers.toys import DIMS, normal, on_ranks, seeded
from weft.core.errors import InputError
from weft.diffusers.adapter import Adapter, Shard
from weft.diffusers.adapters import adapter_of
from weft.diffusers.region import ShardedRegion
from weft.run.spawn.pool import Pool


def sharded(model: Any, world: Any, adapter: Adapter) -> None:
    region = ShardedRegion(model, adapter, plan="ring")
    model.forward = lambda *args, **kwargs: region.run(world, args, kwargs)


class Toy(nn.Module):
    """One attention over tokens [B, N, 4], called as a test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.out = Attention(), nn.Linear(4, 4)

    def forward(self, x: Tensor, places: Tensor | None = None, **how: Any) -> Tensor:
        return self.out(self.attn(x if places is None else x + places, **how))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.processor: Any = Processor()

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        return self.processor(self.to_q(x), self.to_k(x), x, **how)


class Processor:
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], **how)[:, 0]


class OwnProcessor:
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class SlyProcessor:
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return OwnProcessor()(q, k, v) if len(q) else F.scaled_dot_product_attention(q, k, v)


TOY = Adapter(
    "Toy",
    inputs={"": {"x": Shard("video", 1)}},
    gather={"out": Shard("video", 1)},
    attention={"attn": "video"},
)
PLACES = {"": {"x": Shard("video", 1), "places": Shard("video", 0)}}
N = 7


def run_toy(change: Callable[[Any], Any] = lambda _: None, adapter: Adapter = TOY, **how: Any) -> None:
    """Two ranks, whose toys are changed before they are sharded, and called with more arguments."""

    def job(world: Any) -> Tensor:
        model = seeded(Toy())
        change(model)
        sharded(model, world, adapter)
        return model(x, **how)

    x = normal(2, N, 4)
    change(model := seeded(Toy()))
    for found in on_ranks(2, job):
        torch.testing.assert_close(found, model(x, **how), rtol=0, atol=1e-12)


def swap(processor: Any, model: Any) -> None:
    model.attn.processor = processor


def hide_attention(model: Any) -> None:
    """One that does not look like it."""

    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model.out = nn.Sequential(Hidden(), model.out)


def add_attention(model: Any) -> None:
    model.more = Attention()


def test_toy_is_sharded() -> None:
    run_toy()
    run_toy(adapter=replace(TOY, inputs=PLACES), places=normal(N, 4, seed=2))
    last = {"": {"x": Shard("video", -2)}}
    run_toy(adapter=replace(TOY, inputs=last, gather={"out": Shard("video", -2)}))


LATER = torch.ones(N, N).tril().bool()
SAME = (torch.arange(N) < 5).expand(N, -1)


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("out.0 .Hidden. computes a token from other tokens", {"change": hide_attention}),
        ("more is an attention .Attention. that the adapter does not declare", {"change": add_attention}),
        (
            "attn has a OwnProcessor, which computes attention by itself",
            {"change": partial(swap, OwnProcessor())},
        ),
        ("attn computed an attention that weft did not see", {"change": partial(swap, SlyProcessor())}),
        (
            "attn has a mask that differs by query .* of some tokens only",
            {"attn_mask": torch.ones(5, 5).tril()},
        ),
        ("attn has a mask of 5 keys; there are 7", {"attn_mask": torch.ones(5, 5).bool()}),
        ("attn calls attention with is_causal=True", {"is_causal": True}),
        ("attn calls attention with dropout_p=0.5", {"dropout_p": 0.5}),
    ],
)
def test_refuses_what_it_cannot_split(words: str, how: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=words):
        run_toy(**how)


@pytest.mark.parametrize("mask", [LATER, torch.ones(1, 1, 1, N), SAME, normal(2, 1, N, N, seed=3)])
def test_masks_of_all_queries_and_keys_are_exact(mask: Tensor) -> None:
    """Causal, added to scores, without some tokens of the video: keys are gathered."""

    def job(world: Any) -> Tensor:
        model = seeded(Toy())
        if world is not None:
            sharded(model, world, TOY)
        return model(normal(2, N, 4), attn_mask=mask)

    for found in on_ranks(3, job):
        torch.testing.assert_close(found, job(None), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rounded", [torch.float64, torch.bfloat16])
def test_padding_may_be_said_by_adding_to_scores(rounded: torch.dtype) -> None:
    """As models do; what was -10000 in bfloat16 is -9984."""
    joint = Shard("joint", 1)
    adapter = replace(TOY, inputs={"": {"x": joint}}, gather={"out": joint}, attention={"attn": "joint"})
    mask = torch.where(torch.arange(N) < 5, 0.0, -10000.0)[None, None, None]

    def job(world: Any) -> Tensor:
        model = seeded(Toy())
        if world is not None:
            sharded(model, world, adapter)
        return model(normal(2, N, 4), attn_mask=mask.type(rounded).double())[:, :5]

    for found in on_ranks(2, job):
        torch.testing.assert_close(found, job(None), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("words", "changed", "how"),
    [
        ("has no module 'attention'", {"attention": {"attention": "video"}}, {}),
        ("has no module 'outs'", {"gather": {"outs": Shard("video", 1)}}, {}),
        ("places of the model has 4 tokens of video, of which there were 7",
         {"inputs": {"": {"x": Shard("video", 1), "places": Shard("video", 1)}}}, {"places": normal(N, 4)}),
        ("x of the model is a Tensor, where its adapter expects a tuple",
         {"inputs": {"": {"x": (Shard("video", 1),)}}}, {}),
        ("is to be gathered, but no text was split", {"gather": {"out": Shard("text", 1)}}, {}),
        ("attn attends from . to . tokens; this rank has . of video",
         {"inputs": {**TOY.inputs, "attn": {"x": Shard("again", 1)}}}, {}),
    ],
)  # fmt: skip
def test_refuses_adapters_that_do_not_fit(words: str, changed: dict[str, Any], how: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=words):
        run_toy(adapter=replace(TOY, **changed), **how)


def test_an_unknown_model_is_told_of_adapters() -> None:
    with pytest.raises(InputError, match="no adapter for a Toy.*weft.Adapter"):
        adapter_of(Toy())


class Timed(nn.Module):
    """A stage with an argument that has a row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.stage(x, time[:, None, None].expand(*x.shape))


def test_an_argument_by_sample_is_refused_where_samples_are_sharded() -> None:
    def job(world: Any) -> None:
        model = seeded(Timed())
        weft.stages(model, {"stage": "time space"}, dims=DIMS, shard="batch time space", mesh=world)
        model(normal(4, 3, 5, 4), normal(4, 4))

    with pytest.raises(
        InputError, match=r"Stage stage got a second tensor of shape \[4, 3, 5, 4\], .* batch"
    ):
        on_ranks(2, job)


def on_a_mesh_without_names() -> list[str]:
    mesh, found = init_device_mesh("cpu", (2, 1)), list[str]()
    for call in (
        lambda: weft.parallelize(Toy(), adapter=TOY, mesh=mesh),
        lambda: weft.stages(Toy(), {"attn": "tokens"}, dims="batch tokens width", mesh=mesh),
        lambda: weft.attention(*(normal(1, 2, 3, 4) for _ in range(3)), mesh=mesh),
    ):
        with pytest.raises(InputError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_a_mesh_of_two_dims_needs_names(worlds: Callable[[int], Pool]) -> None:
    for messages in worlds(2).run(on_a_mesh_without_names):
        assert all("A DeviceMesh of 2 × 1 ranks has no names for its dims" in message for message in messages)
