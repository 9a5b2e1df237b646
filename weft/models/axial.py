"""Axial: a transformer over a grid that attends along one dim after another: weather on lat × lon × level.

B batch · … grid dims · C width · L tokens of the attended dim · H heads · D head dim
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.stages import Stages, stages


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
            parts = [part.view(shape) for part in self.modulate(F.silu(condition)).chunk(6, -1)]
        x = x + parts[2] * self.attend(self.norms[0](x) * (1 + parts[1]) + parts[0])
        if self.cross is not None:
            assert text is not None, "the block was made to read a text"
            x = x + self.cross(x, text)
        return x + parts[5] * self.mlp(self.norms[1](x) * (1 + parts[4]) + parts[3])

    def attend(self, x: Tensor) -> Tensor:
        rows = x.movedim(self.dim, -2)
        q, k, v = self.qkv(rows).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # [B, …, L, H, D]
        q, k, v = (part.flatten(0, -4).transpose(1, 2) for part in (rotated(q), rotated(k), v))
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
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
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


class AxialForecast(nn.Module):
    """Fields [B, lat, lon, level, variables] → the same some hours later."""

    GRID = ("lat", "lon", "level")

    def __init__(self, variables: int, *, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(variables, width), nn.Linear(width, variables)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: AxialBlock(width, heads, dim) for dim, name in enumerate(self.GRID, 1)})
            for _ in range(depth)
        )

    def shard(self, mesh: Any = None) -> Stages:
        declared = {f"blocks.*.{name}": name for name in self.GRID}
        return stages(self, declared, dims=" ".join(("batch", *self.GRID, "channel")), mesh=mesh)

    def forward(self, fields: Tensor) -> Tensor:
        x = self.embed(fields)
        for layer in self.blocks:
            for block in layer.values():  # pyright: ignore[reportCallIssue]
                x = block(x)
        return fields + self.head(x)
