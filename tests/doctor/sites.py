"""Sites for tests of the doctor's parts: one rank of any world, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weft.doctor.part import Check, Site
from weft.doctor.parts import PARTS


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small products; several threads would wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class OnDevice(Site):
    """A site that is no rehearsal: what a GPU would be asked, on the CPU."""

    @property
    def is_rehearsal(self) -> bool:
        return False


def site_of(kind: type[Site] = Site, **fields: Any) -> Site:
    usual: dict[str, Any] = {"rank": 0, "ranks": 1, "machines": 1, "dtype": "float32"}
    usual |= {"device": torch.device("cpu"), "deadline": time.monotonic() + 60.0}
    return kind(**usual | fields)


def run_part(name: str, **fields: Any) -> list[Check]:
    """Run a part on a rank of a pool."""
    part = next(part for part in PARTS if part.name == name)
    return list(part.checks(site_of(rank=dist.get_rank(), ranks=dist.get_world_size(), **fields)))
