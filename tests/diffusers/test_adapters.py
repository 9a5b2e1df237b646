"""Every adapter, on the real Diffusers class: any ranks give what one process gives, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

diffusers: Any = pytest.importorskip("diffusers")

import weft  # noqa: E402
from tests.diffusers.toys import check, normal, on_ranks, seeded  # noqa: E402
from tests.diffusers.zoo import ZOO  # noqa: E402
from weft.core.errors import InputError  # noqa: E402
from weft.core.layout import Layout  # noqa: E402
from weft.diffusers import attention_hook  # noqa: E402
from weft.diffusers.adapters import ADAPTERS, adapter_of  # noqa: E402
from weft.diffusers.refused import REFUSED  # noqa: E402
from weft.diffusers.region import ShardedRegion  # noqa: E402
from weft.sparse.mask_cache import sparse_attention  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:CPU Autocast", "ignore:In CPU autocast", "ignore:.FluxPosEmbed. is deprecated"
)

FEW: dict[str, Any] = {"batch": 1, "text": 3, "grid": (1, 1, 13)}
"""One sample, a prime number of tokens, and less text than some have ranks."""
CASES = {
    "2 ranks": (2, {}, "auto", True),
    "3 ranks": (3, {}, "ring", False),
    "4 ranks, few tokens": (4, FEW, "ulysses", True),
}
"""Ranks, sizes, plan, and whether blocks are computed again for their gradients."""
USUAL = ("wan", "hunyuan", "cogvideox", "flux", "sd3", "ltx", "mochi", "allegro", "qwen")
PROOFS = [
    pytest.param(name, case, marks=[] if name.startswith(USUAL) or case == "3 ranks" else [pytest.mark.soak])
    for name in ZOO
    for case in CASES
]
FIVE = ["wan", "hunyuan", "cogvideox", "flux", "sd3-dual", "ltx", "mochi", "allegro", "qwen-padded", "zimage"]
SCORED = {
    "chroma",
    "ideogram4",
    "omnigen",
    "ace-step",
    "qwen21",
    "wan-animate2",
    "skyreels-causal",
    "joyimage-plus",
}
"""Models with masks of their own, for which keys are gathered."""
NEVER_AGAIN = {"hunyuan-image", "hunyuan-dit", "wan-animate2", "chroma", "dit", "hidream"}
"""Diffusers cannot checkpoint their blocks, or computes something else in training."""


@pytest.fixture(autouse=True, scope="module")
def everything_in_float64() -> Iterator[None]:
    """Models go through float32 in places, which would hide a wrong token among rounding errors."""
    to, wide = Tensor.to, {torch.float32: torch.float64, torch.bfloat16: torch.float64}
    meshgrid = torch.meshgrid

    def widened(*axes: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        axes = tuple(axes[0]) if isinstance(axes[0], list | tuple) else axes
        return meshgrid(*(axis.double() if axis.is_floating_point() else axis for axis in axes), **kwargs)

    def exact(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(wide.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
        return to(
            x, *args, **{name: wide.get(arg, arg) if name == "dtype" else arg for name, arg in kwargs.items()}
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(Tensor, "to", exact)
        patch.setattr(torch, "meshgrid", widened)
        yield


def step(model: Any, given: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of all parameters; of those that nothing depends on, 0."""
    out = torch.cat([each.flatten() for each in tree_leaves(model(**given)) if each is not None])
    loss = (out * normal(*out.shape, seed=7)).sum()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return out.detach(), list(grads)


def sharded(model: Any, world: Any, plan: str = "ring") -> None:
    region = ShardedRegion(model, adapter_of(model), plan=plan)
    model.forward = lambda *args, **kwargs: region.run(world, args, kwargs)


@cache
def alone(name: str, **sizes: Any) -> tuple[Tensor, list[Tensor]]:
    return step(ZOO[name].make(), ZOO[name].inputs(**sizes))


def prove(name: str, ranks: int, sizes: dict[str, Any], plan: str, again: bool) -> None:  # noqa: FBT001
    def job(world: Any) -> Any:
        model: Any = ZOO[name].make()
        if again:
            model.enable_gradient_checkpointing()
            model.train()
        sharded(model, world, plan=plan)
        return step(model, ZOO[name].inputs(**sizes))

    check(alone(name, **sizes), on_ranks(ranks, job), 1e-11)


@pytest.mark.parametrize(("name", "case"), PROOFS)
def test_any_ranks_give_what_one_process_gives(name: str, case: str) -> None:
    ranks, sizes, plan, again = CASES[case]
    prove(name, ranks, sizes, plan, again and name not in NEVER_AGAIN)


@pytest.mark.parametrize("name", FIVE)
def test_more_ranks_than_heads_and_text(name: str) -> None:
    prove(name, 5, FEW, "gather", again=False)


@pytest.mark.parametrize("name", ["wan", "mochi", "flux"])
def test_one_rank_alone(name: str) -> None:
    prove(name, 1, {}, "auto", again=True)


@pytest.mark.parametrize("name", ["wan", "hunyuan", "mochi", "flux", "zimage"])
def test_more_ranks_than_tokens(name: str) -> None:
    """What cannot be split stays whole."""
    prove(name, 6, {"batch": 2, "text": 2, "grid": (1, 1, 5)}, "gather", again=False)


def test_every_transformer_of_diffusers_works_or_is_refused_by_name() -> None:
    exported = {
        name
        for module in (diffusers, diffusers.models, diffusers.models.transformers)
        for name in dir(module)
        if isinstance(kind := getattr(module, name, None), type)
        and issubclass(kind, torch.nn.Module)
        and kind.__module__.startswith("diffusers.models.transformers.")
    }
    assert len(exported) >= 70
    assert exported - {*REFUSED} == {*ADAPTERS} - {"VideoDiT"}
    assert not exported & {*REFUSED} & {*ADAPTERS}
    model = type("TransformerTemporalModel", (torch.nn.Module,), {})()
    with pytest.raises(InputError, match="a TransformerTemporalModel, which is a part of a UNet"):
        adapter_of(model)


def test_every_adapter_is_proven() -> None:
    elsewhere = {"LatteTransformer3DModel", "VideoDiT"}  # test_latte, test_dit
    assert {entry.model for entry in ZOO.values()} | elsewhere == set(ADAPTERS)


@pytest.mark.parametrize("name", ZOO)
def test_grid_has_a_cell_for_every_token(name: str) -> None:
    model, given = ZOO[name].make(), ZOO[name].inputs(grid=(2, 3, 5))
    grid = adapter_of(model).grid
    if grid is None or name in ("dit", "wan-animate", "skyreels-causal"):  # sizes of their own
        return
    if name == "qwen-edit":
        with pytest.raises(InputError, match="90 tokens of images of different sizes"):
            grid(model, given)
        assert grid(model, {"img_shapes": [[(1, 4, 5), (1, 4, 5)]]}) == (2, 4, 5)
        assert grid(model, {"img_shapes": [(1, 4, 5)] * 2}) == (1, 4, 5)  # with a ControlNet
    else:
        assert grid(model, given) in ((2, 3, 5), (1, 6, 5)), "images have no frames"


def test_images_in_one_sequence_are_frames_if_they_are_equally_large() -> None:
    model, ids = ZOO["flux"].make(), ZOO["flux"].inputs(grid=(1, 3, 5))["img_ids"]
    grid: Any = adapter_of(model).grid
    assert grid(model, {"img_ids": torch.cat([ids, ids])}) == (2, 3, 5)
    taller = ZOO["flux"].inputs(grid=(1, 6, 5))["img_ids"]
    with pytest.raises(InputError, match="60 tokens of images of different sizes"):
        grid(model, {"img_ids": torch.cat([ids, taller, ids])})


def queries(name: str, ranks: int, patch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of each attention in turn, those of all ranks in the order of the whole sequence."""
    seen: list[list[tuple[Layout, Tensor]]] = [[] for _ in range(ranks)]

    def spy(q: Tensor, k: Tensor, v: Tensor, *, tokens: Any, mesh: Any, **how: Any) -> Tensor:
        layout = tokens if isinstance(tokens, Layout) else Layout(*tokens)
        seen[mesh.comm.rank].append((layout, q))
        return weft.attention(q, k, v, tokens=tokens, mesh=mesh, **how)

    @torch.no_grad()
    def job(world: Any) -> None:
        sharded(model := ZOO[name].make(), world)
        model(**ZOO[name].inputs(batch=1))

    patch.setattr(attention_hook, "attention", spy)
    on_ranks(ranks, job)
    whole = [q.new_empty(*q.shape[:2], layout.size, q.shape[3]) for layout, q in seen[0]]
    for rank, calls in enumerate(seen):
        for x, (layout, q) in zip(whole, calls, strict=True):
            x[:, :, torch.from_numpy(layout.order(rank))] = q
    return whole


@pytest.mark.parametrize("name", ZOO)
def test_tokens_are_in_the_order_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense attention is right in any order; masks are not."""
    alone = queries(name, 1, monkeypatch)
    assert len(alone) >= 2 or name in SCORED
    for found, x in zip(queries(name, 2, monkeypatch), alone, strict=True):
        torch.testing.assert_close(found, x, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("flux", "controlnet_block_samples controlnet_single_block_samples"),
        ("sd3", "block_controlnet_hidden_states"),
        ("qwen", "controlnet_block_samples"),
    ],
)
def test_what_a_controlnet_adds(name: str, arguments: str) -> None:
    given = ZOO[name].inputs() | {each: [normal(2, 45, 36, seed=9)] for each in arguments.split()}

    def job(world: Any) -> Any:
        model = ZOO[name].make()
        if world is not None:
            sharded(model, world)
        return step(model, given)

    expected = job(None)
    assert (expected[0] - alone(name)[0]).abs().max() > 0.1
    check(expected, on_ranks(2, job), 1e-11)


@pytest.mark.parametrize("name", ["cosmos", "zimage"])
def test_what_a_controlnet_adds_inside_of_blocks(name: str) -> None:
    """To Cosmos by block; to Z-Image by the number of a layer, to text and image in one tensor."""
    inputs = ZOO[name].inputs(batch=1)
    entry = ZOO[name]
    if name == "cosmos":
        entry = replace(entry, config={**entry.config, "controlnet_block_every_n": 2})
        inputs["block_controlnet_hidden_states"] = [normal(1, 45, 36, seed=9)]
    else:  # which pads image and text each to a multiple of 32
        inputs["controlnet_block_samples"] = {0: normal(1, 96, 36, seed=9)}

    def job(world: Any) -> Any:
        model = entry.make()
        if world is not None:
            sharded(model, world)
        return step(model, inputs)

    check(job(None), on_ranks(2, job), 1e-11)


def test_an_ip_adapter_attends_to_images_beside_the_attention_of_its_module() -> None:
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    def job(world: Any) -> Any:
        model: Any = ZOO["flux"].make()
        for block in model.transformer_blocks:
            processor = FluxIPAdapterAttnProcessor(36, 6, num_tokens=(4, 3), scale=[0.7, 0.4])
            block.attn.set_processor(seeded(processor))
        if world is not None:
            sharded(model, world)
        images = [normal(2, count, 6, seed=count) for count in (4, 3)]
        return step(model, {**ZOO["flux"].inputs(), "joint_attention_kwargs": {"ip_hidden_states": images}})

    expected = job(None)
    assert (expected[0] - alone("flux")[0]).abs().max() > 0.01
    check(expected, on_ranks(3, job), 1e-11)


def test_learned_positions_of_cosmos(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x, dtype, **how: norm(x, **how))  # noqa: ARG005
    entry = replace(ZOO["cosmos"], config={**ZOO["cosmos"].config, "extra_pos_embed_type": "learnable"})

    def job(world: Any) -> Any:
        model = entry.make()
        if world is not None:
            sharded(model, world)
        return step(model, entry.inputs())

    check(job(None), on_ranks(3, job), 1e-11)


@pytest.mark.parametrize("name", ["minimax-h3", "ltx2", "krea2", "kandinsky5", "flux3-edit"])
def test_sparse_attention_beside_other_streams(name: str) -> None:
    """Text, audio and references are attended to by all; ranks give what one with the same mask gives."""

    @torch.no_grad()
    def job(world: Any) -> Tensor:
        model: Any = ZOO[name].make()
        sparsity = sparse_attention("topk:0.5,block=4,dense_steps=0,dense_layers=0")
        region = ShardedRegion(model, adapter_of(model), plan="auto", sparsity=sparsity)
        outputs = tree_leaves(region.run(world, (), ZOO[name].inputs(batch=1)))
        return torch.cat([each.flatten() for each in outputs])

    (expected,) = on_ranks(1, job)
    for out in on_ranks(3, job):
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    assert (expected - alone(name, batch=1)[0]).abs().max() > 1e-5


def test_masks_with_holes() -> None:
    """Qwen-Image takes any mask of its text; each rank may have another number of tokens left."""
    mask = torch.tensor([[1, 0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1, 1]]).bool()

    def job(world: Any) -> Any:
        model = ZOO["qwen"].make()
        if world is not None:
            sharded(model, world)
        return step(model, {**ZOO["qwen"].inputs(), "encoder_hidden_states_mask": mask})

    check(job(None), on_ranks(3, job), 1e-11)


def test_gradients_of_several_forwards_of_other_sizes() -> None:
    """Blocks that are computed again see the streams of their own forward."""
    sizes: tuple[dict[str, Any], ...] = ({}, {"text": 5, "grid": (2, 3, 5)})

    def job(world: Any) -> Any:
        model: Any = ZOO["hunyuan"].make()
        model.enable_gradient_checkpointing()
        model.train()
        if world is not None:
            sharded(model, world)
        outs = [model(**ZOO["hunyuan"].inputs(**size))[0] for size in sizes]
        loss = torch.stack([(out * normal(*out.shape, seed=7)).sum() for out in outs]).sum()
        return outs[0].detach(), list(torch.autograd.grad(loss, list(model.parameters())))

    check(job(None), on_ranks(2, job), 1e-11)


def test_mochi_refuses_text_that_is_padded_before_its_end() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]]).bool()

    def job(world: Any) -> Any:
        sharded(model := ZOO["mochi"].make(), world)
        return model(**{**ZOO["mochi"].inputs(batch=1), "encoder_attention_mask": mask})

    with pytest.raises(InputError, match="attn1.*Pad texts at their ends"):
        on_ranks(2, job)
