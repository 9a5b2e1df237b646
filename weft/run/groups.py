"""Create process groups by the rules of NCCL.

A group whose world was made with `device_id` gets its communicator by splitting another one, and all ranks
of that one must take part, members or not. Other groups connect at their first use, by all of their members
(`Comm.warm_up`). Communicators take memory on each GPU, so groups of the same ranks are shared. They run on
streams of high priority, or a message would wait for the last wave of an attention.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(minutes=10)
PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"

_LOCAL = {"use_local_synchronization": True, "sort_ranks": False}
"""Only the members of the group create it, in the order of their ranks."""

_log = logging.getLogger("weft.run")

_by_ranks: WeakValueDictionary[tuple[int, ...], dist.ProcessGroup] = WeakValueDictionary()
"""Groups by their global ranks."""
_host_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""Groups of gloo with the ranks of groups that have only NCCL."""


def join_world(timeout: timedelta = DEFAULT_TIMEOUT, **rendezvous: Any) -> None:
    """Create the group of all ranks; `rendezvous` goes to `init_process_group`."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timeout, pg_options=_options(backend), **rendezvous)


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Create a group and return it to its members; all ranks of the world call it in the same order."""
    world = dist.group.WORLD
    assert world is not None
    if len(ranks) == world.size():
        return world
    group = _create(ranks, pg_options=_options(_backend(world)))
    if world.rank() not in ranks:
        return None
    _by_ranks.setdefault(tuple(ranks), group)  # the first one may have a communicator already
    return group


def split(parent: dist.ProcessGroup, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Return the group of this rank, of `parts` of the ranks of `parent`, which all call it."""
    own = next(ranks for ranks in parts if parent.rank() in ranks)
    if len(own) == parent.size():
        return parent
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:
        # `new_group` would split the world's communicator, for which all ranks of the world are needed.
        group: Any = dist.split_group(parent, [list(ranks) for ranks in parts])  # pyright: ignore[reportUnknownMemberType]
        return group
    global_ranks = dist.get_process_group_ranks(parent)
    members = tuple(global_ranks[rank] for rank in own)
    group = _by_ranks.get(members)
    if group is None:
        group = _by_ranks[members] = _create(members, **_LOCAL, pg_options=_options(_backend(parent)))
    return group


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks that can send host memory; all of them call it together."""
    if dist.get_backend(group) != "nccl":
        return group
    if group not in _host_groups:
        _host_groups[group] = _create(dist.get_process_group_ranks(group), **_LOCAL, backend="gloo")
    return _host_groups[group]


def _create(ranks: Sequence[int], **options: Any) -> Any:
    return dist.new_group(list(ranks), **options)  # pyright: ignore[reportUnknownMemberType]


def note_priority(group: dist.ProcessGroup, device: torch.device) -> None:
    """Log if a group, not created here, communicates on a stream of normal priority."""
    options = getattr(group._get_backend(device), "options", None)
    is_high = getattr(options, "is_high_priority_stream", True) or os.environ.get(PRIORITY, "0") != "0"
    if not is_high:
        _log.info(
            "The process group %s runs NCCL on a stream of normal priority: its messages wait for attention "
            "that is under way. Leave init_process_group to weft, or set %s=1.",
            group.group_name,
            PRIORITY,
        )


def _backend(group: dist.ProcessGroup) -> str:
    return str(dist.distributed_c10d._world.pg_map[group][0])  # pyright: ignore[reportPrivateUsage]


def _options(backend: str) -> Any:
    """Return new options for each group, since torch writes into them."""
    if "nccl" not in backend:
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
