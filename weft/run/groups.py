"""Process groups: how weft makes them. NCCL's rules decide who has to take part.

A group whose world was made with `device_id` gets its communicator by splitting another one, and all ranks
of that other one must take part, members or not. Other groups connect when they are first used, by all of
their members: `Comm.warm_up` does that. Communicators take memory on each GPU, so groups of the same ranks
are shared. They run on streams of high priority, or a message would wait for the last wave of an attention.
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

PATIENCE = timedelta(minutes=10)
PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"

_log = logging.getLogger("weft.run")

_made: WeakValueDictionary[tuple[int, ...], dist.ProcessGroup] = WeakValueDictionary()
"""By their ranks in the world."""
_beside: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""Groups of gloo, of ranks whose own group has nothing but NCCL."""


def join_world(timeout: timedelta = PATIENCE, **meeting: Any) -> None:
    """Make the world's group, with what torch needs to know of how the ranks meet."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timeout, pg_options=_options(backend), **meeting)


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Make a group of some ranks, for its members; all ranks of the world call it, in the same order."""
    world = dist.group.WORLD
    assert world is not None
    if len(ranks) == world.size():
        return world
    group: Any = dist.new_group(list(ranks), pg_options=_options(_backend(world)))
    if world.rank() not in ranks:
        return None
    _made.setdefault(tuple(ranks), group)  # the first one has a communicator already, perhaps
    return group


def split(parent: dist.ProcessGroup, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Return the group of the part that this rank is in; the ranks of `parent`, and no others, call it.

    parts   ranks of `parent`, each in one part.
    """
    own = next(part for part in parts if parent.rank() in part)
    if len(own) == parent.size():
        return parent
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:
        # `new_group` would split the world's communicator, for which all ranks of the world are needed.
        halves: Any = dist.split_group(parent, [list(part) for part in parts])
        return halves
    everyone = dist.get_process_group_ranks(parent)
    members = tuple(everyone[rank] for rank in own)
    group: Any = _made.get(members)
    if group is None:
        group = dist.new_group(
            list(members),
            use_local_synchronization=True,
            sort_ranks=False,
            pg_options=_options(_backend(parent)),
        )
        _made[members] = group
    return group


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks that moves host memory; all of them call it together."""
    if dist.get_backend(group) != "nccl":
        return group
    if group not in _beside:
        ranks = dist.get_process_group_ranks(group)
        beside: Any = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, sort_ranks=False)
        _beside[group] = beside
    return _beside[group]


def note_priority(group: dist.ProcessGroup, device: torch.device) -> None:
    """Log it if a group, which then is not weft's, communicates on a stream of normal priority."""
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
    return str(dist.distributed_c10d._world.pg_map[group][0])


def _options(backend: str) -> Any:
    """A new one for each group: torch writes into it."""
    if "nccl" not in backend:
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
