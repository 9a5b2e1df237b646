"""Child: the process in which one rank runs one attempt at a part. It may hang or die.

What it does is streamed to its keeper as JSON, so that nothing is lost with it: `under_way` when a check
begins, `check` when it ends, `failed` for an exception, `end` when all ranks are through.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from weft.core.errors import InputError
from weft.doctor.part import Part, Site
from weft.doctor.parts import PARTS

PARENT_DEATH_SIGNAL = 1  # prctl
STACK_SIGNAL = signal.SIGUSR1
MEETING_SECONDS = 300.0
"""For all ranks to find the store; other machines may be started by hand."""
FAULTS = ("crash", "hang", "wrong")
MACHINE = Part(name="machine", title="What the machine is", function="machine:checks", seconds=60)
"""Not one of PARTS: it joins no world, so that a report has it whatever fails."""

Emit = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Order:
    """One attempt at one part, the same for all ranks."""

    part: str
    seconds: float
    device: str
    number: int = 0
    """Of the orders of this examination; the children of one order meet under it."""
    is_first: bool = True
    finished: tuple[str, ...] = ()
    fault: str = ""


def part_of(name: str) -> Part:
    return next(part for part in (MACHINE, *PARTS) if part.name == name)


def run(order: Order, deadline: float, messages: Connection, output: Connection) -> None:
    """Run the attempt; what the process and its libraries write goes to `output`."""
    _begin_session(output)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)  # by which the keeper asks where it is, before it kills it

    def emit(**message: Any) -> None:
        messages.send_bytes(json.dumps(message, default=str).encode())

    try:
        site = _site(order, deadline, emit)
        if order.part != MACHINE.name:
            _join(order, site, emit)
        for check in part_of(order.part).checks(site):
            emit(check=asdict(check))
        if order.part != MACHINE.name:
            _leave(site, emit)
        else:
            emit(end=True)
    except BaseException as error:
        stack = "".join(traceback.format_exception(error))
        emit(failed=f"{type(error).__name__}: {error}", traceback=stack)
        os._exit(1)  # NCCL's own way out may wait for peers


def _begin_session(output: Connection) -> None:
    os.setsid()  # the keeper kills it with all that it has started
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)


def _site(order: Order, deadline: float, emit: Emit) -> Site:
    import torch

    from weft.run import devices, world
    from weft.run.launch import usable_cores

    rank, ranks = world.place()
    if order.device == "cuda":
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
    return Site(
        device=device,
        rank=rank,
        ranks=ranks,
        machines=world.machines(),
        dtype="bfloat16" if device.type == "cuda" else "float32",
        deadline=deadline,
        finished=frozenset(order.finished),
        is_made_wrong=order.fault == "wrong",
        announce=_announce(order, emit, is_last=rank == ranks - 1),
    )


def _announce(order: Order, emit: Emit, *, is_last: bool) -> Callable[[str], None]:
    """Return what says that a check is under way, and does there what a test asks for."""

    def announce(name: str) -> None:
        emit(under_way=name)
        if is_last and order.is_first and order.fault == "crash":
            os.abort()
        while is_last and order.fault == "hang":
            time.sleep(60)

    return announce


def open_store() -> Any:
    """Return a client of the launcher's store; rank 0 serves it where the launcher does not."""
    from torch.distributed import rendezvous  # pyright: ignore[reportPrivateImportUsage]

    return next(rendezvous("env://", timeout=timedelta(seconds=MEETING_SECONDS)))[0]


def _join(order: Order, site: Site, emit: Emit) -> None:
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    from weft.run.groups import join_world

    emit(under_way="the ranks join", is_check=False)
    store = PrefixStore(f"doctor {order.number}", open_store())
    # Beyond the limit: a rank that waits for another is hung, and is not to fail before.
    join_world(timedelta(seconds=order.seconds + 60), store=store, rank=site.rank, world_size=site.ranks)
    emit(under_way="", is_check=False)


def _leave(site: Site, emit: Emit) -> None:
    """End with all ranks: one that ends before has memory that its peers may still read."""
    import torch
    import torch.distributed as dist

    emit(under_way="the ranks leave", is_check=False)
    if site.device.type == "cuda":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))  # by gloo, whatever has become of NCCL
    emit(end=True)
    dist.destroy_process_group()
