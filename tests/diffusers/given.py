"""Inputs of Diffusers' transformers, as many samples and tokens as asked for; `zoo` has the models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.diffusers.toys import normal

Grid = tuple[int, int, int]
CHANNELS, WORDS, POOLED = 4, 8, 8
"""Of latents, texts, pooled texts."""
FIXED = 7
"""Tokens of text for models that take no other number."""


@dataclass(frozen=True)
class Size:
    """What is asked for: of samples, text tokens, and video tokens (frames, rows, columns)."""

    batch: int
    text: int
    grid: Grid
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    def normal(self, *shape: int, seed: int = 1) -> Tensor:
        return normal(*shape, seed=seed, dtype=self.dtype)

    def latents(self, channels: int = CHANNELS, patch: Grid = (1, 2, 2)) -> Tensor:
        """[B, C, T, H, W], of which each patch is a token."""
        return self.normal(self.batch, channels, *(n * p for n, p in zip(self.grid, patch, strict=True)))

    def tokens_of(self, channels: int = CHANNELS) -> Tensor:
        return self.normal(self.batch, self.tokens, channels)

    def words(self, width: int = WORDS) -> Tensor:
        return self.normal(self.batch, self.text, width, seed=2)

    def pooled(self) -> Tensor:
        return self.normal(self.batch, POOLED, seed=3)

    def time(self, scale: float = 1000.0) -> Tensor:
        """[B]"""
        return torch.linspace(0.3, 0.7, self.batch, dtype=self.dtype) * scale

    def times(self, scale: float = 1000.0) -> Tensor:
        """[B, tokens]"""
        return (
            torch.linspace(0.1, 0.9, self.batch * self.tokens, dtype=self.dtype).view(self.batch, -1) * scale
        )

    def padding(self) -> Tensor:
        """[B, text], 1 for text: all of it in the last sample, one token less in each one before."""
        kept = self.text - torch.arange(self.batch).flip(0)
        return (torch.arange(self.text) < kept[:, None]).to(self.dtype)

    def ids(self, axes: int = 3) -> Tensor:
        """[tokens, (0, …, frame, row, column)]"""
        cells = torch.cartesian_prod(*(torch.arange(n) for n in self.grid)).to(self.dtype)
        return torch.cat([torch.zeros(self.tokens, axes - 3, dtype=self.dtype), cells], dim=1)


def wan(size: Size, channels: int = CHANNELS) -> dict[str, Any]:
    return {
        "hidden_states": size.latents(channels),
        "timestep": size.time(),
        "encoder_hidden_states": size.words(),
    }


def wan_image(size: Size) -> dict[str, Any]:
    """The processor knows where text begins by its 512 tokens."""
    words = size.normal(size.batch, 512, WORDS, seed=2)
    return {
        **wan(size),
        "encoder_hidden_states": words,
        "encoder_hidden_states_image": size.normal(size.batch, 5, 6, seed=4),
    }


def wan_times(size: Size) -> dict[str, Any]:
    return {**wan(size), "timestep": size.times()}


def hunyuan(size: Size, channels: int = CHANNELS) -> dict[str, Any]:
    return {
        "hidden_states": size.latents(channels),
        "timestep": size.time(),
        "encoder_hidden_states": size.words(),
        "encoder_attention_mask": size.padding(),
        "pooled_projections": size.pooled(),
        "guidance": size.time(),
    }


def cogvideox(size: Size, patch: int = 1, *, rotary: bool = False) -> dict[str, Any]:
    latents = size.latents(patch=(patch, 2, 2)).transpose(1, 2).contiguous()
    angles = size.normal(size.tokens, 16, seed=5)
    return {
        "hidden_states": latents,
        "encoder_hidden_states": size.words() if rotary else size.normal(size.batch, FIXED, WORDS, seed=2),
        "timestep": size.time(),
        "image_rotary_emb": (angles.cos(), angles.sin()) if rotary else None,
    }


def flux(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.tokens_of(),
        "encoder_hidden_states": size.words(),
        "pooled_projections": size.pooled(),
        "timestep": size.time(1.0),
        "guidance": size.time(4.0),
        "img_ids": size.ids(),
        "txt_ids": torch.zeros(size.text, 3, dtype=size.dtype),
    }


def sd3(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.latents().flatten(2, 3),
        "encoder_hidden_states": size.words(),
        "pooled_projections": size.pooled(),
        "timestep": size.time(),
    }


def ltx(size: Size, *, per_token: bool = False) -> dict[str, Any]:
    frames, rows, columns = size.grid
    return {
        "hidden_states": size.tokens_of(),
        "encoder_hidden_states": size.words(),
        "timestep": size.times() if per_token else size.time(),
        "encoder_attention_mask": size.padding(),
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "rope_interpolation_scale": (0.3, 32, 32),
    }


def mochi(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.latents(),
        "encoder_hidden_states": size.words(),
        "timestep": size.time(),
        "encoder_attention_mask": size.padding().bool(),
    }


def allegro(size: Size) -> dict[str, Any]:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    frames, rows, columns = size.grid
    made: Any = get_3d_rotary_pos_embed_allegro(12, ((0, 0), (rows, columns)), (rows, columns), frames)
    *angles, t, h, w = made
    cells = torch.cartesian_prod(t.long(), h.long(), w.long()).T.reshape(3, 1, -1).contiguous()
    return {
        "hidden_states": size.latents(),
        "encoder_hidden_states": size.words(),
        "timestep": size.time(),
        "encoder_attention_mask": size.padding(),
        "image_rotary_emb": (tuple(angles), tuple(cells)),
    }


def qwen(size: Size, *, padded: bool = False) -> dict[str, Any]:
    return {
        "hidden_states": size.tokens_of(),
        "encoder_hidden_states": size.words(),
        "encoder_hidden_states_mask": size.padding().bool() if padded else None,
        "timestep": size.time(1.0),
        "img_shapes": [[size.grid]] * size.batch,
    }


def qwen_edit(size: Size) -> dict[str, Any]:
    """The tokens of the image that is made, then those of a wider one to go by."""
    frames, rows, columns = size.grid
    shapes = [(frames, rows, columns), (frames, rows, 2 * columns)]
    more = size.normal(size.batch, 2 * size.tokens, CHANNELS, seed=4)
    return {
        **qwen(size, padded=True),
        "hidden_states": torch.cat([size.tokens_of(), more], dim=1),
        "img_shapes": [shapes] * size.batch,
    }


def vace(size: Size) -> dict[str, Any]:
    return {**wan(size), "control_hidden_states": size.latents(6)}


def hunyuan15(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.latents(patch=(1, 1, 1)),
        "timestep": size.time(),
        "encoder_hidden_states": size.words(),
        "encoder_attention_mask": size.padding(),
        "encoder_hidden_states_2": size.normal(size.batch, 4, 6, seed=4),
        "encoder_attention_mask_2": (torch.arange(4) < 3).to(size.dtype).expand(size.batch, -1),
        "image_embeds": size.normal(size.batch, 2, 5, seed=5),
    }


def hunyuan_image(size: Size) -> dict[str, Any]:
    given = hunyuan(size)
    del given["pooled_projections"]
    return {**given, "hidden_states": size.latents(patch=(1, 1, 1)).flatten(2, 3)}


def flux2(size: Size) -> dict[str, Any]:
    ids = size.ids(4).roll(-1, 1)
    return {
        "hidden_states": size.tokens_of(),
        "encoder_hidden_states": size.words(),
        "timestep": size.time(1.0),
        "guidance": size.time(4.0),
        "img_ids": ids.expand(size.batch, -1, -1),
        "txt_ids": torch.arange(size.text, dtype=size.dtype)[:, None].expand(size.batch, -1, 4),
    }


def without(name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in name.split()}


def cogview(size: Size) -> dict[str, Any]:
    corners = torch.tensor([[64.0, 32.0]], dtype=size.dtype).expand(size.batch, -1)
    return {
        "hidden_states": size.latents().flatten(2, 3),
        "encoder_hidden_states": size.words(),
        "timestep": size.time(),
        "original_size": corners,
        "target_size": corners * 2,
        "crop_coords": corners * 0,
    }


def cosmos(size: Size) -> dict[str, Any]:
    """Each frame has its own time."""
    frames = size.grid[0]
    return {
        **wan(size),
        "timestep": torch.linspace(0.1, 0.9, size.batch * frames, dtype=size.dtype).view(-1, 1, frames, 1, 1),
        "fps": 30,
    }


def pixart(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": size.latents().flatten(2, 3),
        "encoder_hidden_states": size.words(),
        "encoder_attention_mask": size.padding(),
        "timestep": size.time(),
    }


def lumina(size: Size) -> dict[str, Any]:
    return {**pixart(size), "encoder_attention_mask": size.padding().long()}


def zimage(size: Size) -> dict[str, Any]:
    """The second text is so much longer that it is padded to another length."""
    texts = [size.normal(size.text + 40 * at, WORDS, seed=2 + at) for at in range(size.batch)]
    return {"x": list(size.latents()), "t": size.time(1.0), "cap_feats": texts}
