"""`weft.attention`: exact attention over a sequence that is split over ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import AgreementError, InputError, WeftError
from weft.core.layout import Layout, Runs
from weft.core.mask import BlockMask
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.choose import Plan
from weft.plan.place import Planned
from weft.run import opaque
from weft.run.agree import agree, count_rows, refuse
from weft.run.call import Call, Counts, check_mask, facts, schedule_for, work_of
from weft.run.derivatives import Derived, widened
from weft.run.devices import check_devices
from weft.run.execute import Executor
from weft.run.kernels import choose as choose_kernel
from weft.run.kernels import tuning
from weft.run.kernels.parity import judge
from weft.run.op import attention_op, forget, is_plain, register
from weft.run.transforms import check_tensors, check_transforms, is_transformed
from weft.run.world import World, axes_of, world_of

Tokens = int | Layout | tuple[int, tuple[Runs, ...]] | None
EXECUTORS = 1024  # of each world: some 20 steps of a 50-layer model whose masks all differ
SIZES = ("tokens", "kv_tokens", "prefix", "suffix")
OPTIONS = ("mask", "plan", *SIZES, "backend", "topology", "scale", "mesh", "timeout")
RUNS = 64  # of a layout that a compiled graph takes as numbers
MASKS = 8  # of each executor for any mask: those of the branches of guidance, and of the step before


def attention(  # noqa: PLR0913 - the one call users make; each option is a word of theirs
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: BlockMask | None = None,
    plan: str | Plan | Planned | Schedule = "auto",
    mesh: Any = None,
    scale: float | None = None,
    tokens: Tokens = None,
    kv_tokens: Tokens = None,
    prefix: int = 0,
    suffix: int = 0,
    backend: str = "auto",
    timeout: float = 60.0,
    topology: Topology | None = None,
) -> Tensor:
    """Attention of this rank's queries to everybody's keys: [B, H, local tokens, D] in and out.

    tokens, kv_tokens   the whole sequence's length (then shards are as even as can be) or its Layout (or
                        that one's size and shards, as constants for torch.compile). Left out, the mask
                        tells; without a mask the ranks ask each other in each call, for which the host waits.
    prefix, suffix      tokens at the ends of every rank's q, k, v that are the same on all ranks (text).
                        Each rank gets their output; their gradients are partial and sum over the ranks.
    plan                auto; ulysses, ring, zigzag, gather, usp:UxR, gather:UxR, each also with +balanced
                        or +cuts; or a Plan or Schedule.
    backend             the kernel: auto, exact (float32 inside: the same on any number of ranks), or one of
                        `weft.core.backends`.
    mesh                a process group, DeviceMesh or weft.Mesh; all ranks by default.
    timeout             seconds that a rank waits for another before it raises.
    topology            links and speeds for plan="auto"; by default the TOML that $WEFT_TOPOLOGY names.
    """
    options = (mask, plan, tokens, kv_tokens, prefix, suffix, backend, topology)
    if torch.compiler.is_compiling():
        return _compiled((q, k, v), options, scale, mesh, timeout)
    plain, transformed = is_plain(q, k, v), is_transformed()
    if not plain or transformed:
        check_tensors(q, k, v)
        check_transforms("weft.attention")
    dtypes, devices = (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device)
    call = Call(q.shape, k.shape, v.shape, dtypes, devices, *options, scale)
    executor = _executor(call, mesh, timeout)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if transformed:
        wide = partial(_wide_executor, call, executor.schedule, scale, mesh, timeout)
        return Derived(executor, scale, torch.is_grad_enabled(), mesh, wide)(q, k, v)
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if plain and not keep:
        return executor.forward(q, k, v, scale, keep=False)[0]
    return attention_op(q, k, v, executor.number, scale, keep)[0]


def _executor(call: Call, mesh: Any, timeout: float) -> Executor:
    """Return the executor of a call. A new one is agreed on by all ranks before anything moves."""
    if not (isinstance(timeout, int | float) and timeout > 0):
        raise InputError(f"timeout must be > 0, got {timeout!r}.", hint="Give seconds.")
    world = world_of(mesh, float(timeout))
    comm = world.comm
    counts, axes = None, axes_of(mesh)
    mask = call.mask
    if call.serves_any_mask:
        call = call._replace(mask=None)
    try:
        # Rows may change on some ranks only, so a look-up by local shapes could leave others waiting.
        if not call.tells_tokens:
            call.tensors.check()
            counts = count_rows(comm, call.q[2], call.k[2])
        key = (call, axes, counts)
        executor = world.compiled.get(key)
    except TypeError:
        executor, key = None, None  # an option that has no hash: it is refused below
    except WeftError as error:
        refuse(comm, error)
        raise
    if executor is None:
        executor = _new_executor(call, world, counts, axes)
        if key is not None:
            _make_room(world)
            world.compiled[key] = executor
    elif len(world.compiled) > EXECUTORS // 2:
        world.compiled[key] = world.compiled.pop(key)  # to the end: it was used last
    if not call.serves_any_mask:
        return executor
    return _for_mask(executor, mask, is_agreed=isinstance(call.plan, Planned))


def _wide_executor(call: Call, schedule: Schedule, scale: float, mesh: Any, timeout: float) -> Executor:
    """Return the executor of a call's tangent, which has twice its head dim."""
    q, k = ((*shape[:3], 2 * shape[3]) for shape in (call.q, call.k))
    mask = call.mask if call.serves_any_mask else None
    options = (mask, widened(schedule), None, None, 0, 0, call.backend, None, scale)
    return _executor(Call(q, k, k, call.dtypes, call.devices, *options), mesh, timeout)


def _for_mask(executor: Executor, mask: BlockMask | None, *, is_agreed: bool) -> Executor:
    """Return an executor for any mask with the tiles of this one; a planner has compared it already."""
    known = executor.masked
    try:
        check_mask(executor.schedule, mask)
    except WeftError as error:
        refuse(executor.comm, error)
        raise
    assert mask is not None
    found = known.pop(mask, None)
    if found is None:
        if not is_agreed:
            agree(executor.comm, {"mask": mask.digest}, "masks")
        found = executor.for_mask(mask)
        register(found)
        while len(known) >= MASKS:
            forget(known.pop(next(iter(known))))
    known[mask] = found  # at the end: it was used last
    return found


def _new_executor(call: Call, world: World, counts: Counts | None, axes: str | None) -> Executor:
    comm, tensors, device = world.comm, call.tensors, call.devices[0]
    if device.type == "cuda":
        check_devices(comm, device)
    try:
        tensors.check()
        options = call.options.checked()
        schedule = schedule_for(tensors, options, rank=comm.rank, ranks=comm.size, counts=counts, axes=axes)
        tested = judge(comm, device) if device.type == "cuda" else None
        work = work_of(schedule, options.scale)
        kernel = choose_kernel(options.backend, tensors.dtype, str(device), work, tested)
    except AgreementError:
        raise  # a meeting of all ranks raised it, so nobody waits for this one
    except WeftError as error:
        refuse(comm, error)
        raise
    agreed = facts(schedule, tensors, options, kernel.name)
    notes = agree(comm, agreed, note=tuning.request(comm, schedule, kernel, device))
    comm.warm_up(device)
    tuning.settle(comm, schedule, kernel, device, notes)
    executor = Executor(schedule, comm, kernel, name=str(agreed), arena=world.arena)
    register(executor)
    return executor


def _compiled(
    qkv: tuple[Tensor, Tensor, Tensor], options: tuple[Any, ...], scale: Any, mesh: Any, timeout: float
) -> Tensor:
    """Leave a call to the run of a graph; sizes may be symbols there, the other options are constants."""
    given: dict[str, Any] = dict(zip(OPTIONS, (*options, scale, mesh, timeout), strict=True))
    names, numbers = "", []
    for name in SIZES:
        if (sizes := _sizes(given[name])) is not None:
            names, given[name] = f"{names} {name}{sizes[0]}", None
            numbers += sizes[1]
    for name in ("scale", "timeout"):  # in hex they are no symbols, unlike by float()
        if isinstance(given[name], int | float):
            given[name] = float(given[name]).hex()
    return opaque.call(_constant_callee(names, *given.values()), qkv, numbers=numbers)


def _sizes(tokens: Any) -> tuple[str, list[int]] | None:
    """Return an option as numbers, with the runs of each rank if it is a layout that has few."""
    if isinstance(tokens, int):
        return "", [tokens]
    if isinstance(tokens, Layout):
        tokens = None if tokens.padding else (tokens.size, tokens.shards)
    if not isinstance(tokens, tuple) or sum(len(shard) for shard in tokens[1]) > RUNS:
        return None
    runs = [size for shard in tokens[1] for run in shard for size in run]
    return ":" + ",".join(str(len(shard)) for shard in tokens[1]), [tokens[0], *runs]


class _Constant:
    """A call of a compiled graph, but for its tensors and sizes."""

    def __init__(self, names: str, options: dict[str, Any]) -> None:
        self.names, self.options = names.split(), options

    def called(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        numbers, options = iter(rest[-1]), dict(self.options)
        for each in self.names:
            name, _, runs = each.partition(":")
            options[name] = next(numbers)
            if runs:
                shards = [[(next(numbers), next(numbers)) for _ in range(int(n))] for n in runs.split(",")]
                options[name] = options[name], tuple(map(tuple, shards))
        return attention(q, k, v, **options)


_constants: list[_Constant] = []
"""A compiled graph has their numbers for ever."""


def _constant_callee(names: str, *values: Any) -> int:
    """Number what a compiled graph calls; torch.compile runs this while it traces, with plain values only."""
    options: dict[str, Any] = dict(zip(OPTIONS, values, strict=True))
    mesh = options["mesh"]
    for name in ("scale", "timeout"):
        if isinstance(options[name], str):
            options[name] = float.fromhex(options[name])
    options["mesh"] = getattr(mesh, "real_obj", mesh)  # of a process group, torch.compile has a stand-in
    _constants.append(_Constant(names, options))
    return opaque.number_of(_constants[-1])


# What torch.compiler.assume_constant_result does; its import alone costs every rank two seconds.
_constant_callee._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _make_room(world: World) -> None:
    """Masks that change from step to step make executors without end; the oldest ones go."""
    while len(world.compiled) >= EXECUTORS:
        forget(world.compiled.pop(next(iter(world.compiled))))
