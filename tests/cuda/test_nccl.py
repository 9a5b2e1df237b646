"""What weft asks of NCCL and of the CUDA runtime, against the CUDA build of torch, without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft.run import groups, streams

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs the CUDA build: make test-cuda")


def test_nccl_gets_a_stream_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own code hands the options to NCCL's constructor, which would need a GPU."""

    class MadeError(Exception):
        pass

    class Nccl:
        Options = distributed_c10d.ProcessGroupNCCL.Options

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            del store, rank, size
            raise MadeError(options.is_high_priority_stream, options._timeout)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", Nccl)
    with pytest.raises(MadeError) as made:
        groups.join_world(store=dist.HashStore(), rank=0, world_size=1)
    assert made.value.args == (True, groups.PATIENCE)


def test_a_communicator_can_be_aborted_and_split() -> None:
    nccl = distributed_c10d.ProcessGroupNCCL
    assert callable(nccl.abort) and callable(dist.split_group)
    assert callable(distributed_c10d.Work.is_completed)
    assert isinstance(dist.ProcessGroup.bound_device_id, property)


def test_a_thread_can_ignore_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "suppress", lambda *_: nullcontext())
    streams.ignore_captures()  # finds the function in the library that torch has loaded
