"""ST-DiT: a video diffusion transformer that attends within frames, then through time.

With axes="time space" a layer has a block for all tokens of a frame and one for a token through time; with
"time height width" it has one for each. Either way its sequence is sharded by `shard`, with weft.stages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.models.axial import AxialBlock
from weft.models.stages import Stages, stages

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
        condition = self.clock(waves(times, self.width).to(x.dtype))
        for layer in self.blocks:
            for block in layer.values():  # pyright: ignore[reportCallIssue]
                x = block(x, condition, text)
        shift, scale = self.modulate(F.silu(condition)).reshape(B, 2, 1, 1, -1).unbind(1)
        x = self.head(self.norm(x.reshape(B, T, -1, self.width)) * (1 + scale) + shift)
        x = x.reshape(B, T, *grid, -1, p, p).permute(0, 4, 1, 2, 5, 3, 6)
        return x.reshape(video.shape)


def waves(times: Tensor, width: int) -> Tensor:
    """[B] → [B, width]: sines and cosines from slow to fast."""
    half = (width + 1) // 2
    speeds = 1e4 ** -(torch.arange(half, device=times.device, dtype=torch.float64) / half)
    angles = times.to(torch.float64)[:, None] * speeds
    return torch.cat((angles.sin(), angles.cos()), -1)[:, :width]
