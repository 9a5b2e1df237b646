"""Ranks in the machines of a test bed: a Pool whose ranks move there before their world is theirs."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from weft.core.errors import InputError
from weft.run.pool import REPLY_SECONDS, Pool, RankFailure, failures_in
from weft.run.rank import call, join_world
from weft.run.testbed import NAMES, Testbed

NETWORK = 0x40000000  # CLONE_NEWNET


class MachinePool(Pool):
    """`devices` ranks in each machine, those of one machine in a row, as torchrun numbers them."""

    def __init__(self, bed: Testbed, devices: int, **options: Any) -> None:
        if devices < 1:
            raise InputError(f"A machine has 1 device or more, not {devices}.")
        self.bed = bed
        self.devices = devices
        super().__init__(len(bed.machines) * devices, **options)

    def __enter__(self) -> MachinePool:
        return self

    def _fresh_ranks(self) -> Any:
        ranks = super()._fresh_ranks()
        try:
            meeting = Path(ranks._directory, "machines")
            meeting.mkdir()
            ranks.tell([self._move(rank, str(meeting)) for rank in range(self.size)])
            answers = ranks.answers(self.timeout + REPLY_SECONDS, self.timeout + REPLY_SECONDS)
            if failures := failures_in(answers):
                raise RankFailure(failures, self.size)
        except BaseException:
            ranks.end(grace=False)
            raise
        return ranks

    def _move(self, rank: int, meeting: str) -> bytes:
        machine, device = divmod(rank, self.devices)
        environment = self.bed.environment() | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(device),
            "LOCAL_WORLD_SIZE": str(self.devices),
            "GROUP_RANK": str(machine),
        }
        namespace = str(NAMES / self.bed.machines[machine].name)
        return call(_join_from, namespace, environment, (rank, self.size, self.timeout, meeting))


def _join_from(namespace: str, environment: dict[str, str], world: tuple[int, int, float, str]) -> None:
    """Leave the world of the pool, move this thread and all that it will start, and meet again from there."""
    import torch.distributed as dist

    dist.destroy_process_group()
    with Path(namespace).open("rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), NETWORK):  # os.setns is there from Python 3.12 on
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    os.environ.update(environment)
    join_world(*world)
