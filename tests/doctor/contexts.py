"""Contexts for tests of the doctor's parts: one rank of any world, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weft.doctor.suite import Check, CheckContext
from weft.doctor.suites import SUITES


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small products; several threads would wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class OnDevice(CheckContext):
    """A context that is no rehearsal: the work of a GPU, on the CPU."""

    @property
    def is_rehearsal(self) -> bool:
        return False


def context_of(kind: type[CheckContext] = CheckContext, **fields: Any) -> CheckContext:
    usual: dict[str, Any] = {"rank": 0, "ranks": 1, "machines": 1, "dtype": "float32"}
    usual |= {"device": torch.device("cpu"), "deadline": time.monotonic() + 60.0}
    return kind(**usual | fields)


def run_suite(name: str, **fields: Any) -> list[Check]:
    """Run a part on a rank of a pool."""
    suite = next(suite for suite in SUITES if suite.name == name)
    return list(suite.checks(context_of(rank=dist.get_rank(), ranks=dist.get_world_size(), **fields)))
