"""Messages over a process group: in a batch, as those of GPUs go, and when the group refuses them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.jobs import Worlds
from weft.core.errors import CommError
from weft.run.comm import group
from weft.run.comm.group import GroupComm


def around_in_a_batch() -> list[int]:
    """Rank r sends r to the next and r + 10 to the one before; gloo takes batches on CPUs too."""
    comm = GroupComm(dist.new_group(), 20.0)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sends = [(after, torch.tensor([comm.rank])), (before, torch.tensor([comm.rank + 10]))]
    receives = [(before, torch.zeros(1, dtype=torch.int64)), (after, torch.zeros(1, dtype=torch.int64))]
    transit = comm._post_batch(sends, receives, "a test", torch.device("cpu"))
    transit.wait_for(before)
    transit.finish()
    comm.watcher.close()
    return [int(buffer) for _, buffer in receives]


def test_a_batch_brings_every_message_to_its_place(worlds: Worlds) -> None:
    assert worlds(3).run(around_in_a_batch) == [[2, 11], [0, 12], [1, 10]]


def without_messages() -> int:
    comm = GroupComm(dist.group.WORLD, 20.0)
    comm.post([], [], "a test", 0).finish()
    return comm.bytes_sent


def test_a_batch_may_be_empty(worlds: Worlds) -> None:
    assert worlds(3).run(without_messages) == [0, 0, 0]


def refused_post() -> str:
    def refuses(*_: object, **__: object) -> None:
        raise RuntimeError("the group is closed")

    comm, plain = GroupComm(dist.group.WORLD, 20.0), group.dist.isend
    group.dist.isend = refuses
    try:
        with pytest.raises(CommError) as refused:
            comm.post([(1 - comm.rank, torch.zeros(1))], [], "Rotate 3", 0)
    finally:
        group.dist.isend = plain
    return refused.value.message


def test_who_cannot_send_says_what_and_to_whom(worlds: Worlds) -> None:
    said = worlds(2).run(refused_post)
    assert said[1].startswith("Rank 1 cannot start Rotate 3 with ranks [0]: the group is closed")
