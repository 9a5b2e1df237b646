"""Diffusers' Latte with threads as ranks, against the same model in one process, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.diffusers.toys import check, normal, on_ranks, seeded
from weft.core.errors import InputError
from weft.diffusers import latte
from weft.run.world import World

diffusers = pytest.importorskip("diffusers")

WORDS, TEXT, SIDE, LAYERS = 3, 5, 6, 2  # a text of 3 words, frames of 3 × 3 patches


def model(frames: int) -> Any:
    made = diffusers.LatteTransformer3DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=2, out_channels=4, num_layers=LAYERS,
        cross_attention_dim=8, attention_bias=True, sample_size=SIDE, patch_size=2, norm_eps=1e-6,
        activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_single",
        norm_elementwise_affine=False, caption_channels=TEXT, video_length=frames,
    )  # fmt: skip
    return seeded(made)


def video(batch: int, frames: int, side: int = SIDE) -> dict[str, Tensor]:
    return {
        "hidden_states": normal(batch, 2, frames, side, side),
        "timestep": torch.arange(1, 1 + batch) * 300,
        "encoder_hidden_states": normal(batch, WORDS, TEXT, seed=2),
    }


def step(made: Any, given: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of a loss that every rank computes alike."""
    out = made(**given).sample
    loss = (out * normal(*out.shape, seed=7)).sum()
    return out.detach(), list(torch.autograd.grad(loss, list(made.parameters())))


@pytest.mark.parametrize("frames", [1, 3, 5])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_outputs_and_gradients_are_those_of_one_process(ranks: int, frames: int) -> None:
    def job(world: World | None) -> tuple[Tensor, list[Tensor]]:
        made = model(frames)
        if world is not None:
            latte.shard(made, world)
        return step(made, video(2, frames))

    check(job(None), on_ranks(ranks, job), 1e-10)


def test_checkpointed_blocks_are_the_same_in_training() -> None:
    def job(world: World | None) -> tuple[Tensor, list[Tensor]]:
        made = model(5).train()
        made.enable_gradient_checkpointing()
        if world is not None:
            latte.shard(made, world)
        return step(made, video(1, 5))

    check(job(None), on_ranks(3, job), 1e-10)


@pytest.mark.parametrize("frames", [(5, 5), (5, 1), (1, 5)])
def test_two_sizes_before_one_backward_are_recomputed_each_with_its_own(frames: tuple[int, int]) -> None:
    def job(world: World | None) -> tuple[Tensor, list[Tensor]]:
        made = model(5).train()
        made.enable_gradient_checkpointing()
        if world is not None:
            latte.shard(made, world)
        outs = [made(**video(batch, each)).sample for batch, each in zip((1, 2), frames, strict=True)]
        loss = torch.stack([(out * normal(*out.shape, seed=7)).sum() for out in outs]).sum()
        return outs[0].detach(), list(torch.autograd.grad(loss, list(made.parameters())))

    check(job(None), on_ranks(3, job), 1e-10)


def test_videos_and_images_may_follow_each_other_until_it_is_removed() -> None:
    def job(world: World | None) -> list[Tensor]:
        made = model(5)
        sharded = None if world is None else latte.shard(made, world)
        outs = [made(**video(batch, frames)).sample.detach() for batch, frames in [(1, 5), (2, 1), (2, 5)]]
        if sharded is not None:
            sent = world.comm.bytes_sent
            sharded.remove()
            outs.append(made(**video(2, 5)).sample.detach())
            assert world.comm.bytes_sent == sent
        return outs

    expected = job(None)
    for outs in on_ranks(2, job):
        for found, wanted in zip(outs, [*expected, expected[-1]], strict=True):
            assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()


def test_bytes_are_those_of_two_switches_a_layer_and_a_gather() -> None:
    ranks, B, T = 3, 2, 6
    M = B * T * (SIDE // 2) ** 2 * 8 * 8

    def job(world: World) -> int:
        made = model(T)
        latte.shard(made, world)
        with torch.no_grad():
            made(**video(B, T))
        return world.comm.bytes_sent

    one = M * (ranks - 1) // ranks**2
    assert set(on_ranks(ranks, job)) == {(2 * LAYERS - 1) * one + M * (ranks - 1) // ranks}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"encoder_attention_mask": torch.ones(5, 1, WORDS)}, "takes no encoder_attention_mask"),
        (
            {"enable_temporal_attentions": False},
            "transformer_blocks.1 ran where the declaration expects temporal",
        ),
        (video(1, 5, side=2), "1 patches cannot be sharded over 2 ranks"),
    ],
)
def test_what_it_cannot_do_raises(given: dict[str, Any], said: str) -> None:
    def job(world: World) -> None:
        made = model(5)
        latte.shard(made, world)
        made(**{**video(1, 5), **given})

    with pytest.raises(InputError, match=said):
        on_ranks(2, job, timeout=5.0)


def test_a_copy_has_its_own_weights() -> None:
    def job(world: World | None) -> tuple[Tensor, list[Tensor]]:
        made = model(3) if world is None else weft.parallelize(model(3), mesh=world)
        made(**video(2, 3))
        copied = copy.deepcopy(made)
        made.requires_grad_(False).zero_grad()
        return step(copied, video(2, 3))

    check(job(None), on_ranks(2, job), 1e-10)
