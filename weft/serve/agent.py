"""Agent: starts the ranks of one machine by torch's elastic launcher, and starts them again when one is lost.

    python -m weft.serve.agent < its `Orders` as a line of JSON

It ends, with its ranks, when its standard input ends: that is, with the server, however that went.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.core.errors import CommError
from weft.run.launch import Machines, usable_cores
from weft.serve.channel import Channel
from weft.serve.errors import words

FOR_EVER = 10**9
GRACE_SECONDS = 2
LOOK_SECONDS = 0.05  # between looks at the ranks: a lost one is noticed so soon
PRELOAD = ["torch", "torch.distributed", "weft.serve.rank"]


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the server tells an agent; the token is in no command line and no environment."""

    host: str
    port: int
    token: str
    model: str
    ranks: int
    """On this machine."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `weft.serve.rank.main`."""
    nodes: int = 1
    node: int = 0
    master: str = ""


def start(orders: Orders) -> subprocess.Popen[bytes]:
    """A process for `end`; if it ends before, who looks after it starts another."""
    command = [sys.executable, "-m", "weft.serve.agent"]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert agent.stdin is not None
    with suppress(BrokenPipeError):
        agent.stdin.write(json.dumps(asdict(orders)).encode() + b"\n")
        agent.stdin.flush()
    return agent


def end(agent: subprocess.Popen[bytes], seconds: float = 5.0) -> None:
    """With its ranks; those that take longer are killed."""
    assert agent.stdin is not None
    with suppress(OSError):
        agent.stdin.close()
    try:
        agent.wait(seconds)
    except subprocess.TimeoutExpired:
        kill(agent)
        agent.wait()


def kill(agent: subprocess.Popen[bytes]) -> None:
    """With its ranks, which it has no time to end."""
    with suppress(ProcessLookupError):
        os.killpg(agent.pid, signal.SIGKILL)


def main() -> None:
    orders = Orders(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_leave_with_the_server, daemon=True).start()
    logging.disable(logging.CRITICAL)  # ranks tell themselves why they end
    # Children of a server that has torch in it already start in tenths of a second.
    multiprocessing.set_forkserver_preload(PRELOAD)
    threads = max(1, usable_cores() // orders.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    machines = Machines(count=orders.nodes, this=orders.node, master=orders.master)
    try:
        with tempfile.TemporaryDirectory(prefix="weft-serve-") as directory:
            _launch(orders, machines, directory)
    except Exception as error:
        _tell((orders.host, orders.port), orders.token, None, error)
        raise


def _launch(orders: Orders, machines: Machines, directory: str) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.launcher.api import elastic_launch

    from weft.run.launch import config_of

    config = config_of(orders.ranks, machines, directory, GRACE_SECONDS)
    config.max_restarts, config.monitor_interval = FOR_EVER, LOOK_SECONDS
    config.start_method = "forkserver"
    try:
        elastic_launch(config, _rank)((orders.host, orders.port), orders.token, orders.model, orders.options)
    except SignalException:
        return  # it was told to


def _rank(address: tuple[str, int], token: str, model: str, options: dict[str, Any]) -> None:
    try:
        from weft.serve.rank import main
    except BaseException as error:
        traceback.print_exc()  # the launcher keeps it to itself
        # Else `weft.run.world` reads this, but that may be what cannot be imported.
        _tell(address, token, int(os.environ["RANK"]), error)
        raise
    main(address, token, model, options)


def _tell(address: tuple[str, int], token: str, rank: int | None, error: BaseException) -> None:
    """The server, why a rank, or none that this agent starts, will say hello."""
    with suppress(CommError):
        channel = Channel.connect(*address, token)
        channel.send({"told": "failed", "rank": rank, "message": words(error)})
        channel.close()


def _leave_with_the_server() -> None:
    while os.read(0, 4096):  # not sys.stdin: who holds its lock when Python ends makes that end a crash
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    # By its name: ranks find `_rank` in a module that is not __main__.
    from weft.serve.agent import main as begin

    begin()
