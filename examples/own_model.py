"""Shard a model of your own that attends within frames and through time in turn.

weft run examples/own_model.py --ranks 3
"""

import torch
from torch import nn

import weft


class Attention(nn.Module):
    """Self-attention over the second-to-last dim, with its residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-2, -3).flatten(-2))


class Through(Attention):
    """The same through time: (batch, time, space, channel)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.spatial, self.temporal = Attention(width, heads), Through(width, heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.temporal(self.spatial(x))


torch.manual_seed(0)  # the same weights and the same input on every rank
model = nn.Sequential(*(Block(24, heads=3) for _ in range(2)))
x = torch.randn(1, 5, 35, 24)
with torch.no_grad():
    expected = model(x)

    # Which submodules mix which dims. All other code must be pointwise in time and space; weft tests that.
    handle = weft.stages(model, {"*.spatial": "space", "*.temporal": "time"}, dims="batch time space channel")
    error = (model(x) - expected).abs().max().item()

rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
if rank == 0:
    print(handle.route)
    print(f"largest difference from one process: {error:.1e}")
assert error < 1e-5
