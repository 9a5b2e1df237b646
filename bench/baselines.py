"""Four ways to run the blocks of an ST-DiT over ranks that each have some frames, with the same weights.

    switching   the sharded dim is switched between blocks                                        2 M/N
    ulysses     heads for frames, and back, around the attention through time                     4 M/N
    ring        keys and values go around in the attention through time                           2 M
    megatron    weights split by heads and channels: all-gather before and reduce-scatter after
                every attention and every MLP                                                     8 M

That is what a rank sends in a layer forward, times (N-1)/N: M bytes of a whole activation, N ranks. Each
takes the whole [B, T, S, C] on every rank, cuts out its frames, and returns them. All messages go by the
transport of weft, which counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from bench.stdit import AxialBlock, STDiT, rotated
from weft.core.indices import split_evenly
from weft.run.switch import reduce
from weft.run.world import world_of

DIMS = ("batch", "time", "space", "channel")


class Trunk(nn.Module):
    """The blocks of an ST-DiT by themselves: within frames, then through time, layer by layer."""

    def __init__(self, model: STDiT) -> None:
        super().__init__()
        self.blocks = model.blocks

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in blocks_of(self):
            x = block(x, condition)
        return x


def blocks_of(trunk: Trunk) -> list[Any]:
    return [block for layer in trunk.blocks for block in layer.values()]  # pyright: ignore


def bytes_of_layer(method: str, M: int, N: int) -> int:
    """What a rank sends forward, where N divides all sizes."""
    return (
        {"switching": 2 * M // N, "ulysses": 4 * M // N, "ring": 2 * M, "megatron": 8 * M}[method]
        * (N - 1)
        // N
    )


def switching(trunk: Trunk) -> nn.Module:
    weft.stages(trunk, {"blocks.*.space": "space", "blocks.*.time": "time"}, dims=" ".join(DIMS), exit="time")
    return trunk


def inside(plan: str, trunk: Trunk) -> nn.Module:
    """Blocks through time attend with `weft.attention`; all else is local."""
    frames = Frames(trunk)
    for block in blocks_of(trunk)[1::2]:
        block.attend = partial(attend, block, partial(frames.attention, plan), frames.first)
    return frames


def megatron(trunk: Trunk) -> nn.Module:
    """Norms, gates and sums stay sharded by time; what is split by heads or channels sees all tokens."""
    frames = Frames(trunk)
    for block in blocks_of(trunk):
        width, H = block.out.in_features, block.heads
        heads = frames.part(H)
        channels = torch.arange(width).view(H, -1)[heads].flatten()
        hidden = torch.arange(block.mlp[0].out_features)[frames.part(block.mlp[0].out_features)]
        block.heads = heads.stop - heads.start
        block.qkv = frames.some_rows(block.qkv, torch.cat([channels + i * width for i in range(3)]))
        block.out = frames.some_columns(block.out, channels)
        block.mlp[0] = frames.some_rows(block.mlp[0], hidden)
        block.mlp[2] = frames.some_columns(block.mlp[2], hidden)
        block.attend = frames.around(partial(attend, block, F.scaled_dot_product_attention, lambda: 0))
        block.mlp.forward = frames.around(block.mlp.forward)
    return frames


METHODS: dict[str, Callable[[Trunk], nn.Module]] = {
    "switching": switching,
    "ulysses": partial(inside, "ulysses"),
    "ring": partial(inside, "ring"),
    "megatron": megatron,
}


class Frames(nn.Module):
    """A trunk whose input is cut by time; what its blocks ask for that is not theirs."""

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.trunk, self.comm = trunk, world_of(None, 60.0).comm
        self.dims: dict[str, int | None] = {}

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        self.dims = dict(zip(DIMS, x.shape, strict=True))
        return self.trunk(weft.split(x, "time", dims=self.dims), condition)

    def part(self, size: int) -> slice:
        return slice(*split_evenly(size, self.comm.size)[self.comm.rank])

    def first(self) -> int:
        return self.part(self.dims["time"] or 0).start

    def attention(self, plan: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The kernel of the model itself: what is compared is how it is run over ranks.
        return weft.attention(q, k, v, plan=plan, tokens=self.dims["time"], backend="exact")

    def around(self, inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """All-gather, then what gives this rank's summand of the whole, then reduce-scatter."""
        return lambda x: reduce(inner(weft.gather(x, "time", dims=self.dims)), "time", dims=self.dims)

    def some_rows(self, linear: nn.Linear, rows: Tensor) -> nn.Linear:
        return _linear(linear.weight[rows], linear.bias[rows])

    def some_columns(self, linear: nn.Linear, columns: Tensor) -> nn.Linear:
        """A summand of the output, to which one rank adds the bias."""
        return _linear(linear.weight[:, columns], None if self.comm.rank else linear.bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.detach().clone())
    made.bias = None if bias is None else nn.Parameter(bias.detach().clone())  # pyright: ignore
    return made


def attend(block: AxialBlock, attention: Any, first: Callable[[], int], x: Tensor) -> Tensor:
    """A block's attention with another one in the place of SDPA, of frames from the `first` on."""
    rows = x.movedim(block.dim, -2)
    q, k, v = block.qkv(rows).unflatten(-1, (3, block.heads, -1)).unbind(-3)  # [B, …, L, H, D]
    q, k = rotated(q, first()), rotated(k, first())
    q, k, v = (tensor.flatten(0, -4).transpose(1, 2) for tensor in (q, k, v))
    out = attention(q, k, v).transpose(1, 2).flatten(2)
    return block.out(out.reshape(*rows.shape[:-1], out.shape[-1])).movedim(-2, block.dim)
