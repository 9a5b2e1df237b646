"""Agent: start the ranks of one machine, and start all of them again when one is lost.

    python -c "from weft.serve.agent import main; main()" < its `AgentConfig` as a line of JSON

It ends, with its ranks, when its standard input ends: that is, with the server, however the server ends. It
opens no port; ranks are forked from a process that has torch loaded, by a unix socket in a 0700 folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess

from weft.core import tables
from weft.core.errors import CommError
from weft.run.net import interfaces
from weft.run.net.channel import Closed
from weft.run.net.scratch import use_for_multiprocessing
from weft.run.net.secure import connect
from weft.run.spawn.launch import usable_cores
from weft.run.spawn.pool_rank import await_ends
from weft.serve.api_error import one_line
from weft.serve.messages import RankFailed, encode

GRACE_SECONDS = 2.0
RESTART_SECONDS = 0.5
"""Least time between two starts: ranks that cannot even start must not keep the machine busy."""
PRELOAD = ["torch", "torch.distributed", "weft.serve.worker"]


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Options of the model on each rank; "" is the default."""

    name: str = ""
    dtype: str = ""
    plan: str = "auto"
    backend: str = "auto"
    sparse: str | None = None
    cache: str | None = None


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """What an agent reads from standard input: the token is in no command line and no environment."""

    address: tuple[str, int] | str
    """Of the server: (host, port), or the path of a unix socket."""
    token: str
    model: str
    ranks: int
    """On this machine."""
    options: RankOptions = RankOptions()
    nodes: int = 1
    node: int = 0
    interface: str = interfaces.LOOPBACK


def start(config: AgentConfig) -> subprocess.Popen[bytes]:
    """Start an agent for `end`; if it ends before that, start another."""
    # Not -m: each rank would run the main module again.
    command = [sys.executable, "-c", "from weft.serve.agent import main; main()"]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert agent.stdin is not None
    with suppress(BrokenPipeError):
        agent.stdin.write(json.dumps(asdict(config)).encode() + b"\n")
        agent.stdin.flush()
    return agent


def end(agent: subprocess.Popen[bytes], seconds: float = 5.0) -> None:
    """End an agent with its ranks; those that take longer are killed."""
    assert agent.stdin is not None
    with suppress(OSError):
        agent.stdin.close()
    try:
        agent.wait(seconds)
    except subprocess.TimeoutExpired:
        kill(agent)
        agent.wait()


def kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its ranks, which are in its session."""
    with suppress(ProcessLookupError):
        os.killpg(agent.pid, signal.SIGKILL)


def main() -> None:
    config = tables.read(AgentConfig, json.loads(sys.stdin.buffer.readline()), "standard input")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    usual = {"OMP_NUM_THREADS": str(max(1, usable_cores() // config.ranks))}
    usual |= interfaces.environment(config.interface)
    os.environ |= {name: value for name, value in usual.items() if not os.environ.get(name)}
    try:
        use_for_multiprocessing()
        multiprocessing.set_forkserver_preload(PRELOAD)
        _supervise(config)
    except Closed as error:  # the server is gone; the process that started this agent notices
        sys.exit(f"weft: {error}")
    except Exception as error:
        _report(config, None, error)
        raise


def _supervise(config: AgentConfig) -> None:
    """Run generations of ranks until standard input ends."""
    context = multiprocessing.get_context("forkserver")
    while True:
        began = time.monotonic()
        ranks = [context.Process(target=_rank, args=(config, local)) for local in range(config.ranks)]
        # The server closes it to have the ranks replaced: it cannot kill one that hangs.
        link = connect(config.address, config.token, "agent")
        try:
            for rank in ranks:
                rank.start()
            # Not sys.stdin: a thread that holds its lock when Python ends makes that end a crash.
            ready = connection.wait([0, link.socket, *(rank.sentinel for rank in ranks)])
            is_over = 0 in ready and not os.read(0, 4096)
        finally:
            _end_ranks(ranks)
            link.close()
        wait = max(0.0, began + RESTART_SECONDS - time.monotonic())
        if is_over or (0 in connection.wait([0], timeout=wait) and not os.read(0, 4096)):
            return


def _end_ranks(ranks: Sequence[ForkServerProcess]) -> None:
    started = [rank for rank in ranks if rank.pid is not None]
    for rank in started:
        rank.terminate()
    await_ends(started, GRACE_SECONDS)


def _rank(config: AgentConfig, local: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    number = config.node * config.ranks + local
    os.environ |= {
        "RANK": str(number), "WORLD_SIZE": str(config.ranks * config.nodes), "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(config.ranks), "GROUP_RANK": str(config.node),
    }  # fmt: skip
    try:
        from weft.serve.worker import main
    except BaseException as error:
        traceback.print_exc()
        _report(config, number, error)
        raise
    main(config.address, config.token, config.model, config.options)


def _report(config: AgentConfig, rank: int | None, error: BaseException) -> None:
    """Report to the server why a rank, or (None) any rank of this agent, cannot start."""
    with suppress(CommError):
        channel = connect(config.address, config.token, "rank")
        channel.send(*encode(RankFailed(rank=rank, message=one_line(error))))
        channel.close()
