"""Exchange JSON between the ranks of a process group.

torch's object collectives (`broadcast_object_list`, `all_gather_object`) unpickle what arrives, and gloo's
sockets have no authentication: any process that can write to one could run code. JSON cannot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import CommError, InputError
from weft.core.files import parse_json
from weft.run.comm import LATE_HINT, reason_of
from weft.run.groups import host_group

MAX_BYTES = 64 << 20
"""Of one rank's value. Lengths come from other ranks: they are checked before memory is allocated."""


def broadcast_json(value: Any, *, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the `value` of group rank `src`, as JSON carries it (tuples become lists), on every rank."""
    if not dist.is_initialized():
        return value
    group = group or dist.group.WORLD
    assert group is not None
    data = _encode(value) if group.rank() == src else b""
    length = torch.tensor([len(data)], dtype=torch.int64, device=host_device(group))
    with _comm_errors():
        dist.broadcast(length, group=group, group_src=src)
    size = _checked(int(length.item()), src)
    buffer = _bytes(data.ljust(size, b"\0"), group)
    with _comm_errors():
        dist.broadcast(buffer, group=group, group_src=src)
    return _decode(buffer, size, src)


def all_gather_json(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank, as JSON carries them."""
    if not dist.is_initialized():
        return [value]
    group = group or dist.group.WORLD
    assert group is not None
    data = _encode(value)
    lengths, _ = _all_gather(torch.tensor([len(data)], dtype=torch.int64, device=host_device(group)), group)
    sizes = [_checked(int(length.item()), rank) for rank, length in enumerate(lengths)]
    buffers, _ = _all_gather(_bytes(data.ljust(max(sizes), b"\0"), group), group)
    return [_decode(*each, rank) for rank, each in enumerate(zip(buffers, sizes, strict=True))]


def start_gather(
    numbers: list[int], group: dist.ProcessGroup, timeout: float
) -> Callable[[], list[list[int]]]:
    """Start to gather equally many integers of all ranks by their hosts; calling the result waits for them.

    No operation is queued on a device, so no device is waited for.
    """
    own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    rows, work = _all_gather(own, host_group(group), async_op=True)
    assert work is not None

    def finish() -> list[list[int]]:
        with _comm_errors():
            work.wait(timedelta(seconds=min(timeout, 1e6)))
        return [row.tolist() for row in rows]  # pyright: ignore[reportUnknownMemberType]

    return finish


def host_device(group: dist.ProcessGroup) -> torch.device:
    """Return where small tensors of the host must lie: a group that has only NCCL cannot move host memory."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _all_gather(
    own: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> tuple[list[Tensor], dist.Work | None]:
    rows = [torch.empty_like(own) for _ in range(group.size())]
    with _comm_errors():
        work = dist.all_gather(rows, own, group=group, async_op=async_op)  # pyright: ignore
    return rows, work  # pyright: ignore[reportUnknownVariableType]


def _bytes(data: bytes, group: dist.ProcessGroup) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(host_device(group))


def _encode(value: Any) -> bytes:
    """Encode a value. Its size is checked by the receivers, so that all ranks raise and not one alone."""
    return json.dumps(value, separators=(",", ":")).encode()


def _checked(size: int, rank: int) -> int:
    if not 0 < size <= MAX_BYTES:
        raise CommError(
            f"Rank {rank} sends {size:,} bytes of JSON; at most {MAX_BYTES:,} are allowed.",
            hint="Send tensors by a collective of their own.",
        )
    return size


def _decode(buffer: Tensor, size: int, rank: int) -> Any:
    try:
        return parse_json(buffer.cpu().numpy()[:size].tobytes(), f"The message of rank {rank}")
    except InputError as error:
        raise CommError(str(error), hint="Look at that rank's own error first.") from None


@contextmanager
def _comm_errors() -> Generator[None, None, None]:
    try:
        yield
    except RuntimeError as error:
        raise CommError(
            f"Rank {dist.get_rank()} lost another rank: {reason_of(error)}", hint=LATE_HINT
        ) from error
