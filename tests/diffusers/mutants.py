"""Changes to a tiny model that make its tokens depend on each other, on their places or on their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.diffusers.adapter import Adapter, Shard

WIDTH, HEADS = 8, 2
Change = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.places: dict[str, Any] = {}

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        keys = x if keys is None else keys
        x = self.places.get("in a site", same)(x)
        q, k, v = (
            to(each).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for to, each in ((self.to_q, x), (self.to_k, keys), (self.to_v, keys))
        )
        q, k = (self.places.get("queries", same)(each) for each in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, scale=self.places.get("scale", none)(x))
        if "heads" in self.places:  # some heads by its own softmax
            out = torch.cat([out[:, :1], own_attention(v[:, 1:])], 1)
        return self.to_out(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.cross = nn.LayerNorm(WIDTH), Attention(), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.places: dict[str, Any] = {}

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x) * (1 + time[:, None]))
        x = self.places.get("in a block", same)(x)
        x = x + self.cross(x, text)
        return x + self.gate * self.mlp(x)


class Tiny(nn.Module):
    """[B, N, C] with text [B, M, C], which is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.text, self.time = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.places: dict[str, Any] = {}

    def forward(self, x: Tensor, text: Tensor, time: Tensor, shift: Tensor | None = None) -> Tensor:
        x, text, time = self.embed(x), self.text(text), self.time(time)
        for block in self.blocks:
            x = block(x, text, time)
            x = self.places.get("between blocks", same)(x if shift is None else x + shift)
        return self.head(x).cumsum(1)  # whole again


TINY = Adapter(
    "Tiny",
    inputs={"": {"x": Shard("video", 1), "shift": Shard("video", 1)}},
    gather={"head": Shard("video", 1)},
    attention={"blocks.*.attn": "video"},
    local=("blocks.*.cross",),
)


def same(x: Tensor) -> Tensor:
    return x


def none(_: Tensor) -> None:
    return None


class Apply(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


def layer(module: nn.Module) -> Change:
    """A layer over tokens of a tensor that has its channels first."""
    module.double()
    return lambda x: module(x.mT).mT


def own_attention(x: Tensor) -> Tensor:
    weights = (x @ x.mT / x.shape[-1] ** 0.5).exp()
    return weights @ x / weights.sum(-1, keepdim=True)


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-2], dtype=x.dtype)[:, None]


def rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    angle = positions(x) * 0.3
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def windows(x: Tensor) -> Tensor:
    size = x.shape[1]
    x = F.pad(x, (0, 0, 0, -size % 4)).unflatten(1, (-1, 4))
    return (x + x.mean(2, keepdim=True)).flatten(1, 2)[:, :size]


def strongest(x: Tensor) -> Tensor:
    kept = x.norm(dim=-1).topk(x.shape[1] // 2, 1).indices
    return torch.zeros_like(x).scatter(1, kept[..., None].expand(-1, -1, x.shape[-1]), x)


def table(x: Tensor) -> Tensor:
    """Learned positions: of as many tokens as this rank has, whatever others have."""
    return x + torch.linspace(0, 1, 64, dtype=x.dtype)[: x.shape[1], None]


def resized(x: Tensor) -> Tensor:
    half = F.interpolate(x.mT, scale_factor=0.5, mode="linear")
    return F.interpolate(half, size=x.shape[1]).mT


def batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x.mT, None, None, training=True).mT


def fixed(x: Tensor) -> Tensor:
    """Runs on this rank's tokens only: no other number of them."""
    size = {2: 6, 3: 4}
    assert x.shape[1] in size.values()
    return x + torch.linspace(-1, 1, x.shape[1] ** 2, dtype=x.dtype).view(x.shape[1], -1) @ x


CHANGES: dict[str, Change] = {
    "convolution": layer(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "depthwise convolution": layer(nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)),
    "causal convolution": lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
    "group norm": layer(nn.GroupNorm(2, WIDTH)),
    "instance norm": layer(nn.InstanceNorm1d(WIDTH)),
    "batch norm": batch_norm,
    "layer norm over tokens": lambda x: F.layer_norm(x, x.shape[1:]),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "pooled gate": lambda x: x * x.mean(1, keepdim=True).sigmoid(),
    "largest": lambda x: x / x.abs().amax(1, keepdim=True),
    "norm of all": lambda x: x / x.norm(),
    "average pooling": lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "maximum pooling": lambda x: F.max_pool1d(x.mT, 3, 1, 1).mT,
    "standard deviation": lambda x: x / x.std(1, keepdim=True),
    "median": lambda x: x - x.median(1, keepdim=True).values,
    "every other token": lambda x: x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]],
    "token two before": lambda x: x + x.roll(2, 1),
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x + x.flip(1),
    "cumulative sum": lambda x: x.cumsum(1) * 0.1,
    "reverse cumulative sum": lambda x: x.flip(1).cumsum(1).flip(1) * 0.1,
    "cumulative maximum": lambda x: x.cummax(1).values,
    "sort": lambda x: x.sort(1).values,
    "softmax over tokens": lambda x: x * x.softmax(1),
    "own attention": own_attention,
    "linear attention": lambda x: x + x @ (x.mT @ x) * 0.1,
    "Fourier": lambda x: torch.fft.fft(x, dim=1).real,
    "resized": resized,
    "windows": windows,
    "strongest tokens": strongest,
    "differences": lambda x: x.diff(dim=1, prepend=x[:, :1]),
    "first token": lambda x: x + x[:, :1],
    "last token": lambda x: x + x[:, -1:],
    "matrix over tokens": fixed,
    "positions": lambda x: x + positions(x) * 0.01,
    "relative positions": lambda x: x + positions(x) / x.shape[1],
    "rotary positions": rotated,
    "table of positions": table,
    "parity": lambda x: x * (1 - positions(x) % 2),
    "first place": lambda x: x * (positions(x) > 0),
    "number of tokens": lambda x: x / x.shape[1] ** 0.5,
    "logarithm of number": lambda x: x * torch.tensor(float(x.shape[1])).log(),
}
PLACES = ("a module", "a module in a site", "in a site", "in a block", "between blocks")


def put(model: Any, change: Change, place: str) -> str:
    """Put a change into the second block, or behind the first; return the name of the module to be blamed."""
    block = model.blocks[1]
    if place == "a module":
        block.mlp = nn.Sequential(block.mlp, Apply(change))
        return "blocks.1.mlp.1"
    if place == "a module in a site":
        block.attn.to_v = nn.Sequential(Apply(change), block.attn.to_v)
        return "blocks.1.attn.to_v.0"
    owner, name = {
        "in a site": (block.attn, "blocks.1.attn"),
        "in a block": (block, "blocks.1"),
        "between blocks": (model, "Tiny"),
    }[place]
    owner.places[place] = change
    return name
