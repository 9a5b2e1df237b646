"""More inputs of the transformers in `zoo_sequences`: packed, with faces or with a time for each frame."""

from __future__ import annotations

from typing import Any

import torch

from tests.diffusers import given
from tests.diffusers.given import CHANNELS, WORDS, Size


def cosmos3(size: Size) -> dict[str, Any]:
    """One sample: words, which see those before them, and a video, which sees all."""
    total, frames = size.text + size.tokens, size.grid[0]
    video = torch.arange(size.text, total)
    return {
        "input_ids": torch.arange(size.text) % 16,
        "text_indexes": torch.arange(size.text),
        "position_ids": torch.arange(total).expand(3, -1),
        "und_len": size.text,
        "sequence_length": total,
        "vision_tokens": [size.latents()[:1]],
        "vision_token_shapes": [size.grid],
        "vision_sequence_indexes": video,
        "vision_mse_loss_indexes": video,
        "vision_timesteps": torch.full((size.tokens,), 0.4, dtype=size.dtype),
        "vision_noisy_frame_indexes": [torch.arange(frames)],
    }


def animate2(size: Size) -> dict[str, Any]:
    """The pass that stores keys and values of a reference."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": list(size.latents()),
        "condition_latents": list(size.latents() / 2),
        "timestep": size.time(),
        "encoder_hidden_states": list(size.words()[:, :5]),
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": size.tokens,
        "offset_grid_sizes": torch.tensor([size.grid] * size.batch),
    }


def qwen21(size: Size) -> dict[str, Any]:
    """Text, an image of 2 × 4 tokens to go by, text, and the image that is made."""
    rows, columns = size.grid[0] * size.grid[1], size.grid[2]
    shapes = [(1, 2, 4), (1, 2 * rows, 2 * columns)]
    slots = torch.tensor([False] * size.text + [True] * 2 + [False] * 2 + [True] * rows * columns)
    words = size.text + 4
    return {
        "hidden_states": size.normal(size.batch, 8 + 4 * rows * columns, CHANNELS),
        "encoder_hidden_states": size.normal(size.batch, words, WORDS, seed=2),
        "timestep": size.time(1.0),
        "img_shapes": [shapes] * size.batch,
        "img_mask": slots.expand(size.batch, -1),
        "encoder_hidden_states_mask": torch.cat([torch.ones(size.batch, 4), size.padding()], 1).bool(),
    }


def anyflow(size: Size) -> dict[str, Any]:
    """Each frame has its own time."""
    times = torch.linspace(0.1, 0.9, size.batch * size.grid[0], dtype=size.dtype).view(size.batch, -1)
    return {
        **given.wan(size),
        "hidden_states": size.latents().transpose(1, 2).contiguous(),
        "timestep": times * 1000,
        "r_timestep": times * 500,
    }


def animate(size: Size) -> dict[str, Any]:
    """A pose and a face in all frames but the first."""
    frames, rows, columns = size.grid
    return {
        **given.wan_image(size),
        "hidden_states": size.normal(size.batch, 12, frames + 1, 2 * rows, 2 * columns),
        "pose_hidden_states": size.normal(size.batch, CHANNELS, frames, 2 * rows, 2 * columns, seed=5),
        "face_pixel_values": size.normal(size.batch, 3, 4 * frames, 16, 16, seed=6),
    }


def prx(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.latents().flatten(2, 3),
        "timestep": size.time(1.0),
        "encoder_hidden_states": size.words(),
    }


def stable_audio3(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.tokens_of().transpose(1, 2).contiguous(),
        "timestep": size.time(1.0),
        "encoder_hidden_states": size.words(),
        "global_hidden_states": size.pooled(),
    }


def longcat_audio(size: Size) -> dict[str, Any]:
    """Samples of other lengths."""
    lengths = size.tokens - torch.arange(size.batch).flip(0)
    return {
        "hidden_states": size.tokens_of(),
        "encoder_hidden_states": size.words(),
        "encoder_attention_mask": size.padding().bool(),
        "timestep": size.time(1.0),
        "attention_mask": torch.arange(size.tokens) < lengths[:, None],
        "latent_cond": size.tokens_of() / 2,
    }


def joyimage_plus(size: Size) -> dict[str, Any]:
    """Patches of two images in one sequence, padded by one."""
    frames, rows, columns = size.grid
    shapes = [(frames, rows, columns), (1, 2, 2)]
    return {
        "hidden_states": size.normal(size.batch, size.tokens + 5, CHANNELS, 1, 2, 2),
        "timestep": size.time(),
        "encoder_hidden_states": size.words(),
        "encoder_hidden_states_mask": size.padding(),
        "shape_list": [shapes] * size.batch,
    }


def forced(size: Size) -> dict[str, Any]:
    """Diffusion forcing: each frame has its own time."""
    times = torch.linspace(0.1, 0.9, size.batch * size.grid[0], dtype=size.dtype).view(size.batch, -1)
    return {**given.wan(size), "timestep": times * 1000, "enable_diffusion_forcing": True}
