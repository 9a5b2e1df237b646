"""Nodes: join the launchers of several machines into one group that shares a store, signals and outcomes.

Machine 0 listens on one port. Each other launcher keeps a channel to it, and carries its ranks' connections
to the store, which is on machine 0's loopback, over channels of their own. Membership is static.
"""

from __future__ import annotations

import queue
import socket
import threading
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.core.errors import CommError
from weft.run.net import interfaces
from weft.run.net.channel import Channel, Closed
from weft.run.net.listener import Handler, Listener, Tunnel, forward, listen
from weft.run.net.secure import Credentials, connect
from weft.run.net.tls import Certificate, self_signed

JOIN_SECONDS = 900.0
"""Within which all machines must have joined."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a launch, the number of this one, and the address of machine 0."""

    count: int = 1
    node: int = 0
    master: tuple[str, int] = ("127.0.0.1", 0)
    address: str = "127.0.0.1"
    """Of this machine, on `interface`."""
    interface: str = interfaces.LOOPBACK
    token: str = ""
    certificate: Certificate | None = None
    """Of machine 0; self-signed by default."""

    def credentials(self, folder: Path) -> Credentials:
        return Credentials.of(self.token, self.certificate or self_signed(folder))


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """How a launch ended: the exit code, the first rank that failed (if any), why, and its traceback."""

    code: int = 0
    rank: int | None = None
    reason: str = ""
    traceback: str = ""

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> LaunchOutcome:
        rank = plain.get("rank")
        return cls(
            code=int(plain["code"]), rank=None if rank is None else int(rank),
            reason=str(plain.get("reason", "")), traceback=str(plain.get("traceback", "")),
        )  # fmt: skip


class LaunchGroup:
    """The launchers of all machines, as one of them sees it; this one is alone."""

    def __init__(self, nodes: Nodes, ranks: int, port: int) -> None:
        self.first, self.world, self.port = nodes.node * ranks, nodes.count * ranks, port
        """The first rank here, the number of ranks on all machines, and the store's port on loopback."""
        self.run_id = uuid.uuid4().hex
        """The same on all machines."""
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.wake, self._waker = socket.socketpair()
        """Readable when there are messages."""
        self.wake.settimeout(0)

    def gather(self) -> None:
        """Return when all machines have joined."""

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what other machines sent: a "signal", an "outcome", or that one of them is "over"."""
        with suppress(BlockingIOError):
            self.wake.recv(64)
        with suppress(queue.Empty):
            while True:
                yield self._messages.get_nowait()

    def send(self, message: dict[str, Any]) -> None:
        """Send to all other machines."""

    def failed(self, outcome: LaunchOutcome) -> None:
        """Send the first failure here."""
        self.send({"type": "outcome", "outcome": asdict(outcome)})

    def ended(self) -> None:
        """Note, or send, that all ranks here have ended."""

    def is_over(self) -> bool:
        """Return whether all ranks of all machines have ended."""
        return True

    def close(self) -> None:
        self.wake.close()
        self._waker.close()

    def _put(self, message: dict[str, Any]) -> None:
        self._messages.put(message)
        with suppress(OSError):
            self._waker.send(b".")

    def _put_lost(self, node: int) -> None:
        reason = f"Machine {node} of this launch is gone, and all ranks on it."
        self._put({"type": "outcome", "outcome": {"code": 1, "reason": reason}})


class Leader(LaunchGroup):
    """The group as machine 0 sees it, where the store is."""

    def __init__(self, nodes: Nodes, ranks: int, port: int, folder: Path) -> None:
        credentials = nodes.credentials(folder)
        listening = listen((nodes.address, nodes.master[1]))
        super().__init__(nodes, ranks, port)
        self.nodes, self.ranks = nodes, ranks
        self._members: dict[int, Channel] = {}
        self._over: set[int] = set()
        self._started = self._is_done = False
        self._changed = threading.Condition()
        store = ("127.0.0.1", port)
        handlers: dict[str, Handler] = {
            "launch": self._serve,
            "store": lambda channel: forward(socket.create_connection(store), channel.socket),
        }
        self._listener = Listener(listening, credentials, handlers)

    def gather(self) -> None:
        with self._changed:
            others = {*range(1, self.nodes.count)}
            if not self._changed.wait_for(lambda: others == {*self._members}, JOIN_SECONDS):
                missing = ", ".join(map(str, sorted(others - {*self._members})))
                late = f"Machines {missing} have not joined within {JOIN_SECONDS:.0f} s."
                raise CommError(
                    f"{late} {self._listener.refusal}".strip(),
                    hint="Start weft with the same --master, --nodes and token on each of them.",
                )
            self._started = True
        self.send({"type": "start", "run_id": self.run_id})

    def ended(self) -> None:
        self._is_done = True

    def send(self, message: dict[str, Any], *, but: int | None = None) -> None:
        for node, channel in list(self._members.items()):
            if node != but:
                with suppress(CommError):
                    channel.send(message)

    def is_over(self) -> bool:
        return len(self._over) == self.nodes.count - 1

    def close(self) -> None:
        if self._is_done:  # else the others notice that this machine is gone
            self.send({"type": "over"})
        self._listener.close()
        for channel in list(self._members.values()):
            channel.close()
        super().close()

    def _serve(self, channel: Channel) -> None:
        message, _ = channel.receive()
        node = int(message.get("node", 0))
        with self._changed:
            if reason := self._refuses(message, node):
                channel.send({"type": "refused", "reason": reason})
                return
            self._members[node] = channel
            self._changed.notify_all()
        try:
            while (message := channel.receive()[0])["type"] != "ended":
                self._put(message)
                self.send(message, but=node)  # the failure of one machine, or Ctrl-C on it, ends all
        except (CommError, KeyError, TypeError, ValueError):  # it is gone, or of another version
            with self._changed:
                if not self._started:  # its place is free again
                    del self._members[node]
                    return
            self._put_lost(node)
            self.send({"type": "outcome", "outcome": {"code": 1, "reason": f"Machine {node} is gone."}})
        self._over.add(node)
        self._put({"type": "over"})
        channel.receive()  # until it is closed

    def _refuses(self, message: dict[str, Any], node: int) -> str:
        if (message.get("nodes"), message.get("ranks")) != (self.nodes.count, self.ranks):
            return f"machine 0 was started with --nodes {self.nodes.count} --ranks {self.ranks}"
        if not 0 < node < self.nodes.count:
            return f"--node {node} is not between 1 and {self.nodes.count - 1}"
        return f"another machine has --node {node}" if node in self._members else ""


class Member(LaunchGroup):
    """The group as any other machine sees it."""

    def __init__(self, nodes: Nodes, ranks: int) -> None:
        self._channel = connect(nodes.master, nodes.token, "launch", patience=JOIN_SECONDS)
        self._tunnel = Tunnel(lambda: connect(nodes.master, nodes.token, "store"))
        super().__init__(nodes, ranks, self._tunnel.port)
        self._is_over = False
        self._channel.send({"node": nodes.node, "nodes": nodes.count, "ranks": ranks})

    def gather(self) -> None:
        try:
            answer, _ = self._channel.receive()
        except Closed as error:
            raise CommError("Machine 0 ended before all machines had joined.") from error
        if answer.get("type") != "start":
            raise CommError(f"Machine 0 refuses this machine: {answer.get('reason')}.")
        self.run_id = str(answer.get("run_id"))
        threading.Thread(target=self._read, name="weft-leader", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        with suppress(CommError):
            self._channel.send(message)

    def ended(self) -> None:
        self.send({"type": "ended"})

    def is_over(self) -> bool:
        return self._is_over

    def close(self) -> None:
        self._channel.close()
        self._tunnel.close()
        super().close()

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()[0])["type"] != "over":
                self._put(message)
        except CommError:
            self._put_lost(0)
        self._is_over = True
        self._put({"type": "over"})


@contextmanager
def join(nodes: Nodes, ranks: int, port: int, folder: Path) -> Generator[LaunchGroup]:
    """Yield the group of this launch once all machines have joined; `port` is the store's on machine 0."""
    if nodes.count == 1:
        group = LaunchGroup(nodes, ranks, port)
    else:
        group = Leader(nodes, ranks, port, folder) if nodes.node == 0 else Member(nodes, ranks)
    try:
        group.gather()
        yield group
    finally:
        group.close()
