"""VideoDiT: weft's own text-to-video transformer, full attention over one stream of word and patch tokens.

    model = VideoDiT(DiTConfig(words=20, length=8, width=192, depth=6, heads=6))
    clean = model(video, timestep, words)       # [B, T, C, H, W], [B], [B, length] → [B, T, C, H, W]

A video is cut into patches of frames × rows × columns, one token each, after the word tokens. Positions are
rotary embeddings, so the model takes any size that the patches divide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd, lcm, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.core.errors import InputError

VideoSize = tuple[int, int, int]
"""Frames, rows, columns."""
MAX_SIZES = dict(words=1 << 20, length=1 << 20, channels=1 << 16, width=1 << 20, depth=1 << 12, mlp=1 << 8)
"""A config may come from a stranger."""
ROPE_THETA = 100.0
"""Frequencies from 1 to 1/100 radian per patch: grids have tens of patches a side, not thousands."""
TIMESTEP_SCALE = 1000.0
"""`timestep_embedding` is made for timesteps from 0 to 1000."""
GEMM_ROWS = 4
"""With fewer rows, BLAS computes a product in another way (measured: MKL, float32)."""
SIMD_LANES = 32
"""Values that torch processes at once with AVX-512; it rounds the remainder in another way."""


@dataclass(frozen=True)
class DiTSizes:
    """The sizes of a VideoDiT that do not follow from its data."""

    patch: VideoSize = (4, 8, 8)
    width: int = 192
    depth: int = 6
    heads: int = 6
    mlp: int = 4
    """Ratio of the hidden width to the width."""
    qk_norm: bool = True
    phrase: int = 0
    """Words per phrase, mixed before they meet the video: 4 in weft's own captions; 0: words stand alone."""
    upscale: int = 1
    """The model makes videos at this fraction of their height and width; an upscaler enlarges them."""


@dataclass(frozen=True, kw_only=True)
class DiTConfig(DiTSizes):
    """All sizes of a VideoDiT."""

    words: int
    """Size of the vocabulary; word 0 is padding."""
    length: int
    """Words of a prompt, with padding."""
    video: VideoSize = (16, 64, 64)
    """The default output."""
    channels: int = 3
    shift: float = 1.0
    """Timestep shift of the sampler, see `flow.timesteps`."""
    pixels: bool = True
    """Whether the output is pixels, from -1 to 1, or latents."""

    def __post_init__(self) -> None:
        for name, maximum in MAX_SIZES.items():
            if not 1 <= getattr(self, name) <= maximum:
                raise InputError(f"{name} must be in [1, {maximum:,}], got {getattr(self, name)}.")
        if self.upscale < 1 or any(size % self.upscale for size in self.patch[1:]):
            raise InputError(
                f"upscale={self.upscale} does not fit patches of {_shown(self.patch)} pixels.",
                hint="upscale must be >= 1 and divide the height and width of a patch.",
            )
        head_dim_fits = self.heads > 0 and self.width % self.heads == 0 and self.head_dim >= 6
        if min(self.patch) < 1 or not head_dim_fits or self.head_dim % 2:
            raise InputError(
                f"width={self.width}, heads={self.heads} and patch={self.patch} do not fit.",
                hint="width / heads must be even and >= 6; patch sizes must be >= 1.",
            )
        if self.phrase < 0 or (self.phrase and self.length % self.phrase):
            raise InputError(
                f"phrase={self.phrase} does not fit prompts of {self.length} words.",
                hint="phrase must divide the length of a prompt; 0 is for words that stand alone.",
            )
        self.grid(self.video)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def grid(self, video: VideoSize) -> VideoSize:
        """Return the number of patches along each dim of a video."""
        if any(size < 1 or size % patch for size, patch in zip(video, self.patch, strict=True)):
            raise InputError(
                f"{_shown(video)} pixels cannot be cut into patches of {_shown(self.patch)}.",
                hint="Frames, height and width must be multiples of the patch's.",
            )
        t, h, w = (size // patch for size, patch in zip(video, self.patch, strict=True))
        return t, h, w

    @property
    def model_patch(self) -> VideoSize:
        """The patch that the model makes, before upscaling."""
        return self.patch[0], self.patch[1] // self.upscale, self.patch[2] // self.upscale


class VideoDiT(nn.Module):
    """Predict the clean video of a noised one.

    The timestep and the pooled prompt shift, scale and gate every block (adaLN-single: one modulation for all
    blocks, and a table for each). Gates start at 0, so that each block starts as the identity.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        pixels = config.channels * prod(config.model_patch)
        self.embed = nn.Linear(pixels, width)
        self.text = PromptEmbedding(config.words, config.length, width, config.phrase)
        self.rope = Rope(config.head_dim)
        self.clock = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.modulate = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(VideoBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.table, self.head = nn.Parameter(torch.zeros(2, width)), nn.Linear(width, pixels)
        for layer in (self.modulate, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self._gradient_checkpointing_func: Callable[..., Any] | None = None

    def enable_gradient_checkpointing(self) -> None:
        """Recompute blocks in the backward instead of storing their activations, as in Diffusers."""
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, video: Tensor, timestep: Tensor, words: Tensor) -> Tensor:
        """timestep: the share of noise in each video, from 1 to 0."""
        patches = self._patchify(video)
        text, pooled_text = self.text(words)
        x = torch.cat((text, self.embed(patches.flatten(1, 3))), 1)
        temb = timestep_embedding(timestep * TIMESTEP_SCALE, self.config.width).to(x.dtype)
        temb = batch_invariant(self.clock, temb) + pooled_text
        modulation = batch_invariant(lambda row: self.modulate(F.silu(row)), temb).unflatten(-1, (6, -1))
        # Words are not rotated: seen from a word, a patch's position is its position in the video.
        cos, sin = self.rope(patches)
        cos = F.pad(cos, (0, 0, text.shape[1], 0), value=1.0)
        sin = F.pad(sin, (0, 0, text.shape[1], 0))
        recompute = self._gradient_checkpointing_func if torch.is_grad_enabled() else None
        for block in self.blocks:
            args = x, modulation, cos, sin
            x = recompute(block, *args) if recompute else block(*args)
        shift, scale = (temb[:, None] + self.table).unsqueeze(2).unbind(1)
        x = self.head(self.norm(x[:, text.shape[1] :]) * (1 + scale) + shift)
        return self._unpatchify(x.reshape(patches.shape))

    def grid(self, video: Tensor) -> VideoSize:
        """Return the number of patches along each dim of a video of the model's size."""
        (_, T, _, H, W), up = video.shape, self.config.upscale
        return self.config.grid((T, H * up, W * up))

    def _patchify(self, video: Tensor) -> Tensor:
        """Return [B, t, h, w, pixels of a patch]."""
        C = video.shape[2]
        (t, h, w), (pt, ph, pw) = self.grid(video), self.config.model_patch
        x = video.reshape(-1, t, pt, C, h, ph, w, pw)
        return x.permute(0, 1, 4, 6, 2, 3, 5, 7).flatten(4)

    def _unpatchify(self, patches: Tensor) -> Tensor:
        pt, ph, pw = self.config.model_patch
        x = patches.unflatten(4, (pt, -1, ph, pw))
        x = x.permute(0, 1, 4, 5, 2, 6, 3, 7)  # [B, t, frames of a patch, C, h, rows, w, columns]
        B, t, pt, C, h, ph, w, pw = x.shape
        return x.reshape(B, t * pt, C, h * ph, w * pw)


class PromptEmbedding(nn.Module):
    """Words [B, length] to tokens [B, length, width] and to one pooled vector [B, width]."""

    def __init__(self, words: int, length: int, width: int, phrase: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.2)
        self.mix = nn.Parameter(torch.randn(length, width) / length**0.5)
        self.whole = nn.Linear(width, width)
        self.phrase = phrase
        if phrase:
            self.norm = nn.LayerNorm(width, elementwise_affine=False)
            self.mlp = nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU("tanh"), nn.Linear(2 * width, width)
            )

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(words)
        pooled, x = batch_invariant(self.whole, (x * self.mix).sum(1)), x + self.place
        if not self.phrase:
            return x, pooled
        # Mix the words of each phrase: a patch that attends to its color need not look for its kind.
        phrases = batch_invariant(self.mlp, self.norm(x.unflatten(1, (-1, self.phrase)).sum(2)))
        return x + phrases.repeat_interleave(self.phrase, 1), pooled


class Rope(nn.Module):
    """Cosines and sines [tokens, head_dim / 2] of the positions of patches in time, height and width."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.channels = (head_dim // 2 - 2 * ((head_dim // 2 + 1) // 3), *((head_dim // 2 + 1) // 3,) * 2)

    def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        sizes = (torch.arange(n, dtype=torch.float64, device=patches.device) for n in patches.shape[1:4])
        angles: list[Tensor] = []
        for position, count in zip(torch.meshgrid(*sizes, indexing="ij"), self.channels, strict=True):
            index = torch.arange(count, dtype=torch.float64, device=patches.device)
            angles.append(position[..., None] * ROPE_THETA ** -(index / count))
        angle = torch.cat(angles, -1).flatten(0, 2)
        return angle.cos().to(patches.dtype), angle.sin().to(patches.dtype)


class VideoBlock(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.mlp * config.width
        self.norm, self.attn = nn.LayerNorm(width, elementwise_affine=False), VideoAttention(config)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width))
        self.table = nn.Parameter(torch.zeros(6, width))

    def forward(self, x: Tensor, modulation: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        modulation = (modulation + self.table).unsqueeze(2)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation.unbind(1)
        x = x + gate * self.attn(self.norm(x) * (1 + scale) + shift, cos, sin)
        return x + gate_mlp * self.mlp(self.norm(x) * (1 + scale_mlp) + shift_mlp)


class VideoAttention(nn.Module):
    """Full attention; `weft.parallelize` replaces its `scaled_dot_product_attention`."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv, self.out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)
        self.norm_q, self.norm_k = (
            nn.RMSNorm(config.head_dim, eps=1e-6) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dtype = self.out.weight.dtype  # norms are not computed in half precision under autocast
        q = apply_rotary_emb(self.norm_q(q.to(dtype)), cos, sin)
        k = apply_rotary_emb(self.norm_k(k.to(dtype)), cos, sin)
        # On a CPU, attention stays in the weights' dtype under autocast: its 16-bit backward is slower.
        v = v.to(q.dtype) if v.device.type == "cpu" else v
        with torch.autocast("cpu", enabled=False):
            out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


def timestep_embedding(timesteps: Tensor, width: int) -> Tensor:
    """Return the sinusoidal embedding [B, width] of timesteps [B]."""
    half = (width + 1) // 2
    index = torch.arange(half, device=timesteps.device, dtype=torch.float64)
    angles = timesteps.to(torch.float64)[:, None] * 1e4 ** -(index / half)
    return torch.cat((angles.sin(), angles.cos()), -1)[:, :width]


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of channels, one from either half, by its angle."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def batch_invariant(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a layer to one or a few rows per sample, with bits that do not depend on the other samples."""
    x, shape = x.flatten(0, -2), x.shape[:-1]
    rows = lcm(GEMM_ROWS, SIMD_LANES // gcd(SIMD_LANES, x.shape[1]))
    return layer(F.pad(x, (0, 0, 0, -len(x) % rows)))[: len(x)].unflatten(0, shape)


def _shown(size: VideoSize) -> str:
    return "×".join(map(str, size))
