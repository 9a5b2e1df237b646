"""`weft.attention`: exact attention over a sequence that is split over ranks."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext

from weft.core.errors import InputError, WeftError
from weft.core.layout import Layout, Runs
from weft.core.mask import BlockMask
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.choose import Plan
from weft.run.agree import agree, count_rows, refuse
from weft.run.call import Options, Tensors, facts, schedule_for
from weft.run.execute import Executor
from weft.run.kernels import choose as choose_kernel
from weft.run.op import attention_op, forget, register
from weft.run.world import World, axes_of, world_of

Tokens = int | Layout | tuple[int, tuple[Runs, ...]] | None
EXECUTORS = 1024  # of each world: some 20 steps of a 50-layer model whose masks all differ


def attention(  # noqa: PLR0913 - the one call users make; each option is a word of theirs
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: BlockMask | None = None,
    plan: str | Plan | Schedule = "auto",
    mesh: Any = None,
    scale: float | None = None,
    tokens: Tokens = None,
    kv_tokens: Tokens = None,
    prefix: int = 0,
    suffix: int = 0,
    impl: str = "auto",
    timeout: float = 60.0,
    topology: Topology | None = None,
) -> Tensor:
    """Attention of this rank's queries to everybody's keys: [B, H, local tokens, D] in and out.

    tokens, kv_tokens   the whole sequence's length (then shards are as even as can be) or its Layout (or
                        that one's size and shards, as constants for torch.compile). Left out, the mask
                        tells; without a mask the ranks ask each other in each call.
    prefix, suffix      tokens at the ends of every rank's q, k, v that are the same on all ranks (text).
                        Each rank gets their output; their gradients are partial and sum over the ranks.
    plan                auto; ulysses, ring, zigzag, gather, usp:UxR, gather:UxR, each also with +balanced
                        or +cuts; or a Plan or Schedule.
    mesh                a process group, DeviceMesh or weft.Mesh; all ranks by default.
    timeout             seconds that a rank waits for another before it raises.
    topology            links and speeds for plan="auto"; by default the TOML that $WEFT_TOPOLOGY names.
    """
    # Under torch.compile sizes and scale may be symbols: index() and hex() make them constants again.
    shapes = [tuple(index(size) for size in x.shape) for x in (q, k, v)]
    exact_scale = float(scale).hex() if isinstance(scale, int | float) else scale
    number = _executor(
        *shapes, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        mask, plan, tokens, kv_tokens, prefix, suffix, impl, topology, exact_scale, mesh, timeout,
    )  # fmt: skip
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    scale = float(scale)
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return attention_op(q, k, v, number, scale, keep)[0]


def _executor(*given: Any) -> int:
    """The number of this call's executor. A new one is agreed on by all ranks before anything moves.

    Under torch.compile this runs once, while tracing, and may be given single plain values only.
    """
    (q, k, v), dtypes, devices = given[:3], given[3:6], given[6:9]
    *rest, exact_scale, mesh, timeout = given[9:]
    tensors = Tensors(q, k, v, dtypes, devices)
    rest[2:4] = (_layout(*given) if isinstance(given, tuple) else given for given in rest[2:4])
    options = Options(*rest, scale=exact_scale)
    with suppress(TypeError, ValueError):  # anything else is refused below, with the others told
        options = replace(options, scale=float.fromhex(exact_scale))
    if not (isinstance(timeout, int | float) and timeout > 0):
        raise InputError(f"timeout={timeout!r} is no time to wait.", hint="Give seconds, above 0.")
    world = world_of(mesh, float(timeout))
    comm = world.comm
    try:
        tensors.check()
        options.check()
    except WeftError as error:
        refuse(comm, error)
        raise
    # Rows may change on some ranks only, so a look-up by local shapes could leave others waiting.
    counts = None if options.tells_tokens else count_rows(comm, tensors.q[2], tensors.k[2])
    key = (tensors, options, axes_of(mesh), counts)
    if key in world.compiled:
        world.compiled[key] = world.compiled.pop(key)  # to the end: it was used last
    else:
        try:
            schedule = schedule_for(
                tensors, options, rank=comm.rank, ranks=comm.size, counts=counts, axes=axes_of(mesh)
            )
            kernel = choose_kernel(options.impl, tensors.dtype, str(tensors.devices[0]))
        except WeftError as error:
            refuse(comm, error)
            raise
        agreed = facts(schedule, tensors, options, kernel.name)
        agree(comm, agreed)
        executor = Executor(schedule, comm, kernel, name=str(agreed), arena=world.arena)
        _make_room(world)
        number = register(executor)
        if TracingContext.try_get() is not None:
            return number  # a compiled graph holds this number for ever, so nobody may forget it
        world.compiled[key] = number
    return world.compiled[key]


# What torch.compiler.assume_constant_result does; its import alone costs every rank two seconds.
_executor._dynamo_marked_constant = True  # type: ignore[attr-defined]


_layout = lru_cache(1024)(Layout)


def _make_room(world: World) -> None:
    """Masks that change from step to step make executors without end; the oldest ones go."""
    while len(world.compiled) >= EXECUTORS:
        forget(world.compiled.pop(next(iter(world.compiled))))


def let_go(world: World, mask: BlockMask) -> None:
    """What was compiled for a mask that will not come again; all ranks must say so at the same time."""
    old = [key for key in world.compiled if key[1].mask is not None and key[1].mask.digest == mask.digest]
    for key in old:
        forget(world.compiled.pop(key))
