"""ST-DiT: a video diffusion transformer that attends within frames, then through time.

With axes="time space" a layer has a block for all tokens of a frame and one for a token through time; with
"time height width" it has one for each. Either way its sequence is sharded by `shard`, with weft.stages.

B batch · … grid dims · C width · L tokens of the attended dim · H heads · D head dim
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.switching.stages import Stages, stages
from weft.video.transformer import timestep_embedding

AXES = ("time space", "time height width")


class STDiT(nn.Module):
    """The noise in a latent video [B, channels, T, H, W] at times [B]; a text is [B, words, text]."""

    def __init__(
        self,
        channels: int = 4,
        *,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        patch: int = 2,
        axes: str = AXES[0],
        text: int = 0,
    ) -> None:
        super().__init__()
        if axes not in AXES:
            raise InputError(f"axes={axes!r} is unknown.", hint=f"Use one of {', '.join(map(repr, AXES))}.")
        self.patch, self.width, self.axes = patch, width, axes.split()
        pixels = channels * patch**2
        self.embed = nn.Linear(pixels, width)
        self.clock = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: AxialBlock(width, heads, dim, conditioned=True, text=text)
                    for dim, name in reversed([*enumerate(self.axes, 1)])  # within frames first
                }
            )
            for _ in range(depth)
        )
        self.norm, self.modulate = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, pixels)

    def shard(self, mesh: Any = None) -> Stages:
        """Shard the tokens over ranks that are all given the same input."""
        declared = {f"blocks.*.{name}": name for name in reversed(self.axes)}
        return stages(self, declared, dims=" ".join(("batch", *self.axes, "channel")), mesh=mesh)

    def forward(self, video: Tensor, times: Tensor, text: Tensor | None = None) -> Tensor:
        B, _, T, H, W = video.shape
        p = self.patch
        if H % p or W % p:
            raise InputError(f"Frames of {H} × {W} cannot be cut into patches of {p} × {p}.")
        x = video.unflatten(4, (-1, p)).unflatten(3, (-1, p))  # [B, channels, T, H, p, W, p]
        grid = (H // p, W // p)
        x = self.embed(x.permute(0, 2, 3, 5, 1, 4, 6).reshape(B, T, *grid, -1))
        if "space" in self.axes:
            x = x.flatten(2, 3)
        condition = self.clock(timestep_embedding(times, self.width).to(x.dtype))
        for layer in self.blocks:
            for block in layer.values():  # pyright: ignore[reportCallIssue]
                x = block(x, condition, text)
        shift, scale = self.modulate(F.silu(condition)).reshape(B, 2, 1, 1, -1).unbind(1)
        x = self.head(self.norm(x.reshape(B, T, -1, self.width)) * (1 + scale) + shift)
        x = x.reshape(B, T, *grid, -1, p, p).permute(0, 4, 1, 2, 5, 3, 6)
        return x.reshape(video.shape)


class AxialBlock(nn.Module):
    """Attention along one dim of [B, …, C], optionally to a text, and an MLP; pointwise in the other dims.

    With `conditioned`, a vector [B, C] shifts, scales and gates both (AdaLN); gates begin at 0.
    """

    def __init__(
        self, width: int, heads: int, dim: int, *, conditioned: bool = False, text: int = 0, ratio: int = 4
    ) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=not conditioned) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, ratio * width), nn.GELU(), nn.Linear(ratio * width, width))
        self.modulate = nn.Linear(width, 6 * width) if conditioned else None
        if self.modulate is not None:
            nn.init.zeros_(self.modulate.weight)
            nn.init.zeros_(self.modulate.bias)
        self.cross = CrossAttention(width, heads, text) if text else None

    def forward(self, x: Tensor, condition: Tensor | None = None, text: Tensor | None = None) -> Tensor:
        parts: list[Any] = [0, 0, 1, 0, 0, 1]  # shift, scale, gate of the attention and of the MLP
        if self.modulate is not None:
            assert condition is not None, "the block was made with conditioned=True"
            shape = (len(x), *(1 for _ in x.shape[1:-1]), -1)
            parts = [chunk.view(shape) for chunk in self.modulate(F.silu(condition)).chunk(6, -1)]
        x = x + parts[2] * self.attend(self.norms[0](x) * (1 + parts[1]) + parts[0])
        if self.cross is not None:
            assert text is not None, "the block was made to read a text"
            x = x + self.cross(x, text)
        return x + parts[5] * self.mlp(self.norms[1](x) * (1 + parts[4]) + parts[3])

    def attend(self, x: Tensor) -> Tensor:
        rows = x.movedim(self.dim, -2)
        q, k, v = self.qkv(rows).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # [B, …, L, H, D]
        q, k, v = (tensor.flatten(0, -4).transpose(1, 2) for tensor in (rotated(q), rotated(k), v))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).reshape(rows.shape)).movedim(-2, self.dim)


class CrossAttention(nn.Module):
    """Every token reads a text [B, words, text width] that all ranks have."""

    def __init__(self, width: int, heads: int, text: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.q = nn.LayerNorm(width), nn.Linear(width, width)
        self.kv, self.out = nn.Linear(text, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        q = self.q(self.norm(x)).flatten(1, -2).unflatten(-1, (self.heads, -1))
        k, v = self.kv(text).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).reshape(x.shape))


def rotated(x: Tensor, first: int = 0) -> Tensor:
    """Rotary positions, from the first on, along L of [B, …, L, H, D]; an odd last channel stays."""
    L, D = x.shape[-3], x.shape[-1]
    half = D // 2
    speeds = 100.0 ** -(torch.arange(half, device=x.device, dtype=torch.float64) / max(1, half))
    angles = torch.arange(first, first + L, device=x.device, dtype=torch.float64)[:, None, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b, rest = x.split((half, half, D - 2 * half), -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1)
