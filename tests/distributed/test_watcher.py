"""Watchers of real processes over a real store, with works that never end in the place of NCCL's."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from weft.core.errors import CommError
from weft.run import streams
from weft.run.comm import rollcall
from weft.run.comm.group import GroupComm
from weft.run.spawn.pool import Pool

Worlds = Callable[[int], Pool]
LIMIT = 60.0


class Never:
    def is_completed(self) -> bool:
        return False


def wait_for_rank(late: int) -> tuple[str, bool]:
    """All but one rank wait for all others; what each of them raises, and whether its watcher has ended."""
    group = dist.new_group()
    comm = GroupComm(group, 1.0)
    watcher, deadline = comm.watcher, time.monotonic() + LIMIT
    message = ""
    try:
        if comm.rank != late:
            event = streams.record(torch.device("cpu"))
            watcher.watch([Never()], event, "op 3 (hop 1)", comm._with_all(), 1.0)
        while time.monotonic() < deadline:
            time.sleep(0.01)
            if comm.rank == late:
                comm.begin(torch.device("cpu"))
    except CommError as error:
        message = str(error)
    watcher.close()
    assert watcher._thread is not None
    watcher._thread.join(LIMIT)
    return message, watcher._thread.is_alive()


def test_real_ranks_name_the_same_one(worlds: Worlds) -> None:
    results = worlds(3).run(wait_for_rank, 1)
    assert {running for _, running in results} == {False}
    (message,) = {message for message, _ in results}
    assert message.startswith("Rank 1 is late: ranks 0 and 2 waited ") and "op 3 (hop 1)" in message


def test_messages_of_a_collective_are_with_all_others() -> None:
    comm = GroupComm.__new__(GroupComm)
    comm.rank, comm.size = 1, 3
    assert comm._with_all() == [
        (rollcall.SEND, 0), (rollcall.SEND, 2), (rollcall.RECEIVE, 0), (rollcall.RECEIVE, 2)
    ]  # fmt: skip
