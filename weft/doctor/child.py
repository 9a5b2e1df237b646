"""Child: the process in which one rank runs one attempt at a suite. It may hang or die.

It streams JSON to its supervisor, so that no result is lost with it: `under_way` when a check begins, `check`
when it ends, `failed` for an exception, `end` when all ranks are done.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from weft.core.errors import InputError
from weft.doctor.suite import CheckContext, CheckSuite
from weft.doctor.suites import SUITES
from weft.run.spawn.signals import end_with_parent

STACK_SIGNAL = signal.SIGUSR1
RENDEZVOUS_SECONDS = 300.0
"""For all ranks to find the store; other machines may be started by hand."""
MACHINE = CheckSuite(name="machine", title="What the machine is", seconds=60)
"""Not one of SUITES: it joins no world, so that a report has it whatever fails."""

Emit = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """One attempt at one suite, the same for all ranks."""

    suite: str
    seconds: float
    device: str
    number: int = 0
    """Of the attempt in this examination; its children use it as the prefix of their store."""
    finished: tuple[str, ...] = ()


def run(spec: AttemptSpec, deadline: float, messages: Connection, output: Connection) -> None:
    """Run the attempt; the output of the process and its libraries goes to `output`."""
    _begin_session(output)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)  # the supervisor requests it before it kills the child

    def emit(**message: Any) -> None:
        messages.send_bytes(json.dumps(message, default=str).encode())

    try:
        ctx = _context(spec, deadline, emit)
        suite = next(suite for suite in (MACHINE, *SUITES) if suite.name == spec.suite)
        joins_world = suite is not MACHINE
        if joins_world:
            _join(spec, ctx, emit)
        for check in suite.checks(ctx):
            emit(check=asdict(check))
        if joins_world:
            _leave(ctx, emit)
        else:
            emit(end=True)
    except BaseException as error:
        stack = "".join(traceback.format_exception(error))
        emit(failed=f"{type(error).__name__}: {error}", traceback=stack)
        os._exit(1)  # NCCL's own exit may wait for peers


def _begin_session(output: Connection) -> None:
    os.setsid()  # the supervisor kills the whole session
    end_with_parent(signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)


def _context(spec: AttemptSpec, deadline: float, emit: Emit) -> CheckContext:
    import torch

    from weft.run import devices, world
    from weft.run.spawn.launch import usable_cores

    rank, ranks = world.place()
    if spec.device == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                "torch sees no GPU on this rank.",
                hint="Install a CUDA build of torch, or rehearse on CPUs with --device cpu.",
            )
        device = devices.device()
    else:
        device = torch.device("cpu")
    threads = max(1, usable_cores() * world.machines() // ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # 1 in the process that this one is forked from
    torch.set_num_threads(threads)
    return CheckContext(
        device=device,
        rank=rank,
        ranks=ranks,
        machines=world.machines(),
        dtype="bfloat16" if device.type == "cuda" else "float32",
        deadline=deadline,
        finished=frozenset(spec.finished),
        announce=lambda name: emit(under_way=name),
    )


def open_store() -> Any:
    """Return a client of the launcher's store; rank 0 serves it where the launcher does not."""
    from torch.distributed import rendezvous  # pyright: ignore[reportPrivateImportUsage]

    return next(rendezvous("env://", timeout=timedelta(seconds=RENDEZVOUS_SECONDS)))[0]


def _join(spec: AttemptSpec, ctx: CheckContext, emit: Emit) -> None:
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    from weft.run.groups import join_world

    emit(under_way="the ranks join", is_check=False)
    store = PrefixStore(f"doctor {spec.number}", open_store())
    # Longer than the limit, so that a rank that waits for another hangs instead of failing.
    join_world(timedelta(seconds=spec.seconds + 60), store=store, rank=ctx.rank, world_size=ctx.ranks)
    emit(under_way="", is_check=False)


def _leave(ctx: CheckContext, emit: Emit) -> None:
    """End with all ranks: peers may still read the memory of one that ends earlier."""
    import torch
    import torch.distributed as dist

    emit(under_way="the ranks leave", is_check=False)
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))  # over gloo, since NCCL may have failed
    emit(end=True)
    dist.destroy_process_group()
