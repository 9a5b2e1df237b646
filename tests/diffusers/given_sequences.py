"""Inputs of the transformers in `zoo_sequences`."""

from __future__ import annotations

from typing import Any

import torch

from tests.diffusers import given
from tests.diffusers.given import CHANNELS, POOLED, WORDS, Size, without


def chroma(size: Size) -> dict[str, Any]:
    """Its mask of numbers adds to scores."""
    mask = torch.cat([size.padding(), torch.ones(size.batch, size.tokens, dtype=size.dtype)], 1)
    return {**without("guidance pooled_projections", given.flux(size)), "attention_mask": mask}


def fibo(size: Size) -> dict[str, Any]:
    layers = [size.normal(size.batch, size.text, 8, seed=seed) for seed in (5, 6)]
    return {**without("guidance pooled_projections", given.flux(size)), "text_encoder_layers": layers}


def glm(size: Size) -> dict[str, Any]:
    inputs = given.cogview(size)
    random = torch.Generator().manual_seed(4)
    return {
        **without("original_size", inputs),
        "prior_token_id": torch.randint(16, (size.batch, size.tokens), generator=random),
        "prior_token_drop": torch.zeros(size.batch, size.tokens, dtype=torch.bool),
    }


def krea(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.tokens_of(),
        "encoder_hidden_states": size.normal(size.batch, size.text, 2, WORDS, seed=2),
        "timestep": size.time(1.0),
        "position_ids": torch.cat([torch.zeros(size.text, 3, dtype=size.dtype), size.ids()]),
        "encoder_attention_mask": size.padding().bool(),
    }


def flux3(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.tokens_of(),
        "encoder_hidden_states": size.words(),
        "timestep": size.time(1.0),
        "img_ids": size.ids(4).roll(-1, 1),
        "txt_ids": torch.arange(size.text, dtype=size.dtype)[:, None].expand(-1, 4),
    }


def flux3_edit(size: Size) -> dict[str, Any]:
    return {
        **flux3(size),
        "image_cond_hidden_states": size.normal(size.batch, 11, CHANNELS, seed=4),
        "image_cond_ids": torch.arange(11, dtype=size.dtype)[:, None].expand(-1, 4),
    }


def ernie(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.latents().flatten(2, 3),
        "timestep": size.time(),
        "text_bth": size.words(),
        "text_lens": size.padding().sum(1).long(),
    }


def ideogram(size: Size) -> dict[str, Any]:
    """Two samples in one sequence, each of text and an image."""
    text, tokens = size.text, size.tokens
    roles = torch.tensor([3] * text + [2] * tokens)
    rows = torch.arange(len(roles))
    return {
        "hidden_states": size.normal(size.batch, len(roles), CHANNELS),
        "timestep": size.time(1.0),
        "encoder_hidden_states": size.normal(size.batch, len(roles), WORDS, seed=2),
        "position_ids": rows[None, :, None].expand(size.batch, -1, 3),
        "segment_ids": (rows > len(roles) // 3).long().expand(size.batch, -1),
        "indicator": roles.expand(size.batch, -1),
    }


def omnigen(size: Size) -> dict[str, Any]:
    """Text is causal, the image is not."""
    text, total = size.text, size.text + 1 + size.tokens
    mask = torch.ones(total, total, dtype=size.dtype).tril()
    mask[text + 1 :] = 1
    return {
        "hidden_states": size.latents().flatten(2, 3),
        "timestep": size.time(1.0),
        "input_ids": torch.arange(text).expand(size.batch, -1) % 8,
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": mask.expand(size.batch, -1, -1),
        "position_ids": torch.arange(total).expand(size.batch, -1),
    }


def helios(size: Size) -> dict[str, Any]:
    frames, rows, columns = size.grid
    history = {
        name: size.normal(size.batch, CHANNELS, count, 2 * rows, 2 * columns, seed=seed)
        for seed, (name, count) in enumerate({"short": 2, "mid": 2, "long": 4}.items(), 4)
    }
    indices = torch.arange(8).expand(size.batch, -1)
    return {
        **given.wan(size),
        "indices_hidden_states": torch.arange(8, 8 + frames).expand(size.batch, -1),
        **{f"latents_history_{name}": each for name, each in history.items()},
        **{f"indices_latents_history_{name}": indices[:, : each.shape[2]] for name, each in history.items()},
    }


def framepack(size: Size) -> dict[str, Any]:
    frames, rows, columns = size.grid

    def latents(count: int, seed: int) -> torch.Tensor:
        return size.normal(size.batch, CHANNELS, count, 2 * rows, 2 * columns, seed=seed)

    return {
        **given.hunyuan(size),
        "image_embeds": size.normal(size.batch, 2, 5, seed=5),
        "indices_latents": torch.arange(8, 8 + frames),
        "latents_clean": latents(2, 6),
        "indices_latents_clean": torch.arange(2),
        "latents_history_2x": latents(2, 7),
        "indices_latents_history_2x": torch.arange(2),
        "latents_history_4x": latents(4, 8),
        "indices_latents_history_4x": torch.arange(4),
    }


def h3(size: Size) -> dict[str, Any]:
    """Text, audio, video."""
    audio, tokens = 5, size.tokens
    kinds = torch.tensor([1] * size.text + [2] * audio + [0] * tokens)
    ids = torch.cat([torch.zeros(size.text + audio, 3, dtype=size.dtype), size.ids()])
    return {
        "hidden_states": size.tokens_of(CHANNELS * 4),
        "audio_hidden_states": size.normal(size.batch, audio, 6, seed=4),
        "encoder_hidden_states": size.words(),
        "timestep": torch.tensor([0.3, 0.7], dtype=size.dtype),
        "timestep_indices": (kinds != 1).long(),
        "token_tags": kinds,
        "position_ids": ids,
        "text_indices": (kinds == 1).nonzero()[:, 0],
        "audio_indices": (kinds == 2).nonzero()[:, 0],
        "video_indices": (kinds == 0).nonzero()[:, 0],
    }


def music(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.tokens_of().transpose(1, 2).contiguous(),
        "timestep": size.time(1.0),
        "encoder_hidden_states": size.normal(size.batch, size.tokens, WORDS, seed=2),
    }


def stable_audio(size: Size) -> dict[str, Any]:
    angles = size.normal(size.tokens + 1, 8, seed=5)
    return {
        "hidden_states": size.tokens_of().transpose(1, 2).contiguous(),
        "timestep": size.time(1.0),
        "encoder_hidden_states": size.words(),
        "global_hidden_states": size.normal(size.batch, 1, POOLED, seed=3),
        "rotary_embedding": (angles.cos(), angles.sin()),
    }


def ace(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.tokens_of(),
        "timestep": size.time(1.0),
        "timestep_r": size.time(0.5),
        "encoder_hidden_states": size.words(),
        "context_latents": size.normal(size.batch, size.tokens, 2 * CHANNELS, seed=4),
    }


def kandinsky5(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.latents().permute(0, 2, 3, 4, 1).contiguous(),
        "encoder_hidden_states": size.words(),
        "timestep": size.time(),
        "pooled_projections": size.pooled(),
        "visual_rope_pos": tuple(torch.arange(count) for count in size.grid),
        "text_rope_pos": torch.arange(size.text),
    }


def kandinsky6(size: Size, *, audio: bool = True) -> dict[str, Any]:
    return {
        **without("visual_rope_pos text_rope_pos", kandinsky5(size)),
        "audio_hidden_states": size.normal(size.batch, 11, 6, seed=4) if audio else None,
        "encoder_attention_mask": size.padding().bool(),
    }


def ltx2(size: Size, *, per_token: bool = False) -> dict[str, Any]:
    audio = 11
    times = torch.linspace(0.2, 0.8, audio, dtype=size.dtype).expand(size.batch, -1) * 1000
    return {
        **without("rope_interpolation_scale", given.ltx(size, per_token=per_token)),
        "audio_hidden_states": size.normal(size.batch, audio, CHANNELS, seed=4),
        "audio_encoder_hidden_states": size.normal(size.batch, size.text, WORDS, seed=5),
        "audio_encoder_attention_mask": size.padding(),
        "audio_timestep": times if per_token else size.time(),
        "sigma": size.time(),
        "audio_num_frames": audio,
    }


def dit(size: Size) -> dict[str, Any]:
    """Its images are square."""
    side = 2 * max(2, int(size.tokens**0.5))
    return {
        "hidden_states": size.normal(size.batch, CHANNELS, side, side),
        "timestep": size.time(),
        "class_labels": torch.arange(size.batch),
    }


def hunyuan_dit(size: Size) -> dict[str, Any]:
    angles = size.normal(size.tokens, 12, seed=5)
    return {
        "hidden_states": size.latents().flatten(2, 3),
        "timestep": size.time(),
        "encoder_hidden_states": size.normal(size.batch, 7, WORDS, seed=2),
        "text_embedding_mask": torch.ones(size.batch, 7, dtype=torch.long),
        "encoder_hidden_states_t5": size.normal(size.batch, 5, WORDS, seed=3),
        "text_embedding_mask_t5": torch.ones(size.batch, 5, dtype=torch.long),
        "image_meta_size": torch.ones(size.batch, 6, dtype=size.dtype),
        "style": torch.zeros(size.batch, dtype=torch.long),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def lumina_next(size: Size) -> dict[str, Any]:
    angles = size.normal(24, 24, 6, seed=5)
    return {
        "hidden_states": size.latents().flatten(2, 3),
        "timestep": size.time(1.0),
        "encoder_hidden_states": size.words(),
        "encoder_mask": size.padding(),
        "image_rotary_emb": torch.polar(torch.ones_like(angles), angles),
        "cross_attention_kwargs": {},
    }


def hidream(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.latents().flatten(2, 3),
        "timesteps": size.time(),
        "encoder_hidden_states_t5": size.words(),
        "encoder_hidden_states_llama3": [size.normal(size.batch, 5, WORDS, seed=seed) for seed in (5, 6)],
        "pooled_embeds": size.pooled(),
    }
