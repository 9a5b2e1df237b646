"""The peers, each as a function of this rank's q, k, v [B, H, tokens / ranks, D], on CPU and gloo.

A peer is built anew for every case, with process groups of its own: one that raises half way leaves
messages behind, and the next collective on that group would wait for ever. Each takes its inputs in
the memory order it is written for, so that nobody pays for a copy that its own users would not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Peer:
    name: str
    order: str  # of heads and tokens in memory: "BSHD" or "BHSD"
    build: Callable[[], Attention]


def _tokens_first(attention: Callable[..., Tensor]) -> Attention:
    """For peers that speak [B, S, H, D]: on memory in that order, both transposes are free."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    return call


# yunchang 0.6.4


def _yunchang_groups(ulysses: int, ring: int) -> tuple[Any, Any]:
    import yunchang.kernels.attention as kernels
    from yunchang.globals import PROCESS_GROUP, set_seq_parallel_pg

    # Stock TORCH_FLASH names the CUDA operator; the CPU one takes the same arguments.
    kernels._scaled_dot_product_flash_attention = flash
    set_seq_parallel_pg(ulysses, ring, dist.get_rank(), dist.get_world_size())
    return PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG


def _yunchang_ulysses() -> Attention:
    _yunchang_groups(dist.get_world_size(), 1)
    from yunchang import LongContextAttention
    from yunchang.kernels import AttnType

    layer = LongContextAttention(ring_impl_type="basic", attn_type=AttnType.TORCH_FLASH)
    return _tokens_first(layer)


def _yunchang_ulysses_class() -> Attention:
    """yunchang's class for Ulysses alone.

    With a torch kernel it also runs a ring, over the default group and so over other heads' keys.
    """
    group, _ = _yunchang_groups(dist.get_world_size(), 1)
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    return _tokens_first(UlyssesAttention(group, attn_type=AttnType.TORCH_FLASH))


def _yunchang_ring(kernel: str) -> Attention:
    _, group = _yunchang_groups(1, dist.get_world_size())
    from yunchang import ring_flash_attn_func
    from yunchang.kernels import AttnType

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_flash_attn_func(q, k, v, group=group, attn_type=AttnType[kernel])

    return _tokens_first(call)


# Diffusers 0.42.1


def _diffusers(**degrees: Any) -> Attention:
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
    from torch.distributed.device_mesh import init_device_mesh

    context = ContextParallelConfig(**degrees)
    mesh = init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dispatch_attention_fn(q, k, v, backend=AttentionBackendName.NATIVE, parallel_config=config)

    return _tokens_first(call)


# torch 2.13


def _flash_block(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, **_: Any) -> Any:
    return flash(q, k, v, 0.0, is_causal)


def _flash_block_backward(
    *, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, **rest: Any
) -> Any:
    lse, is_causal = rest["logsumexp"], rest["is_causal"]
    return flash_backward(grad_out, query, key, value, out, lse, 0.0, is_causal)


class _TorchRing(torch.autograd.Function):
    """torch's two templates as one function: it only registers them for the CUDA kernels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, rotate: str) -> Tensor:
        ring = _ring_templates(rotate)
        out, lse = ring._templated_ring_attention(group, 2, _flash_block, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.rotate = group, rotate
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        ring = _ring_templates(ctx.rotate)
        grads = ring._templated_ring_attention_backward(
            ctx.group, 2, _flash_block_backward, grad_out, "grad_out", *ctx.saved_tensors, is_causal=False
        )
        return (*grads[:3], None, None)


def _ring_templates(rotate: str) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring._cp_options.enable_load_balance = False  # it is for causal masks
    ring._cp_options.rotate_method = ring._RotateMethod[rotate]
    return ring


def _torch_ring(rotate: str) -> Attention:
    group = dist.new_group()
    return lambda q, k, v: _TorchRing.apply(q, k, v, group, rotate)  # type: ignore[return-value]


def _torch_public() -> Attention:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = torch.zeros(q.shape[2] * mesh.size())  # it wants something to split
        with context_parallel(mesh, buffers=[split], buffer_seq_dims=[0]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return call


def peers() -> tuple[Peer, ...]:
    """Every peer that can at least be asked; who is wrong or raises is found out by asking."""
    ranks = dist.get_world_size()
    return (
        Peer("yunchang Ulysses (CPU kernel)", "BSHD", _yunchang_ulysses),
        Peer("yunchang Ring (CPU kernel)", "BSHD", lambda: _yunchang_ring("TORCH_FLASH")),
        Peer("yunchang Ring (stock TORCH_MATH)", "BSHD", lambda: _yunchang_ring("TORCH_MATH")),
        Peer("yunchang UlyssesAttention", "BSHD", _yunchang_ulysses_class),
        Peer("Diffusers Ulysses", "BSHD", lambda: _diffusers(ulysses_degree=ranks)),
        Peer(
            "Diffusers Ulysses anything",
            "BSHD",
            lambda: _diffusers(ulysses_degree=ranks, ulysses_anything=True),
        ),
        Peer("Diffusers Ring", "BSHD", lambda: _diffusers(ring_degree=ranks)),
        Peer("torch ring (all-gather)", "BHSD", lambda: _torch_ring("ALL_GATHER")),
        Peer("torch ring (all-to-all)", "BHSD", lambda: _torch_ring("ALL_TO_ALL")),
        Peer("torch context_parallel", "BHSD", _torch_public),
    )
