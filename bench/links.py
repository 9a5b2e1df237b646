"""The link between two ranks: what attention has to move over it, and how fast it moves."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


def ulysses_bytes(tokens: int, heads: int, dim: int, ranks: int, *, backward: bool) -> int:
    """Bytes that a rank sends in dense float32 attention: `limits.md`, batch 1.

    Forward sends Q, K, V and gets O home. Backward, with Q, K, V still there, sends dO and gets dQ,
    dK, dV home. On two ranks a ring moves the same amount: K and V, then dK and dV besides.
    """
    share = tokens * heads * dim // ranks
    crossings = 8 if backward else 4
    return crossings * share * (ranks - 1) // ranks * 4


def exchange(nbytes: int, peer: int | None = None) -> Callable[[], None]:
    """A call that sends `nbytes` to a rank, of two the other one, while it receives as many, in one message.

    The buffers live on, so that the time is the link's and not that of fresh pages.
    """
    out, back = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    peer = 1 - dist.get_rank() if peer is None else peer

    def call() -> None:
        arrived = dist.irecv(back, peer)
        left = dist.isend(out, peer)
        if arrived is None or left is None:
            raise RuntimeError("this process is in no process group")
        arrived.wait()
        left.wait()

    return call
