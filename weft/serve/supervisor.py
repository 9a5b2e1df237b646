"""RankSupervisor: start the server's ranks by an agent, hold connections to them, and replace lost ranks.

All ranks of a generation join one world together. When one is lost, all are, and a new generation begins.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from weft.core.errors import CommError
from weft.run.net.channel import Channel, Closed
from weft.run.net.listener import Listener, forward, listen
from weft.run.net.scratch import scratch
from weft.run.net.secure import Address, Credentials
from weft.run.spawn.nodes import Nodes
from weft.serve import messages
from weft.serve.agent import AgentConfig, end, kill, start
from weft.serve.messages import ProtocolError, decode, encode
from weft.serve.model_facts import ModelFacts

RanksEvent = messages.BatchMessage | messages.Ready | messages.RanksLost

SILENCE_SECONDS = 10.0
"""A rank that sends no beat for so long is lost; beats come each second."""
AGENT_NUMBER = -1  # of the agent on this machine, where failed starts are counted by rank
START_SECONDS = 120.0
"""Time limit from the start of an agent to the hello of all ranks, which read torch from disk."""


@dataclass
class RankConnection:
    """One rank. `joined` is its generation; `facts` are there once it has loaded the model."""

    channel: Channel
    number: int
    pid: int
    host: str
    store_port: int = 0  # of the store that rank 0 serves on loopback, if there are several machines
    joined: int | None = None
    facts: ModelFacts | None = None
    last_message: float = field(default_factory=time.monotonic)
    beat: messages.Beat = messages.Beat()


class RankSupervisor:
    """Start the ranks of a server, connect them, and start all of them again when one is lost.

    `configure` returns the configuration of the agent on this machine for an address and a token. `emit`
    receives `Ready` once all ranks are, `RanksLost`, and what leaders (the lowest rank of each batch) send.
    """

    def __init__(
        self,
        world: int,
        configure: Callable[[Address, str], AgentConfig],
        emit: Callable[[RanksEvent], None],
        nodes: Nodes | None = None,
    ) -> None:
        self.world, self._configure, self._emit = world, configure, emit
        self.nodes = nodes or Nodes()
        self.all: dict[int, RankConnection] = {}  # the connected ranks, by number
        self.generation = 0
        self.trouble = ""  # why ranks could not start, as they reported it
        self._lock = threading.RLock()
        self._stack = ExitStack()
        self._folder = Path()
        self._listeners: list[Listener] = []
        self._agent: subprocess.Popen[bytes] | None = None
        self._links: set[Channel] = set()
        """To the agents. An agent replaces its ranks when its link is closed."""
        self._token = self.nodes.token or secrets.token_urlsafe(32)
        self._failures: Counter[int] = Counter()  # failed starts by rank, since all were last ready
        self._agent_started = self._ranks_lost = 0.0
        self._closing = False

    @property
    def is_ready(self) -> bool:
        with self._lock:
            return len(self.all) == self.world and all(rank.facts is not None for rank in self.all.values())

    @property
    def memory(self) -> float:
        """Bytes of memory of the rank that has the least; `inf` if unknown."""
        with self._lock:
            facts = [rank.facts for rank in self.all.values() if rank.facts]
            return min((each.memory or inf for each in facts), default=inf)

    @property
    def failures(self) -> int:
        """Failed starts since all ranks were last ready; ranks that fail together count once."""
        with self._lock:
            return max(self._failures.values(), default=0)

    @property
    def refusal(self) -> str:
        """Which connection the port between machines has just refused, and why."""
        return next((each.refusal for each in self._listeners if each.refusal), "")

    @property
    def address(self) -> str:
        """The unix socket for ranks on this machine, in a private folder."""
        return str(self._folder / "ranks")

    def start(self) -> None:
        self._folder = self._stack.enter_context(scratch("serve"))
        # Connections for another purpose ("ping") are authenticated and closed: they only check the token.
        handlers = {"rank": self._serve, "store": self._reach_store, "agent": self._hold}
        if self.nodes.count > 1:
            credentials = self.nodes.credentials(self._folder)
            port = listen((self.nodes.address, self.nodes.master[1]))
            self._listeners.append(Listener(port, credentials, handlers))
        local = listen(Path(self.address))
        self._listeners.append(Listener(local, Credentials(self._token), handlers))
        self._start_agent()

    def send(self, ranks: Sequence[int], message: messages.ToRank) -> None:
        """Send a message to some ranks; one that does not take it is lost."""
        header, payload = encode(message)
        for number in ranks:
            if (rank := self.all.get(number)) is not None:
                try:
                    rank.channel.send(header, payload)
                except Closed:
                    self.kill(number, f"rank {number} takes no messages")

    def check(self) -> None:
        """Restart an agent that ended, and end ranks that are silent. Call this often."""
        now = time.monotonic()
        if not self._closing and self._agent is not None and (code := self._agent.poll()) is not None:
            self._count_failure(AGENT_NUMBER, f"The agent that starts the ranks ended with code {code}.")
            self._start_agent()
        with self._lock:
            silent = [
                rank
                for rank in self.all.values()
                if rank.joined is not None and now - rank.last_message > SILENCE_SECONDS
            ]
            since = max(self._agent_started, self._ranks_lost)
            is_late = len(self.all) < self.world and now - since > START_SECONDS
        for rank in silent:
            self.kill(rank.number, f"rank {rank.number} was silent for {SILENCE_SECONDS:.0f} s")
        if is_late and not self._closing and self._agent is not None:
            self._restart_agent(self._agent)

    def _restart_agent(self, agent: subprocess.Popen[bytes]) -> None:
        why = f"{len(self.all)} of {self.world} ranks have connected in {START_SECONDS:.0f} s."
        if self.nodes.count == 1:
            self._count_failure(AGENT_NUMBER, why)
        else:  # another machine may still have to be started
            self.trouble = f"{why} Start weft serve on every machine."
        kill(agent)
        _close(self._links)
        self._start_agent()

    def kill(self, number: int, reason: str, *, blamed: bool = True) -> None:
        """Lose a rank that does not answer; the agents start all ranks again."""
        if (rank := self.all.get(number)) is not None:
            links = list(self._links)  # not those of agents that start ranks again already
            self._lose(rank, reason, blamed=blamed)
            _close(links)

    def close(self, seconds: float = 5.0) -> None:
        """End all ranks and the agent."""
        self._closing = True
        self.send(list(self.all), messages.Shutdown())
        for listener in self._listeners:
            listener.close()
        if self._agent is not None:
            end(self._agent, seconds)
        _close(rank.channel for rank in self.all.values())
        _close(self._links)
        self._stack.close()

    def _start_agent(self) -> None:
        if self._agent is not None:
            end(self._agent)  # the process has ended, but its pipe is still open
        self._agent_started = time.monotonic()
        self._agent = start(self._configure(self.address, self._token))

    def _hold(self, link: Channel) -> None:
        """Hold the connection of an agent until either side closes it."""
        self._links.add(link)
        try:
            link.receive()
        finally:
            self._links.discard(link)

    def _reach_store(self, channel: Channel) -> None:
        """Forward a connection of a rank elsewhere to the store that rank 0 serves on loopback here."""
        if (first := self.all.get(0)) is not None and first.store_port:
            forward(socket.create_connection(("127.0.0.1", first.store_port)), channel.socket)

    def _serve(self, channel: Channel) -> None:
        """Serve one rank as long as its connection lasts."""
        rank = None
        try:
            message = decode(*channel.receive())
            if isinstance(message, messages.RankFailed):
                self.trouble = message.message
                # An agent sends no rank: `check` notices when the one here ends, others start again.
                if message.rank is not None:
                    self._count_failure(message.rank, self.trouble)
            if not isinstance(message, messages.Hello):
                return
            if message.world != self.world:
                self.trouble = f"A rank expects {message.world} ranks, this server has {self.world}. "
                self.trouble += "Start weft serve with the same --nodes and --ranks on every machine."
                return
            rank = RankConnection(channel, message.rank, message.pid, message.host)
            rank.store_port = message.store_port
            self._welcome(rank)
            while True:
                self._on_message(rank, decode(*channel.receive()))
        except (CommError, OSError) as error:
            if isinstance(error, ProtocolError):
                self.trouble = str(error)
            if rank is not None:
                self._lose(rank, f"rank {rank.number} is lost")

    def _welcome(self, rank: RankConnection) -> None:
        """Add a rank. When all are connected and none has joined a world before, let them join one."""
        with self._lock:
            before = self.all.get(rank.number)
            if before is not None and before is not rank:
                self._lose(before, f"rank {rank.number} was started again")
            self.all[rank.number] = rank
            if len(self.all) < self.world or any(each.joined for each in self.all.values()):
                return
            self.generation += 1
            self._store(self.generation - 1).unlink(missing_ok=True)
            for each in self.all.values():
                each.joined, each.last_message = self.generation, time.monotonic()
            store = str(self._store(self.generation))
            self.send(list(self.all), messages.Join(generation=self.generation, store=store))

    def _store(self, generation: int) -> Path:
        """Return the file of the store through which the ranks of a generation meet on one machine."""
        return self._folder / f"store{generation}"

    def _on_message(self, rank: RankConnection, message: messages.FromRank | messages.ToRank) -> None:
        rank.last_message = time.monotonic()
        if isinstance(message, messages.Beat):
            rank.beat = message
        elif isinstance(message, messages.Ready):
            with self._lock:
                rank.facts = message.facts
                if self.is_ready and (first := self.all[0].facts) is not None:
                    self._failures.clear()
                    self.trouble = ""
                    self._emit(messages.Ready(facts=first))
        elif isinstance(message, messages.RankFailed):
            self.trouble = message.message
        elif isinstance(message, messages.BatchMessage) and self.all.get(rank.number) is rank:
            self._emit(message)

    def _count_failure(self, number: int, why: str) -> None:
        """Count a failed start. `why` is shown if no rank has reported a reason itself."""
        with self._lock:
            self._failures[number] += 1
            self.trouble = self.trouble or why

    def _lose(self, rank: RankConnection, reason: str, *, blamed: bool = True) -> None:
        """Remove a rank and its whole generation."""
        with self._lock:
            if self.all.get(rank.number) is not rank:
                return
            lost = [each for each in self.all.values() if each is rank or each.joined is not None]
            for each in lost:
                del self.all[each.number]
                if each.facts is None and not self._closing:
                    self._count_failure(each.number, f"Rank {rank.number} ended before it was ready.")
            self._ranks_lost = time.monotonic()
        for each in lost:
            each.channel.close()  # the others exit at once
        if rank.joined is not None and not self._closing:
            self._emit(messages.RanksLost(reason, blamed))


def _close(channels: Iterable[Channel]) -> None:
    for channel in list(channels):
        channel.close()
