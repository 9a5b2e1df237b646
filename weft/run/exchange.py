"""Exchange JSON between the ranks of a process group.

torch's object collectives (`broadcast_object_list`, `all_gather_object`) unpickle what arrives, and gloo's
messages come from sockets without authentication: whoever can write to one would run code. JSON cannot.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import CommError, InputError
from weft.core.files import parse_json
from weft.run.groups import host_group

MAX_BYTES = 64 << 20
"""Of one rank's value. Lengths come from other ranks: they are checked before memory is allocated."""


def broadcast_json(value: Any, *, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the `value` of group rank `src`, as JSON carries it (tuples arrive as lists), on every rank."""
    if not dist.is_initialized():
        return value
    group = group or dist.group.WORLD
    assert group is not None
    data = _encode(value) if group.rank() == src else b""
    length = _numbers([len(data)], group)
    _run(lambda: dist.broadcast(length, group=group, group_src=src))
    size = _checked(int(length.item()), src)
    buffer = _bytes(data.ljust(size, b"\0"), group)
    _run(lambda: dist.broadcast(buffer, group=group, group_src=src))
    return _decode(buffer, size, src)


def all_gather_json(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in the order of their ranks, as JSON carries them."""
    if not dist.is_initialized():
        return [value]
    group = group or dist.group.WORLD
    assert group is not None
    data = _encode(value)
    mine = _numbers([len(data)], group)
    lengths = [torch.empty_like(mine) for _ in range(group.size())]
    _run(lambda: dist.all_gather(lengths, mine, group=group))
    sizes = [_checked(int(length.item()), rank) for rank, length in enumerate(lengths)]
    padded = _bytes(data.ljust(max(sizes), b"\0"), group)
    buffers = [torch.empty_like(padded) for _ in sizes]
    _run(lambda: dist.all_gather(buffers, padded, group=group))
    return [_decode(*each, rank) for rank, each in enumerate(zip(buffers, sizes, strict=True))]


def start_gather(
    numbers: list[int], group: dist.ProcessGroup, timeout: float
) -> Callable[[], list[list[int]]]:
    """Start to gather equally many integers of all ranks by their hosts; calling the result waits for them.

    Nothing is queued on a device, so no device is waited for.
    """
    group = host_group(group)
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    work: Any = _run(lambda: dist.all_gather(rows, mine, group=group, async_op=True))

    def finish() -> list[list[int]]:
        _run(lambda: work.wait(timedelta(seconds=min(timeout, 1e6))))
        return [row.tolist() for row in rows]

    return finish


def host_device(group: dist.ProcessGroup) -> torch.device:
    """Return where small tensors of the host must lie: a group that has only NCCL cannot move host memory."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _numbers(values: list[int], group: dist.ProcessGroup) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=host_device(group))


def _bytes(data: bytes, group: dist.ProcessGroup) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(host_device(group))


def _encode(value: Any) -> bytes:
    """A value that is too large is told by its length: then all ranks raise, instead of one."""
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


def _run(collective: Any) -> Any:
    try:
        return collective()
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CommError(
            f"Rank {dist.get_rank()} lost another rank: {reason}",
            hint="That rank is lost, stuck or late; look at its own error first.",
        ) from error
