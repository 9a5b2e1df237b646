"""Ranks: the server's end of their connections, the agent that starts them, and who is lost.

All ranks of a group join one world together; when one is lost, all are, and a new generation begins.
"""

from __future__ import annotations

import queue
import secrets
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from weft.core.errors import CommError
from weft.run.channel import Channel, Closed
from weft.run.listener import Listener, forward, listen
from weft.run.nodes import Nodes
from weft.run.scratch import scratch
from weft.run.secure import Address, Credentials
from weft.serve.agent import AgentConfig, end, kill, start
from weft.serve.process import Process

SILENCE_SECONDS = 10.0
"""A rank that sends no beat for so long is lost; beats come each second."""
AGENT = -1
START_SECONDS = 120.0
"""From the start of an agent to the first hello of all ranks: torch has to be read from disk."""


@dataclass
class Rank:
    """One connection; `joined` is its generation, `ready` once it has loaded the model."""

    channel: Channel
    number: int
    pid: int
    host: str
    process: Process | None = None
    """If it is on this machine."""
    store: int = 0
    """The port on loopback of the store that it serves, if it is rank 0 of several machines."""
    joined: int | None = None
    ready: bool = False
    beat: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    """What the last beat said."""


class Ranks:
    """`events` gets ("rank", number, said, blob), ("ready", facts) and ("lost", reason)."""

    def __init__(
        self,
        world: int,
        configure: Callable[[Address, str], AgentConfig],
        events: queue.Queue[Any],
        nodes: Nodes | None = None,
    ) -> None:
        """`configure` is given an address and a token, for the agent on this machine."""
        self.world, self.events, self._configure = world, events, configure
        self.nodes = nodes or Nodes()
        self.all: dict[int, Rank] = {}
        self.generation = 0
        self.trouble = ""
        """What ranks said when they could not start."""
        self._lock = threading.RLock()
        self._stack = ExitStack()
        self._folder = Path()
        self._listeners: list[Listener] = []
        self._agent: subprocess.Popen[bytes] | None = None
        self._links: set[Channel] = set()
        """To the agents of other machines, which replace their ranks when these are closed."""
        self._token = self.nodes.token or secrets.token_urlsafe(32)
        self._failures: Counter[int] = Counter()
        """How often each rank ended before it was ready, since all were; and our agent."""
        self._started = self._asked = 0.0
        self._closing = False

    @property
    def is_ready(self) -> bool:
        with self._lock:
            return len(self.all) == self.world and all(rank.ready for rank in self.all.values())

    @property
    def memory(self) -> float:
        """Bytes of the rank that may have least, as far as they know."""
        with self._lock:
            return min((rank.facts.get("memory") or inf for rank in self.all.values()), default=inf)

    @property
    def failures(self) -> int:
        """Tries to start since all were ready: a rank that fails takes others with it, which counts once."""
        with self._lock:
            return max(self._failures.values(), default=0)

    @property
    def refusal(self) -> str:
        """Whom the port between machines has just refused, and why."""
        return next((each.refusal for each in self._listeners if each.refusal), "")

    @property
    def address(self) -> str:
        """The unix socket of ranks on this machine; its folder is private."""
        return str(self._folder / "ranks")

    def start(self) -> None:
        self._folder = self._stack.enter_context(scratch("serve"))
        # For any other purpose, such as to see that the token fits, the proof is all.
        handlers = {"rank": self._serve, "store": self._reach_store, "agent": self._hold}
        if self.nodes.count > 1:
            credentials = self.nodes.credentials(self._folder)
            port = listen((self.nodes.address, self.nodes.master[1]))
            self._listeners.append(Listener(port, credentials, handlers))
        local = listen(Path(self.address))
        self._listeners.append(Listener(local, Credentials(self._token), handlers))
        self._start_agent()

    def send(self, number: int, said: dict[str, Any], blob: bytes = b"") -> None:
        """To one rank; one that takes it no more is lost."""
        if (rank := self.all.get(number)) is not None:
            try:
                rank.channel.send(said, blob)
            except Closed:
                self._end(rank, f"rank {number} takes no messages")

    def look(self) -> None:
        """Called often: starts an agent that ended, ends ranks that are silent."""
        now = time.monotonic()
        if not self._closing and self._agent is not None and (code := self._agent.poll()) is not None:
            self._failed(AGENT, f"What starts the ranks ended with code {code}.")
            self._start_agent()
        with self._lock:
            silent = [
                rank
                for rank in self.all.values()
                if rank.joined is not None and now - rank.beat > SILENCE_SECONDS
            ]
            late = len(self.all) < self.world and now - max(self._started, self._asked) > START_SECONDS
        for rank in silent:
            self.kill(rank.number, f"rank {rank.number} was silent for {SILENCE_SECONDS:.0f} s")
        if late and not self._closing and self._agent is not None:
            self._begin_anew()

    def _begin_anew(self) -> None:
        assert self._agent is not None
        why = f"{len(self.all)} of {self.world} ranks have come in {START_SECONDS:.0f} s."
        if self.nodes.count == 1:
            self._failed(AGENT, why)
        else:  # somebody may still have to start another machine
            self.trouble = f"{why} Is weft serve started on every machine?"
        kill(self._agent)
        self._replace_elsewhere()
        self._start_agent()

    def kill(self, number: int, reason: str) -> None:
        """End a rank that does not answer; its agent starts all again."""
        if (rank := self.all.get(number)) is not None:
            self._end(rank, reason)

    def _end(self, rank: Rank, reason: str) -> None:
        self._lose(rank, reason)
        if rank.process is not None:
            rank.process.kill()
        else:
            self._replace_elsewhere()

    def _replace_elsewhere(self) -> None:
        for link in list(self._links):
            link.close()

    def close(self, seconds: float = 5.0) -> None:
        """All ranks and the agent end."""
        self._closing = True
        for number in list(self.all):
            self.send(number, {"do": "end"})
        for listener in self._listeners:
            listener.close()
        if self._agent is not None:
            end(self._agent, seconds)
        for rank in list(self.all.values()):
            rank.channel.close()
        self._replace_elsewhere()
        self._stack.close()

    def _start_agent(self) -> None:
        if self._agent is not None:
            end(self._agent)  # it has; but its pipe is still open
        self._started = time.monotonic()
        self._agent = start(self._configure(self.address, self._token))

    def _hold(self, link: Channel) -> None:
        """Keep the connection of an agent on another machine."""
        self._links.add(link)
        try:
            link.receive()
        finally:
            self._links.discard(link)

    def _reach_store(self, channel: Channel) -> None:
        """Carry a connection of a rank to the store that rank 0 serves on this machine's loopback."""
        if (first := self.all.get(0)) is not None and first.store:
            forward(socket.create_connection(("127.0.0.1", first.store)), channel.socket)

    def _serve(self, channel: Channel) -> None:
        """One rank, as long as its connection lasts."""
        rank = None
        try:
            said, _ = channel.receive()
            if said.get("told") == "failed":
                self.trouble = str(said["message"])
                # Without a rank it is an agent: ours is seen to end, others go on.
                if (number := said.get("rank")) is not None:
                    self._failed(int(number), self.trouble)
            if said.get("told") == "hello" and said.get("world") != self.world:
                self.trouble = f"A rank is one of {said.get('world')}, and this server has {self.world}. "
                self.trouble += "Start weft serve with the same --nodes and --ranks on every machine."
                return
            if said.get("told") != "hello":
                return
            rank = Rank(channel, int(said["rank"]), int(said["pid"]), str(said["host"]))
            rank.store = int(said.get("store", 0))
            rank.process = Process.of(channel.socket, session=self._agent and self._agent.pid)
            self._welcome(rank)
            while True:
                self._hear(rank, *channel.receive())
        except (CommError, OSError):
            if rank is not None:
                self._lose(rank, f"rank {rank.number} is lost")

    def _welcome(self, rank: Rank) -> None:
        """When all are there that have not joined before, they join."""
        with self._lock:
            before = self.all.get(rank.number)
            if before is not None and before is not rank:
                self._lose(before, f"rank {rank.number} began anew")
            self.all[rank.number] = rank
            if len(self.all) < self.world or any(each.joined for each in self.all.values()):
                return
            self.generation += 1
            self._store(self.generation - 1).unlink(missing_ok=True)
            join = {"do": "join", "generation": self.generation, "store": str(self._store(self.generation))}
            for each in list(self.all.values()):
                each.joined, each.beat = self.generation, time.monotonic()
                self.send(each.number, join)

    def _store(self, generation: int) -> Path:
        """Return the file in which the ranks of a generation on one machine find each other."""
        return self._folder / f"store{generation}"

    def _hear(self, rank: Rank, said: dict[str, Any], blob: bytes) -> None:
        rank.beat = time.monotonic()
        told = said.get("told")
        if told == "beat":
            rank.last = said
        elif told == "ready":
            with self._lock:
                rank.ready, rank.facts = True, said["facts"]
                if self.is_ready:
                    self._failures.clear()
                    self.trouble = ""
                    self.events.put(("ready", self.all[0].facts))
        elif told == "failed" and said.get("batch") is None:
            self.trouble = str(said.get("message", ""))
        elif self.all.get(rank.number) is rank:
            self.events.put(("rank", rank.number, said, blob))

    def _failed(self, number: int, why: str) -> None:
        """Counted; what ranks said themselves tells more than `why`."""
        with self._lock:
            self._failures[number] += 1
            self.trouble = self.trouble or why

    def _lose(self, rank: Rank, reason: str) -> None:
        """One is lost, so all of its generation are: who still runs is told to leave."""
        with self._lock:
            if self.all.get(rank.number) is not rank:
                return
            gone = [each for each in self.all.values() if each is rank or each.joined is not None]
            for each in gone:
                del self.all[each.number]
                if not each.ready and not self._closing:
                    self._failed(each.number, f"Rank {rank.number} ended before it was ready.")
            self._asked = time.monotonic()
        for each in gone:
            if each is not rank:
                with suppress(Closed):
                    each.channel.send({"do": "exit"})
            each.channel.close()
        if rank.joined is not None and not self._closing:
            self.events.put(("lost", reason))
