"""Launch: a script on several ranks by torch's elastic agent, told as one outcome instead of N tracebacks."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weft.core.errors import CommError

GRACE_SECONDS = 10  # a second Ctrl-C is SIGTERM at once
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Which of how many machines this is, and where the first one waits for the others."""

    count: int = 1
    this: int = 0
    master: str = ""
    """host:port."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a launch ended: the exit code, the first rank that failed (if one did), how, and its traceback."""

    code: int = 0
    rank: int | None = None
    how: str = ""
    stack: str = ""


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(command: Sequence[str], ranks: int, machines: Machines, *, grace: int = GRACE_SECONDS) -> Ended:
    """Run a script, or -m and a module, on `ranks` processes here; `grace` is from Ctrl-C to SIGKILL.

    Returns when all have ended, or one has failed and the others are gone too.
    """
    from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    environment = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks))} | os.environ
    with tempfile.TemporaryDirectory(prefix="weft-run-") as directory, _alone(environment):
        agent = elastic_launch(config_of(ranks, machines, directory, grace), sys.executable)
        try:
            agent("-m", "weft.run.script", *command)
        except SignalException as error:
            return Ended(code=128 + error.sigval)
        except ChildFailedError as error:
            return _first(error.failures)
        except DistError as error:
            raise CommError(
                f"Machine {machines.this} of {machines.count} has not met the others at "
                f"{machines.master or 'localhost'}: {str(error).splitlines()[0].rstrip('.')}.",
                hint="Machine 0 listens there: the others must reach it, and nothing else may have the port.",
            ) from error
    return Ended()


def config_of(ranks: int, machines: Machines, directory: str, grace: int) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    if machines.count == 1:
        meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "127.0.0.1"}
    else:
        rank = {"rank": machines.this, "timeout": 900}
        meeting = {"rdzv_backend": "static", "rdzv_endpoint": machines.master, "rdzv_configs": rank}
    return LaunchConfig(
        min_nodes=machines.count,
        max_nodes=machines.count,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex if machines.count == 1 else "weft",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=directory),
        shutdown_timeout=grace,
        **meeting,  # pyright: ignore[reportArgumentType]
    )


@contextmanager
def _alone(environment: Mapping[str, str]) -> Iterator[None]:
    """The agent's signal handlers, environment and silence, as long as it runs."""
    before, handlers = dict(os.environ), {number: signal.getsignal(number) for number in SIGNALS}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # what the agent has to say is in `Ended`
    os.environ.update(environment)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(before)


def _first(failures: Mapping[int, Any]) -> Ended:
    """The failure that the others follow from.

    Ranks that still ran were ended with SIGTERM. One that could not even say why it ended, killed or
    crashed, comes before those that tell of a lost peer; else the first to say something was first.
    """

    def order(rank: int) -> tuple[int, int, int]:
        told = _told(failures[rank])
        followed = failures[rank].exitcode == -signal.SIGTERM
        return 2 if followed else 1 if told else 0, int(told.get("nanoseconds", 0)), rank

    rank = min(failures, key=order)
    code = failures[rank].exitcode
    if code < 0:  # told as a shell does
        return Ended(code=128 - code, rank=rank, how=f"was killed by {signal.Signals(-code).name}")
    stack = _told(failures[rank]).get("py_callstack", "")
    return Ended(code=code, rank=rank, how="failed" if stack else f"ended with code {code}", stack=stack)


def _told(failure: Any) -> dict[str, str]:
    """What `weft.run.script` wrote."""
    message = failure.error_file_data["message"]
    return message["extraInfo"] if isinstance(message, dict) else {}
