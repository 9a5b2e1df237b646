"""Process groups of torch.distributed as a transport: gloo on CPUs, NCCL on GPUs.

A wait for gloo blocks the host, at most for the timeout. A wait for NCCL blocks the stream and has no
timeout: with one, torch would block the host and poll. The group's `Watcher` finds late ranks instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from weft.core.errors import CommError
from weft.run import streams
from weft.run.comm import LATE_HINT, Message, PendingExchange, reason_of, rollcall
from weft.run.comm.watcher import Watcher
from weft.run.exchange import host_device
from weft.run.groups import note_priority

SIGN_SECONDS = 2.0
"""Time for ranks to report that a collective failed for them too."""
Works = Mapping[int, Any]  # torch's Work, by peer; None for a rank outside the group

_watchers: WeakKeyDictionary[dist.ProcessGroup, Watcher] = WeakKeyDictionary()


class GroupComm:
    """Messages over a process group, in group ranks. `timeout` is the longest wait for one message."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.transport, self.group, self.timeout = "group", group, timeout
        self.rank, self.size = group.rank(), group.size()
        self.bytes_sent = self.calls = 0
        self._warm: set[torch.device] = set()
        self._watcher: Watcher | None = None

    def begin(self, device: torch.device) -> None:
        """Messages may lie anywhere."""
        del device
        self.calls += 1
        self._check()

    def warm_up(self, device: torch.device) -> None:
        if device.type == "cpu" or device in self._warm or self.size == 1:
            return  # gloo has connected all ranks since the group was made
        if streams.is_capturing(device):
            raise CommError(
                "A CUDA graph is captured before the ranks have connected.",
                hint="Run the call once before it is captured.",
            )
        self.watcher.check()
        work = dist.all_reduce(torch.zeros(1, device=device), group=self.group, async_op=True)
        self._watched([work], "warm-up", self._with_all(), device).finish()
        self._warm.add(device)
        note_priority(self.group, device)

    def _check(self) -> None:
        """Raise what ended the group, if it has a watcher that saw it end."""
        if self._watcher is not None:
            self._watcher.check()

    @property
    def watcher(self) -> Watcher:
        """The watcher of the group, which answers roll calls from its first use on."""
        if self._watcher is None:
            if self.group not in _watchers:
                _watchers[self.group] = _watcher_of(self.group)
            self._watcher = _watchers[self.group]
            self._watcher.start(self.timeout)
        return self._watcher

    def post(self, sends: list[Message], receives: list[Message], label: str, tag: int) -> PendingExchange:
        self.bytes_sent += sum(buffer.numel() * buffer.element_size() for _, buffer in sends)
        messages = sends or receives
        try:
            if messages and self.is_on_stream(messages[0][1]):
                return self._post_batch(sends, receives, label, messages[0][1].device)
            # Receives first: a message whose buffer is posted needs no copy of its own.
            coming = {
                peer: dist.irecv(buffer, group=self.group, group_src=peer, tag=tag)
                for peer, buffer in receives
            }
            going = {
                peer: dist.isend(buffer, group=self.group, group_dst=peer, tag=tag) for peer, buffer in sends
            }
        except RuntimeError as error:
            if isinstance(error, CommError):
                raise
            peers = sorted({peer for peer, _ in (*sends, *receives)})
            raise CommError(
                f"Rank {self.rank} cannot start {label} with ranks {peers}: {reason_of(error)}"
            ) from error
        return GroupExchange(self, coming, going, label)

    def is_on_stream(self, buffer: torch.Tensor) -> bool:
        """Whether messages of such buffers are work of a stream, for which the host does not wait."""
        return buffer.is_cuda

    def _post_batch(
        self, sends: list[Message], receives: list[Message], label: str, device: torch.device
    ) -> StreamExchange:
        """Post one group call of NCCL, in which sends and receives cannot wait for each other."""
        self.watcher.check()
        calls = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in receives]
        calls += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
        works = dist.batch_isend_irecv(calls)
        messages = [(rollcall.RECEIVE, peer) for peer, _ in receives]
        messages += [(rollcall.SEND, peer) for peer, _ in sends]
        return self._watched(works, label, messages, device)

    def _watched(
        self, works: list[Any], label: str, messages: list[rollcall.Endpoint], device: torch.device
    ) -> StreamExchange:
        # Works of a graph run when it is replayed, and must not be queried while it is captured.
        if not streams.is_capturing(device):
            self.watcher.watch(works, streams.record(device), label, messages, self.timeout)
        return StreamExchange(self, works, label)

    def _with_all(self) -> list[rollcall.Endpoint]:
        """A collective, as messages to and from all other ranks."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        return [(direction, peer) for direction in (rollcall.SEND, rollcall.RECEIVE) for peer in peers]

    def collective(self, device: torch.device) -> bool:
        del device
        return self.size > 1

    def all_to_all(self, sends: list[Message], receives: list[Message], label: str) -> PendingExchange:
        self.bytes_sent += sum(buffer.numel() for peer, buffer in sends if peer != self.rank)
        ends = [_one_buffer(messages) for messages in (receives, sends)]
        splits = [_splits(messages, self.size) for messages in (receives, sends)]
        on_stream = self.is_on_stream(ends[0])
        if on_stream:
            self.watcher.check()
        try:
            work = dist.all_to_all_single(*ends, *splits, group=self.group, async_op=True)
        except RuntimeError as error:
            raise CommError(f"Rank {self.rank} cannot start {label}: {reason_of(error)}") from error
        if on_stream:
            return self._watched([work], label, self._with_all(), ends[0].device)
        # One work for all: a wait for one message waits for each.
        coming, going = ({peer: work for peer, _ in messages} for messages in (receives, sends))
        return GroupExchange(self, coming, going, label, collective=True)

    def unreported(self, label: str) -> list[int]:
        """Return the ranks that do not report the failure of a collective, which are lost or stuck.

        A backend does not report which rank it waited for, but all other ranks fail in the same collective.
        """
        try:
            store = store_of(self.group)
            key = f"weft failed {label} {self.group.group_name}"
            store.set(f"{key} {self.rank}", "1")
            deadline = time.monotonic() + SIGN_SECONDS
            others = [rank for rank in range(self.size) if rank != self.rank]
            while others and time.monotonic() < deadline:
                others = [rank for rank in others if not store.check([f"{key} {rank}"])]
                time.sleep(0.02)
        except Exception:  # the store may be lost with the rank that served it
            return []
        return others

    def all_gather_ints(self, numbers: list[int]) -> list[list[int]]:
        if self.size == 1:
            return [numbers]  # a collective of one takes half a millisecond
        self._check()
        own = torch.tensor(numbers, dtype=torch.int64, device=host_device(self.group))
        rows = [torch.empty_like(own) for _ in range(self.size)]
        try:
            work = dist.all_gather(rows, own, group=self.group, async_op=True)
            assert work is not None
            if self.is_on_stream(own):  # reading the rows waits, and the watcher can end that
                self._watched([work], "agreement", self._with_all(), own.device).finish()
            else:
                work.wait(_span(self.timeout))
        except RuntimeError as error:
            if isinstance(error, CommError):
                raise
            raise CommError(
                f"Rank {self.rank} waited for all {self.size} ranks to agree on a plan: {reason_of(error)}",
                hint="A rank is lost or in another call; all must make the same calls in the same order.",
            ) from error
        return [row.tolist() for row in rows]


class StreamExchange:
    """The messages of one post on a stream: the current stream waits for them, and the host goes on."""

    def __init__(self, comm: GroupComm, works: list[Any], label: str) -> None:
        self._comm, self._works, self._label = comm, works, label

    def finish(self) -> None:
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._comm.watcher.check()
            raise CommError(f"Rank {self._comm.rank} lost {self._label}: {reason_of(error)}") from error

    def wait_for(self, peer: int) -> None:
        del peer
        self.finish()

    def wait_sent(self, peer: int) -> None:
        del peer
        self.finish()


class GroupExchange:
    """The works of one post; an error names the peer that is late."""

    def __init__(
        self, comm: GroupComm, coming: Works, going: Works, label: str, *, collective: bool = False
    ) -> None:
        self.comm, self.coming, self.going, self.label = comm, dict(coming), dict(going), label
        self.collective = collective

    def wait_for(self, peer: int) -> None:
        if work := self.coming.pop(peer, None):
            self._wait(work, peer, "from")

    def wait_sent(self, peer: int) -> None:
        if work := self.going.pop(peer, None):
            self._wait(work, peer, "to")

    def finish(self) -> None:
        for peer in list(self.coming):
            self.wait_for(peer)
        for peer in list(self.going):
            self.wait_sent(peer)

    def _wait(self, work: Any, peer: int, direction: str) -> None:
        if work is None:
            return
        start = time.monotonic()
        try:
            work.wait(_span(self.comm.timeout))
        except RuntimeError as error:
            waited = f"Rank {self.comm.rank} waited {time.monotonic() - start:.1f} s for {self.label}"
            peers = f"{direction} rank {peer}"
            if self.collective:
                lost = ", ".join(f"rank {rank}" for rank in self.comm.unreported(self.label))
                peers = f"with all ranks of {self.comm.size}, of which {lost or 'some rank'} did not come"
            raise CommError(
                f"{waited} {peers}: {reason_of(error)}",
                hint=LATE_HINT,
            ) from error


def _watcher_of(group: dist.ProcessGroup) -> Watcher:
    # A connection of its own: other users of the store may block in it.
    store: Any = dist.PrefixStore("weft watcher", store_of(group).clone())  # pyright: ignore
    return Watcher(store, group.rank(), dist.get_process_group_ranks(group), lambda: _abort(group))


def store_of(group: dist.ProcessGroup) -> Any:
    return dist.distributed_c10d._world.pg_map[group][1]


def _abort(group: dist.ProcessGroup) -> None:
    """End the kernels that wait for peers; the communicator of the group cannot be used any more."""
    group._get_backend(torch.device("cuda")).abort()


def _one_buffer(messages: list[Message]) -> torch.Tensor:
    """Return the buffer in which messages lie side by side."""
    first = messages[0][1]
    return first.as_strided((sum(buffer.numel() for _, buffer in messages),), (1,))


def _splits(messages: list[Message], size: int) -> list[int]:
    splits = [0] * size
    for peer, buffer in messages:
        splits[peer] = buffer.numel()
    return splits


def _span(seconds: float) -> timedelta:
    """Convert a timeout for torch; an infinite one becomes the longest that it accepts."""
    return timedelta(seconds=min(seconds, 1e6))
