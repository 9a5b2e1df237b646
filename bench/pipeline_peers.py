"""Two transformers of Diffusers, small and random, and who can run them: one process, weft and its peers.

A contender takes a transformer and gives one back that is called like it and answers like it on every rank.
Each engine has processes of its own, its *home*: cache-dit replaces Diffusers' native attention and Wan's
attention processor for a whole process, in which nobody else's model works after that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.peers import flash, flash_backward
from weft.core.mask import BlockMask
from weft.core.voxels import Extent
from weft.masks.grid import TokenGrid
from weft.masks.spec import mask_from_spec

DIM, TEXT, BLOCK = 64, 64, 64
Inputs = dict[str, Any]


@dataclass(frozen=True)
class PeerModel:
    """A transformer and the inputs of one call; `tile` and `window` are those of its sparse attention."""

    name: str
    grid: TokenGrid
    heads: int
    layers: int
    tile: Extent
    window: Extent

    def build(self) -> tuple[nn.Module, Inputs]:
        """The same weights and inputs in every process."""
        torch.manual_seed(0)
        return {"Wan": _wan, "Flux": _flux}[self.name](self)

    @property
    def sparse(self) -> str:
        tile, window = ("x".join(map(str, extent)) for extent in (self.tile, self.window))
        return f"sta:window={window},tile={tile}"

    @property
    def mask(self) -> BlockMask:
        return mask_from_spec(self.sparse, heads=self.heads, grid=self.grid, block=BLOCK)


def models(*, quick: bool) -> tuple[PeerModel, ...]:
    """A second for a forward in one thread; in a hurry a third of it."""
    heads, layers = (4, 1) if quick else (6, 2)
    return (
        PeerModel("Wan", TokenGrid(8, 16, 16), heads, 2 * layers, (4, 4, 4), (2, 2, 2)),
        PeerModel("Flux", TokenGrid(1, 48, 48, prefix=TEXT), heads, layers, (1, 8, 8), (1, 3, 3)),
    )


def _wan(model: PeerModel) -> tuple[nn.Module, Inputs]:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    grid = model.grid
    module = WanTransformer3DModel(
        num_attention_heads=model.heads,
        attention_head_dim=DIM,
        num_layers=model.layers,
        ffn_dim=4 * model.heads * DIM,
        text_dim=256,
        in_channels=16,
        out_channels=16,
    )
    return module.eval(), {
        "hidden_states": torch.randn(1, 16, grid.t, 2 * grid.h, 2 * grid.w),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, TEXT, 256),
    }


def _flux(model: PeerModel) -> tuple[nn.Module, Inputs]:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    grid = model.grid
    module = FluxTransformer2DModel(
        num_attention_heads=model.heads,
        attention_head_dim=DIM,
        num_layers=model.layers,
        num_single_layers=model.layers,
        in_channels=64,
        joint_attention_dim=256,
        pooled_projection_dim=128,
        axes_dims_rope=(16, 24, 24),
    )
    rows, columns = torch.meshgrid(torch.arange(grid.h), torch.arange(grid.w), indexing="ij")
    return module.eval(), {
        "hidden_states": torch.randn(1, grid.video, 64),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": torch.randn(1, TEXT, 256),
        "pooled_projections": torch.randn(1, 128),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1).float(),
        "txt_ids": torch.zeros(TEXT, 3),
    }


# One process

sdpa = F.scaled_dot_product_attention


class Attending(nn.Module):
    """A transformer with another self-attention: that of calls with as many keys as queries."""

    def __init__(self, module: nn.Module, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.attention = module, attention

    def forward(self, **inputs: Any) -> Any:
        F.scaled_dot_product_attention = self._call
        try:
            return self.module(**inputs)
        finally:
            F.scaled_dot_product_attention = sdpa

    def _call(self, query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
        own = query.shape[2] == key.shape[2]
        return self.attention(query, key, value) if own else sdpa(query, key, value, **rest)


def _without_attention(module: nn.Module, _: PeerModel) -> nn.Module:
    return Attending(module, lambda query, _key, _value: query)


def masked(module: nn.Module, model: PeerModel) -> nn.Module:
    """What sparse attention is to give: dense attention under the mask, whose tokens are in voxel order."""
    at = torch.as_tensor(model.grid.voxels(model.tile).order).argsort()
    tiles = torch.as_tensor(model.mask.tiles).repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    allowed = tiles[:, at][:, :, at][None]
    return Attending(module, lambda q, k, v: sdpa(q, k, v, attn_mask=allowed))


# Diffusers 0.42.1


def diffusers(module: Any, backend: str = "native", **degrees: Any) -> nn.Module:
    from diffusers.models._modeling_parallel import ContextParallelConfig

    torch.accelerator.device_count = lambda: 1  # it takes the rank modulo that, which is 0 on a CPU
    module.set_attention_backend(backend)
    module.enable_parallelism(config=ContextParallelConfig(**degrees))
    return module


def _diffusers_ring(module: nn.Module, _: PeerModel) -> nn.Module:
    """With torch's CPU kernel where Diffusers names the CUDA one; it takes and gives the same."""
    import diffusers.models.attention_dispatch as dispatch

    dispatch._native_flash_attention_forward_op = _block
    dispatch._native_flash_attention_backward_op = _block_backward
    return diffusers(module, "_native_flash", ring_degree=2)


def _block(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **rest: Any
) -> tuple[Tensor, Tensor]:
    if rest["_save_ctx"]:
        ctx.save_for_backward(query, key, value)
    out, lse = flash(*(x.transpose(1, 2) for x in (query, key, value)), 0.0, False)  # noqa: FBT003
    return out.transpose(1, 2), lse.transpose(1, 2)


def _block_backward(  # noqa: PLR0913 - as Diffusers calls it
    _: Any, grad_out: Tensor, *, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> list[Tensor]:
    tensors = [x.transpose(1, 2) for x in (grad_out, query, key, value, out, lse)]
    return [grad.transpose(1, 2) for grad in flash_backward(*tensors, 0.0, False)]  # noqa: FBT003


# cache-dit 1.5.3


def _cache_dit(module: nn.Module, _: PeerModel) -> nn.Module:
    from cache_dit import ParallelismConfig
    from cache_dit.distributed.dispatch import enable_parallelism

    return enable_parallelism(module, ParallelismConfig(ulysses_size=2))


# weft


def _weft(module: nn.Module, _: PeerModel) -> nn.Module:
    from weft import parallelize

    return parallelize(module)


def _weft_sparse(module: nn.Module, model: PeerModel) -> nn.Module:
    from weft import parallelize

    return parallelize(module, sparse=f"{model.sparse},block={BLOCK},dense_steps=0,recall=0")


def _weft_without_group(module: nn.Module, model: PeerModel) -> nn.Module:
    if dist.is_initialized():
        dist.destroy_process_group()
    return _weft(module, model)


@dataclass(frozen=True)
class Contender:
    home: str
    ranks: int
    build: Callable[[nn.Module, PeerModel], nn.Module]


ALONE, REST, ALONE_TOO = "one process", "one process, its attention left out", "one process (no group)"
WEFT, SPARSE, ONE_RANK, NO_GROUP = "weft", "weft sparse", "weft on one rank", "weft without a process group"
ULYSSES, RING, STOCK_RING = "Diffusers Ulysses", "Diffusers ring (CPU kernel)", "Diffusers ring"
CACHE = "cache-dit Ulysses"
CONTENDERS = {
    ALONE: Contender("one", 1, lambda module, _: module),
    REST: Contender("one", 1, _without_attention),
    ONE_RANK: Contender("one", 1, _weft),
    NO_GROUP: Contender("bare", 1, _weft_without_group),
    ALONE_TOO: Contender("bare", 1, lambda module, _: module),
    ULYSSES: Contender("diffusers", 2, lambda module, _: diffusers(module, ulysses_degree=2)),
    RING: Contender("diffusers", 2, _diffusers_ring),
    STOCK_RING: Contender("diffusers", 2, lambda module, _: diffusers(module, ring_degree=2)),
    CACHE: Contender("cache-dit", 2, _cache_dit),
    WEFT: Contender("weft", 2, _weft),
    SPARSE: Contender("weft", 2, _weft_sparse),
}
PEERS = (ULYSSES, RING, STOCK_RING, CACHE)
