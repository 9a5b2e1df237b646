"""`weft.attention`: exact attention over a sequence that is split over ranks.

What a call of one rank does not need (graphs, derivatives of `torch.func`, comparing ranks, GPU kernels) is
imported where it is used.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.core.errors import AgreementError, InputError, WeftError
from weft.core.mask import BlockMask
from weft.run.call import AttentionCall, Counts, check_layout, check_mask, facts_of, schedule_for
from weft.run.execute import Executor
from weft.run.kernels import choose as choose_kernel
from weft.run.transforms import check_tensors, check_transforms, is_plain, is_transformed
from weft.run.world import MeshLike, World, axes_of, world_of

if TYPE_CHECKING:
    from weft.core.layout import Layout
    from weft.core.schedule import Schedule
    from weft.core.topology import Topology
    from weft.masks.grid import TokenGrid
    from weft.plan.choose import Plan
    from weft.plan.place import Planned
    from weft.run.comm import Comm
    from weft.run.kernels import AttentionKernel

    Options = tuple[
        str | Plan | Planned | Schedule, int | Layout | None, int | Layout | None, int, int, str,
        Topology | None, float | None
    ]  # fmt: skip
    """The fields of an AttentionCall from `plan` on."""

MAX_EXECUTORS = 1024
"""Of a world: some 20 steps of a 50-layer model whose masks all differ."""
MAX_MASKS = 8
"""Masks that an executor caches: those of both branches of guidance, in this step and the last."""


def attention(  # noqa: PLR0913 - the one call users make; each option is a word of theirs
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: BlockMask | str | None = None,
    grid: TokenGrid | tuple[int, int, int] | None = None,
    layout: str = "bhsd",
    plan: str | Plan | Planned | Schedule = "auto",
    mesh: MeshLike = None,
    scale: float | None = None,
    tokens: int | Layout | None = None,
    kv_tokens: int | Layout | None = None,
    prefix: int = 0,
    suffix: int = 0,
    backend: str = "auto",
    timeout: float = 60.0,
    topology: Topology | None = None,
) -> Tensor:
    """Attend this rank's queries to the keys of all ranks: [B, H, local tokens, D] in and out.

    mask, grid          a BlockMask over the whole sequence, or a name as in `weft.mask`, which needs the grid
                        of the video: a `weft.TokenGrid`, or (t, h, w) between prefix and suffix.
    layout              bhsd, or bshd for [B, local tokens, H, D] in and out, read by strides without a copy.
    tokens, kv_tokens   length of the whole sequence (shards are then as even as possible) or its Layout.
                        By default that of the mask; without a mask the ranks exchange their lengths in each
                        call, which blocks the host.
    prefix, suffix      tokens at the ends of every rank's q, k, v that are the same on all ranks (text).
                        Each rank gets their output; their gradients are partial and sum over the ranks.
    plan                auto; ulysses, ring, zigzag, gather, usp:UxR, gather:UxR, each also with +balanced
                        or +cuts; or a Plan or Schedule.
    backend             the kernel: auto, exact (float32 inside: the same on any number of ranks), or one of
                        `weft.core.backends`.
    mesh                a process group, DeviceMesh or weft.Mesh; all ranks by default.
    timeout             seconds that a rank waits for another before it raises.
    topology            links and speeds for plan="auto"; by default the TOML file in $WEFT_TOPOLOGY.

    >>> q, k, v = torch.randn(3, 1, 4, 60, 8)  # on one rank, its tokens are all
    >>> attention(q, k, v, mask="sta:window=1x3x3", grid=(3, 4, 5)).shape
    torch.Size([1, 4, 60, 8])
    """
    if layout != "bhsd":
        check_layout(layout, q, k, v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    options = (plan, tokens, kv_tokens, prefix, suffix, backend, topology, scale)
    out = _attend(q, k, v, mask, grid, options, mesh, timeout)
    return out if layout == "bhsd" else out.transpose(1, 2)


def _attend(  # noqa: PLR0913 - as above
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask | str | None,
    grid: TokenGrid | tuple[int, int, int] | None,
    options: Options,
    mesh: MeshLike,
    timeout: float,
) -> Tensor:
    if torch.compiler.is_compiling():
        from weft.run.compiled import attention_in_graph

        return attention_in_graph((q, k, v), (mask, *options, grid, mesh, timeout))
    plain, transformed = is_plain(q, k, v), is_transformed()
    if not plain or transformed:
        check_tensors(q, k, v)
        check_transforms("weft.attention")
    if isinstance(mask, str) or grid is not None:
        mask = _mask_by_name(mask, grid, (q.shape[1], *options[3:5]), mesh, timeout)
    dtypes, devices = (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device)
    call = AttentionCall(q.shape, k.shape, v.shape, dtypes, devices, mask, *options)
    executor = _executor_for(call, mesh, timeout)
    scale = 1 / math.sqrt(q.shape[-1]) if call.scale is None else float(call.scale)
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not keep and not transformed:
        return executor.forward(q, k, v, scale, keep=False)[0]
    from weft.run.derivatives import Derived

    wide = partial(_wide_executor, call, executor.schedule, scale, mesh, timeout) if transformed else None
    return Derived(executor, scale, keep or torch.is_grad_enabled(), mesh, wide)(q, k, v)


def _mask_by_name(
    mask: BlockMask | str | None,
    grid: TokenGrid | tuple[int, int, int] | None,
    sizes: tuple[int, int, int],
    mesh: MeshLike,
    timeout: float,
) -> BlockMask:
    """Return the mask of a name; `sizes` are the heads of the tensors, and their prefix and suffix."""
    from weft.run.named_mask import named_mask

    try:
        return named_mask(mask, grid, *sizes)
    except WeftError as error:
        _abort(world_of(mesh, timeout).comm, error)
        raise


def _executor_for(call: AttentionCall, mesh: MeshLike, timeout: float) -> Executor:
    """Return the executor of a call. All ranks agree on a new one before anything is sent."""
    if not (isinstance(timeout, int | float) and timeout > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"timeout must be > 0, got {timeout!r}.", hint="Give seconds.")
    world = world_of(mesh, float(timeout))
    comm = world.comm
    counts, axes = None, axes_of(mesh)
    mask, named = call.mask, isinstance(call.plan, str)
    any_mask = not named and call.serves_any_mask
    if any_mask:
        call = call._replace(mask=None)
    try:
        # Rows may change on some ranks only, so a look-up by local shapes could leave others waiting.
        if named and mask is None and call.tokens is None:  # no option gives the length of the sequence
            call.check_tensors()
            counts = _count_rows(comm, call.q[2], call.k[2])
        key = (call, axes, counts)
        executor = world.executors.get(key)
    except TypeError:
        executor, key = None, None  # an option that has no hash: `check_options` raises
    except WeftError as error:
        _abort(comm, error)
        raise
    if executor is None:
        executor = _new_executor(call, world, counts, axes)
        if key is not None:
            while len(world.executors) >= MAX_EXECUTORS:  # masks may change from step to step without end
                world.executors.pop(next(iter(world.executors)))
            world.executors[key] = executor
    elif key is not None and len(world.executors) > MAX_EXECUTORS // 2:
        world.executors[key] = world.executors.pop(key)  # to the end: it was used last
    return _executor_for_mask(executor, call.plan, mask) if any_mask else executor


def _wide_executor(
    call: AttentionCall, schedule: Schedule, scale: float, mesh: MeshLike, timeout: float
) -> Executor:
    """Return the executor of a call's tangent, which has twice its head dim."""
    from weft.run.derivatives import widened

    q, k = ((*shape[:3], 2 * shape[3]) for shape in (call.q, call.k))
    mask = call.mask if call.serves_any_mask else None
    options = (mask, widened(schedule), None, None, 0, 0, call.backend, None, scale)
    return _executor_for(AttentionCall(q, k, k, call.dtypes, call.devices, *options), mesh, timeout)


def _executor_for_mask(
    executor: Executor, plan: str | Plan | Planned | Schedule, mask: BlockMask | None
) -> Executor:
    """Return an executor for any mask with the tiles of this one; a planner has compared it already."""
    cache, comm = executor.masked, executor.comm
    try:
        check_mask(executor.schedule, mask)
    except WeftError as error:
        _abort(comm, error)
        raise
    assert mask is not None
    masked = cache.pop(mask, None)
    if masked is None:
        from weft.plan.place import Planned

        if comm.size > 1 and not isinstance(plan, Planned):
            from weft.run.agree import agree

            agree(comm, {"mask": f"{mask!r} {mask.digest}"}, "masks")
        masked = executor.for_mask(mask)
        while len(cache) >= MAX_MASKS:
            cache.pop(next(iter(cache)))
    cache[mask] = masked  # at the end: it was used last
    return masked


def _new_executor(call: AttentionCall, world: World, counts: Counts | None, axes: str | None) -> Executor:
    comm, device = world.comm, call.devices[0]
    spec, check = None, None
    if device.type == "cuda":
        from weft.run.devices import check_devices

        check_devices(comm, device)
    try:
        call.check_tensors()
        call.check_options()
        schedule = schedule_for(call, rank=comm.rank, ranks=comm.size, counts=counts, axes=axes)
        if device.type == "cuda":
            from weft.run.kernels.parity import parity_check
            from weft.run.kernels.rules import KernelSpec

            spec, check = KernelSpec.of(schedule, call.scale), parity_check(comm, device)
        kernel = choose_kernel(call.backend, call.dtype, str(device), spec, check)
    except AgreementError:
        raise  # every rank raises it: no rank waits for this one
    except WeftError as error:
        _abort(comm, error)
        raise
    name = _agree(call, schedule, kernel, comm) if comm.size > 1 or "triton" in kernel.name else ""
    return Executor(schedule, comm, kernel, name=name, arena=world.arena)


def _agree(call: AttentionCall, schedule: Schedule, kernel: AttentionKernel, comm: Comm) -> str:
    """Compare a new call over all ranks, connect them, tune its Triton kernels, and return its name."""
    from weft.run.agree import agree

    facts, device = facts_of(call, schedule, kernel.name), call.devices[0]
    if "triton" not in kernel.name:  # ranks with other kernels do not agree
        agree(comm, facts)
        comm.warm_up(device)
        return str(facts)
    from weft.run.kernels import tuning

    notes = agree(comm, facts, note=tuning.request(comm, schedule, kernel, device))
    comm.warm_up(device)
    tuning.tune(comm, schedule, kernel, device, notes)
    return str(facts)


def _count_rows(comm: Comm, q_rows: int, kv_rows: int) -> Counts:
    if comm.size == 1:
        return ((q_rows, kv_rows),)
    from weft.run.agree import count_rows

    return count_rows(comm, q_rows, kv_rows)


def _abort(comm: Comm, error: WeftError) -> None:
    """Make the other ranks raise too: they may be waiting to agree."""
    if comm.size > 1:
        from weft.run.agree import abort

        abort(comm, error)
