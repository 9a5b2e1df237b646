"""The server's end of its ranks: one that does not listen, and the end of all."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.serve.ranks import FACTS
from tests.worlds import becomes_true, running
from weft.run.net import channel as channels
from weft.run.net.channel import Channel, Closed
from weft.run.net.secure import connect
from weft.run.spawn.nodes import Nodes
from weft.serve.agent import AgentConfig
from weft.serve.messages import (
    Hello,
    Join,
    RankFailed,
    RanksLost,
    Ready,
    RunBatch,
    decode,
    encode,
)
from weft.serve.supervisor import RanksEvent, RankSupervisor

HELLO = Hello(rank=0, world=1, pid=0, host="a thread")
ROOT = Path(__file__).parents[2]


class _Ranks(RankSupervisor):
    def __init__(self) -> None:
        self.events: queue.Queue[RanksEvent] = queue.Queue()
        super().__init__(1, lambda *_: None, self.events.put)  # type: ignore[arg-type,return-value]

    def _start_agent(self) -> None:
        """The test is what it would start."""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Ranks]:
    monkeypatch.setattr(channels, "SEND_TIMEOUT_SECONDS", 0.3)
    ranks = _Ranks()
    ranks.start()
    yield ranks
    ranks.close()


def joined(ranks: _Ranks) -> Channel:
    rank = connect(ranks.address, ranks._token, "rank")
    rank.send(*encode(HELLO))
    assert isinstance(decode(*rank.receive()), Join)
    return rank


def test_a_rank_that_takes_no_messages_is_lost_and_nobody_waits_for_it(ranks: _Ranks) -> None:
    """As one that was stopped by SIGSTOP: its connection lasts, and what it is sent fills all buffers."""
    rank = joined(ranks)
    message = RunBatch(batch="", ids=(), jobs=(), state=bytes(2**26))
    sending = threading.Thread(target=ranks.send, args=([0], message), daemon=True)
    sending.start()
    sending.join(10)
    assert not sending.is_alive()
    rank.close()
    assert isinstance(ranks.events.get(timeout=1), RanksLost)
    assert not ranks.all


def test_nobody_waits_for_connections_after_the_end(ranks: _Ranks) -> None:
    def waits() -> bool:
        return any(each.name == "weft-accept" for each in threading.enumerate())

    joined(ranks).close()
    ranks.close()
    until = time.monotonic() + 5
    while waits() and time.monotonic() < until:
        time.sleep(0.01)
    assert not waits()


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_starts_ranks_and_ends_or_brings_none_is_a_try_and_is_told(
    monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """Of several machines some may come later: to wait for them is no failure."""
    code = {"now": "import sys; sys.exit(3)", "never": "import sys; sys.stdin.read()"}
    begun: list[str] = []

    def start(config: AgentConfig) -> subprocess.Popen[bytes]:
        begun.append(config.model)
        command = [sys.executable, "-S", "-c", code[config.model]]
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def ranks_by(model: str) -> RankSupervisor:
        return RankSupervisor(
            2,
            lambda address, token: AgentConfig(address=address, token=token, model=model, ranks=1),
            lambda _: None,
            Nodes(count=nodes, token="a-token-of-all-nodes"),
        )

    monkeypatch.setattr("weft.serve.supervisor.start", start)
    for model, says in (("now", "ended with code 3"), ("never", "0 of 2 ranks have connected in 0 s")):
        monkeypatch.setattr("weft.serve.supervisor.START_SECONDS", 0.0 if model == "never" else 1e9)
        ranks = ranks_by(model)
        ranks.start()
        until = time.monotonic() + 20
        while begun.count(model) < 4 and time.monotonic() < until:
            ranks.check()
            time.sleep(0.01)
        ranks.close()
        assert says in ranks.trouble
        tries = begun.count(model) - 1
        assert ranks.failures == (0 if (model, nodes) == ("never", 2) else tries)


def test_a_rank_that_ends_before_it_is_ready_counts_by_its_number(ranks: _Ranks) -> None:
    for _ in range(2):
        joined(ranks).close()
        assert isinstance(ranks.events.get(timeout=5), RanksLost)
    assert ranks.trouble == "Rank 0 ended before it was ready."
    assert ranks.failures == 2
    for number, tries in ((None, 2), (0, 3)):  # an agent of another machine, which tries again; a rank
        rank = connect(ranks.address, ranks._token, "rank")
        rank.send(*encode(RankFailed(rank=number, message=f"No {number}.")))
        with pytest.raises(Closed):
            rank.receive()
        rank.close()
        assert (ranks.failures, ranks.trouble) == (tries, f"No {number}.")
    rank = joined(ranks)
    rank.send(*encode(Ready(facts=FACTS)))
    assert isinstance(ranks.events.get(timeout=5), Ready)
    assert not ranks.failures
    rank.close()
    assert isinstance(ranks.events.get(timeout=5), RanksLost)
    assert not ranks.failures  # it was ready: that is a loss, and no failure to start


def test_rank_of_another_world_is_named(ranks: _Ranks) -> None:
    rank = connect(ranks.address, ranks._token, "rank")
    rank.send(*encode(replace(HELLO, world=4)))
    with pytest.raises(Closed):
        rank.receive()
    assert ranks.trouble.startswith("A rank expects 4 ranks, this server has 1.")
    rank.close()


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"told": "hello", "rank": 0}, "A rank has version 0 of the protocol, this server has 2. Install"),
        (encode(HELLO)[0] | {"version": 3, "added": 1}, "A rank has version 3 of the protocol"),
        (encode(HELLO)[0] | {"rank": "first"}, "Hello: rank must be a whole number, got 'first'"),
        ({"type": "Greeting"}, "Unknown type of message 'Greeting'."),
    ],
)
def test_rank_of_another_version_is_refused_with_a_sentence(
    ranks: _Ranks, header: dict[str, object], says: str
) -> None:
    rank = connect(ranks.address, ranks._token, "rank")
    rank.send(header)
    with pytest.raises(Closed):
        rank.receive()
    rank.close()
    assert says in ranks.trouble
    assert not ranks.all


def test_rank_that_hangs_is_replaced_by_its_agent(ranks: _Ranks) -> None:
    agent, rank = connect(ranks.address, ranks._token, "agent"), joined(ranks)
    assert becomes_true(lambda: len(ranks._links) == 1)
    ranks.kill(0, "rank 0 was silent for 10 s")
    assert becomes_true(lambda: not ranks._links)
    with pytest.raises(Closed):
        agent.receive()
    agent.close()
    rank.close()


# Ranks that do nothing, forked from here: torch is not needed.
AGENT = """
import multiprocessing, os, signal, sys
from weft.serve import agent
fork = multiprocessing.get_context("fork")
agent.multiprocessing.get_context = lambda _: fork
def hang(config, local):
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
agent._rank, agent.GRACE_SECONDS = hang, 0.1
where = {"address": sys.argv[1], "token": sys.argv[2]}
agent._supervise(agent.AgentConfig(**where, model="", ranks=1, nodes=2, node=1))
"""


def test_agent_replaces_its_ranks_when_the_server_closes_its_connection(ranks: _Ranks) -> None:
    command = [sys.executable, "-c", AGENT, ranks.address, ranks._token]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        first = int(agent.stdout.readline())
        assert becomes_true(lambda: len(ranks._links) == 1)
        next(iter(ranks._links)).close()
        second = int(agent.stdout.readline())
        assert not running(first)
        agent.stdin.close()
        assert agent.wait(30) == 0
        assert not running(second)
