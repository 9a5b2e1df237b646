"""Transport: choose the communicator of a process group by $WEFT_TRANSPORT and what was calibrated."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from weft.core.errors import InputError
from weft.run.comm import Comm
from weft.run.comm.group import GroupComm

if TYPE_CHECKING:
    from weft.run.comm.onesided import OneSidedComm
    from weft.run.comm.window import Window

_log = logging.getLogger("weft.run")

TRANSPORTS = ("auto", "group", "shm", "symmetric")


def transport() -> str:
    """Return $WEFT_TRANSPORT: shared memory where it is (auto), for all ranks (shm), never (group).

    symmetric is the memory of GPUs, not yet run on any; auto takes it where calibration found it faster.
    """
    name = os.environ.get("WEFT_TRANSPORT", "auto")
    if name not in TRANSPORTS:
        raise InputError(f"WEFT_TRANSPORT={name!r} is none of {', '.join(TRANSPORTS)}.")
    return name


def connect(group: dist.ProcessGroup, timeout: float) -> Comm:
    """Return the communicator of a group; all its ranks make the same."""
    base, name = GroupComm(group, timeout), transport()
    if name == "group" or base.size == 1:
        return base
    if name == "symmetric":
        return symmetric_comm(group, timeout, strict=True)
    if name == "auto" and measured_transport() == "symmetric":
        return symmetric_comm(group, timeout, strict=False)
    from weft.run.comm import shm
    from weft.run.comm.onesided import OneSidedComm

    return OneSidedComm(base, shm.rendezvous, timeout, group=group, strict=name != "auto")


def measured_transport() -> str:
    """Return the faster transport on GPUs according to $WEFT_TOPOLOGY; "" if it has none."""
    path = os.environ.get("WEFT_TOPOLOGY")
    if not path:
        return ""
    from weft.core.topology import Topology

    return Topology.from_toml(path).transport


def symmetric_comm(group: dist.ProcessGroup, timeout: float, *, strict: bool) -> OneSidedComm:
    """Return a communicator by the symmetric memory of GPUs; where they have none, by shm unless `strict`."""
    from weft.run.comm import shm, symmetric
    from weft.run.comm.onesided import OneSidedComm

    def meet(base: Comm) -> tuple[Window | None, str]:
        window, reason = symmetric.rendezvous(group, base)
        if window is not None or strict:
            return window, reason
        _log.warning("No symmetric memory, which %s requests: %s.", "WEFT_TOPOLOGY", reason)
        return shm.rendezvous(base)

    base = GroupComm(group, timeout)
    return OneSidedComm(base, meet, timeout, group=group, strict=strict, transport="symmetric")
