"""VideoDiT: weft's own text-to-video transformer, full attention over one stream of words and video.

    model = VideoDiT(DiTConfig(width=192, depth=6, heads=6))
    clean = model(video, timestep, words)       # [B, T, C, H, W], [B], [B, length] → [B, T, C, H, W]

A video is cut into patches of frames × rows × columns, each of which is a token; words are tokens in front of
them, so attention binds a colour to its shape. Any size that patches divide will do: positions are rotations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.core import tables
from weft.core.errors import InputError
from weft.models.adapter import Adapter, Cut
from weft.models.prompt import Prompt, by_row

Size = tuple[int, int, int]
"""Frames, rows, columns."""
MAX_SIZES = {
    "words": 1 << 20,
    "length": 1 << 20,
    "channels": 1 << 16,
    "width": 1 << 20,
    "depth": 1 << 12,
    "mlp": 1 << 8,
}
"""A config is not always of one's own."""
THETA = 100.0
"""Rotations are from one radian a patch to a hundredth: grids have tens of patches a side, not thousands."""
TICKS = 1000.0
"""A timestep from 0 to 1 in the units that waves are made for."""


@dataclass(frozen=True)
class DiTConfig:
    """Sizes of a VideoDiT. `video` is what it makes if nothing else is asked for."""

    words: int
    """Of the vocabulary; word 0 is padding."""
    length: int
    """Words of a prompt, with padding."""
    video: Size = (16, 64, 64)
    patch: Size = (2, 8, 8)
    channels: int = 3
    width: int = 192
    depth: int = 6
    heads: int = 6
    mlp: int = 4
    """Times the width."""
    qk_norm: bool = True
    phrase: int = 0
    """Words that tell of one thing: each knows the others of its phrase before it meets the video."""
    shift: float = 1.0
    """Of the sampler's timesteps, see `flow.times`: what is large is decided while all is noise."""
    pixels: bool = True
    """Whether it makes pixels, from -1 to 1, or latents."""
    upscale: int = 1
    """Videos are made at a fraction of their height and width; an upscaler does the rest."""

    def __post_init__(self) -> None:
        for name, most in MAX_SIZES.items():
            if not 1 <= getattr(self, name) <= most:
                raise InputError(f"{name}={getattr(self, name)}.", hint=f"It is from 1 to {most:,}.")
        if self.upscale < 1 or any(size % self.upscale for size in self.patch[1:]):
            raise InputError(
                f"upscale={self.upscale} with patches of {'×'.join(map(str, self.patch))} pixels.",
                hint="It is 1 or more, and divides the height and width of a patch.",
            )
        if min(self.heads, *self.patch) < 1 or self.width % self.heads or self.head % 2 or self.head < 6:
            raise InputError(
                f"width={self.width}, heads={self.heads} and patch={self.patch} make no heads to be rotated.",
                hint="Width over heads is an even number of at least 6; a patch is 1 or more each way.",
            )
        if self.phrase < 0 or (self.phrase and self.length % self.phrase):
            raise InputError(
                f"phrase={self.phrase} with prompts of {self.length} words.",
                hint="It divides the words of a prompt; 0 is for words that stand alone.",
            )
        self.grid(self.video)

    @property
    def head(self) -> int:
        return self.width // self.heads

    def grid(self, video: Size) -> Size:
        """Patches of a video."""
        if any(size < 1 or size % part for size, part in zip(video, self.patch, strict=True)):
            given, patch = ("×".join(map(str, size)) for size in (video, self.patch))
            raise InputError(
                f"{given} pixels cannot be cut into patches of {patch}.",
                hint="Frames, height and width are multiples of the patch's.",
            )
        t, h, w = (size // part for size, part in zip(video, self.patch, strict=True))
        return t, h, w

    @property
    def made(self) -> Size:
        """The patch as it is made, before it is enlarged."""
        return self.patch[0], self.patch[1] // self.upscale, self.patch[2] // self.upscale

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> DiTConfig:
        """Other entries are left alone."""
        names = [field.name for field in fields(DiTConfig)]
        return tables.read(
            DiTConfig, {name: said[name] for name in names if name in said}, "The model's config"
        )


class VideoDiT(nn.Module):
    """Predicts the clean video of a noised one.

    Time and the prompt as a whole scale, shift and gate every block (adaLN-single: one map for all blocks,
    and a table for each); gates begin at 0, so that each block begins as the identity.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        pixels = config.channels * prod(config.made)
        self.embed, self.text, self.rope = (
            nn.Linear(pixels, width),
            Prompt(config.words, config.length, width, config.phrase),
            Rope(config.head),
        )
        self.clock = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.modulate = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.table, self.head = nn.Parameter(torch.zeros(2, width)), nn.Linear(width, pixels)
        for layer in (self.modulate, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self._gradient_checkpointing_func: Any = None

    def enable_gradient_checkpointing(self) -> None:
        """Blocks are computed again for their gradients, instead of kept; of the name that Diffusers has."""
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, video: Tensor, timestep: Tensor, words: Tensor) -> Tensor:
        """timestep: the share of noise in each video, from 1 to 0."""
        patches = self._patches(video)
        text, prompt = self.text(words)
        x = torch.cat((text, self.embed(patches.flatten(1, 3))), 1)
        time = by_row(self.clock, waves(timestep * TICKS, self.config.width).to(x.dtype))
        condition = time + prompt
        changes = by_row(lambda row: self.modulate(F.silu(row)), condition).unflatten(-1, (6, -1))
        # Words are not rotated, so that where a patch is, seen from a word, is where it is in the video.
        cos, sin = self.rope(patches)
        cos, sin = (
            F.pad(part, (0, 0, text.shape[1], 0), value=one) for part, one in ((cos, 1.0), (sin, 0.0))
        )
        again = self._gradient_checkpointing_func
        for block in self.blocks:
            given = x, changes, cos, sin
            x = again(block, *given) if again and torch.is_grad_enabled() else block(*given)
        shift, scale = (condition[:, None] + self.table).unsqueeze(2).unbind(1)
        x = self.head(self.norm(x[:, text.shape[1] :]) * (1 + scale) + shift)
        return self._pixels(x.reshape(patches.shape))

    def grid(self, video: Tensor) -> Size:
        """Patches of a video as it is made."""
        (_, T, _, H, W), up = video.shape, self.config.upscale
        return self.config.grid((T, H * up, W * up))

    def _patches(self, video: Tensor) -> Tensor:
        """[B, t, h, w, pixels of a patch]"""
        C = video.shape[2]
        (t, h, w), (pt, ph, pw) = self.grid(video), self.config.made
        x = video.reshape(-1, t, pt, C, h, ph, w, pw)
        return x.permute(0, 1, 4, 6, 2, 3, 5, 7).flatten(4)

    def _pixels(self, patches: Tensor) -> Tensor:
        x = patches.unflatten(4, (self.config.made[0], -1, *self.config.made[1:]))
        x = x.permute(0, 1, 4, 5, 2, 6, 3, 7)  # [B, t, frames of a patch, C, h, rows, w, columns]
        B, t, pt, C, h, ph, w, pw = x.shape
        return x.reshape(B, t * pt, C, h * ph, w * pw)


class Rope(nn.Module):
    """Cosines and sines [tokens, head / 2] of where patches are: in time, from above, from the left."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.parts = (head // 2 - 2 * ((head // 2 + 1) // 3), *((head // 2 + 1) // 3,) * 2)

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        grid, how = patches.shape[1:4], {"dtype": torch.float64, "device": patches.device}
        angles: list[Tensor] = []
        for axis, (size, count) in enumerate(zip(grid, self.parts, strict=True)):
            speeds = THETA ** -(torch.arange(count, **how) / count)
            angle = torch.arange(size, **how)[:, None] * speeds
            angles.append(
                angle.reshape([size if at == axis else 1 for at in range(3)] + [count]).expand(*grid, -1)
            )
        angle = torch.cat(angles, -1).flatten(0, 2)
        return angle.cos().to(patches.dtype), angle.sin().to(patches.dtype)


class Block(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width, wide = config.width, config.mlp * config.width
        self.norm, self.attn = nn.LayerNorm(width, elementwise_affine=False), Attention(config)
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU("tanh"), nn.Linear(wide, width))
        self.table = nn.Parameter(torch.zeros(6, width))

    def forward(self, x: Tensor, changes: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = (changes + self.table).unsqueeze(2).unbind(1)
        x = x + gate * self.attn(self.norm(x) * (1 + scale) + shift, cos, sin)
        return x + gate_mlp * self.mlp(self.norm(x) * (1 + scale_mlp) + shift_mlp)


class Attention(nn.Module):
    """Every token to every token; who wants another attention answers `scaled_dot_product_attention`."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv, self.out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)
        self.norm_q, self.norm_k = (
            nn.RMSNorm(config.head, eps=1e-6) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (
            rotated(norm(x.to(self.out.weight.dtype)), cos, sin)  # under autocast norms are not halved
            for norm, x in ((self.norm_q, q), (self.norm_k, k))
        )
        # On a CPU attention is in the weights' dtype also under autocast: halved, its backward takes longer.
        v = v.to(q.dtype) if v.device.type == "cpu" else v
        with torch.autocast("cpu", enabled=False):
            out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


def waves(times: Tensor, width: int) -> Tensor:
    """[B] → [B, width]: sines and cosines from slow to fast."""
    half = (width + 1) // 2
    speeds = 1e4 ** -(torch.arange(half, device=times.device, dtype=torch.float64) / half)
    angles = times.to(torch.float64)[:, None] * speeds
    return torch.cat((angles.sin(), angles.cos()), -1)[:, :width]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of channels, one of either half, by its angle."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


ADAPTER = Adapter(
    "VideoDiT",
    inputs={"embed": {"input": Cut("video", 1)}},
    outputs={"text": (Cut("text", 1), None), "rope": Cut("video", 0)},
    attention={"blocks.*.attn": "text video"},
    gather={"head": Cut("video", 1)},
    grid=lambda model, given: model.grid(given["video"]),
    note="weft's own",
)
