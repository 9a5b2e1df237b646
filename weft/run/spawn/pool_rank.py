"""One rank of a pool: a process that answers calls until it receives STOP."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from weft.core.errors import InputError
from weft.run.net import interfaces
from weft.run.net.scratch import use_for_multiprocessing

STOP, STACK_REQUEST = b"stop", b"stack"
"""The two messages that are not a pickled call."""
STOP_SECONDS = 2.0
"""For an idle rank to leave its process group."""
KILL_SECONDS = 1.0
"""Between SIGTERM and SIGKILL."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PRELOAD = ["numpy", "torch", "torch.distributed"]
"""Modules that ranks are forked with; more may be added before the first pool."""


class Returned(NamedTuple):
    """The value that a call returned."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    """A call that did not return; `kind` is the exception's type, or "killed", "exited" or "stuck"."""

    kind: str
    message: str
    traceback: str = ""
    seconds: float = 0.0  # since the start of the run
    error: BaseException | None = None  # the exception itself, if it can be pickled

    @classmethod
    def of(cls, error: BaseException) -> CallFailure:
        text = "".join(traceback.format_exception(error))
        carried: BaseException | None = error
        try:
            pickle.loads(pickle.dumps(error))  # some exceptions pickle but cannot be rebuilt
        except Exception:
            carried = None
        return cls(kind=type(error).__name__, message=str(error), traceback=text, error=carried)

    def line(self, rank: int) -> str:
        text = " ".join(self.message.split())
        text = text if len(text) <= 300 else f"{text[:297]}..."
        raised = "" if self.kind in ("killed", "exited", "stuck") else f": {self.kind}:"
        return f"rank {rank}{raised} {text} ({self.seconds:.1f} s)"


Answer = Returned | CallFailure


def start_ranks(size: int, directory: str) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """Yield new processes and the pipes to them; they remove `directory` if this process dies first."""
    start_forkserver()
    for _ in range(size):
        ours, theirs = connection.Pipe()
        process = get_context("forkserver").Process(target=_serve, args=(theirs, directory, os.getpid()))
        process.start()
        theirs.close()
        yield process, ours


def end_ranks(
    processes: list[ForkServerProcess], pipes: list[Connection], directory: str, *, grace: bool
) -> None:
    """End the processes and wait for them; idle ones (`grace`) may leave their group first."""
    for pipe in pipes:
        if grace:
            with suppress(OSError):
                pipe.send_bytes(STOP)
        pipe.close()  # this ends a rank that got no STOP, even one blocked in gloo
    for process in processes:
        if not grace and process.is_alive():
            process.terminate()
    await_ends(processes, STOP_SECONDS + 1.0 if grace else KILL_SECONDS)
    shutil.rmtree(directory, ignore_errors=True)


def await_ends(processes: Sequence[ForkServerProcess], seconds: float) -> None:
    """Wait until all processes have ended, and kill those that have not after some seconds."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def call(fn: Callable[..., Any], *args: Any) -> bytes:
    """Return the message that makes a rank answer with `fn(*args)`."""
    try:
        # Plain pickle: multiprocessing's own would send tensors as shared-memory descriptors.
        pickled = pickle.dumps((fn, args), pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        hint = "Pass a function defined at the top of a module, and arguments that pickle."
        raise InputError(f"cannot send {fn} to the ranks: {error}.", hint=hint) from error
    return pickle.dumps((sys.path, pickled))


def get_ready(rank: int, size: int, threads: int, transport: str) -> None:
    """Set up the process; the first call of every rank."""
    import torch

    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}  # by which a rank finds its GPU
    os.environ["WEFT_TRANSPORT"] = transport
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for processes that a rank may start itself
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces.LOOPBACK  # even if the user's is for several machines
    torch.set_num_threads(threads)


def join_world(rank: int, size: int, timeout: float, directory: str) -> None:
    """Join the process group; the second call of every rank."""
    from weft.run import groups

    method = f"file://{directory}/store"
    groups.join_world(timedelta(seconds=timeout), init_method=method, rank=rank, world_size=size)


def barrier(seconds: float) -> None:
    """Wait for all ranks; a time-out names those that are missing."""
    import torch.distributed as dist

    dist.monitored_barrier(timeout=timedelta(seconds=seconds))  # pyright: ignore[reportUnknownMemberType]


def start_forkserver() -> None:
    """Start the process that ranks are forked from, with torch imported and without threads."""
    use_for_multiprocessing()
    forkserver.set_forkserver_preload(PRELOAD)
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    resource_tracker.ensure_running()  # here, because its own start unblocks SIGINT
    # A blocked SIGINT is inherited, so Ctrl-C reaches the parent alone, however early it comes.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(pipe: Connection, directory: str, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    calls: SimpleQueue[bytes] = SimpleQueue()
    lock = threading.Lock()
    watched = (pipe, lock, calls, directory, parent)
    threading.Thread(target=_watch, args=watched, daemon=True).start()
    while (call := calls.get()) != STOP:
        reply = _answer(call)
        with lock, suppress(OSError):  # the parent is gone: _watch ends the process
            pipe.send_bytes(reply)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _watch(
    pipe: Connection, lock: threading.Lock, calls: SimpleQueue[bytes], directory: str, parent: int
) -> None:
    """Take messages beside the main thread, which may be blocked in gloo when the parent dies."""
    sources: list[Any] = [pipe]
    with suppress(OSError, AttributeError):  # gone already, or not Linux: the pipe ends too
        # The pipe alone would miss a parent whose forked children still hold its end.
        sources.append(os.pidfd_open(parent))
    try:
        while pipe in connection.wait(sources):
            message = pipe.recv_bytes()
            if message == STACK_REQUEST:
                with lock:
                    pipe.send_bytes(pickle.dumps(_main_stack()))
                continue
            calls.put(message)
            if message == STOP:
                time.sleep(STOP_SECONDS)  # the main thread ends the process sooner, if it can
                break
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)


def _main_stack() -> CallFailure:
    frame = sys._current_frames()[threading.main_thread().ident or 0]  # pyright: ignore[reportPrivateUsage]
    stack = traceback.extract_stack(frame)
    own = [i for i, entry in enumerate(stack) if entry.filename == __file__]
    stack = stack[max(own, default=-1) + 1 :] or stack  # from the called function on
    last = stack[-1]
    function = f"{last.name} ({Path(last.filename).name}:{last.lineno})"
    text = "".join(traceback.format_list(stack))
    return CallFailure(kind="stuck", message=f"was still in {function}", traceback=text)


def _answer(message: bytes) -> bytes:
    try:
        sys.path[:], call = pickle.loads(message)
        fn, args = pickle.loads(call)
        return pickle.dumps(Returned(fn(*args)), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        return pickle.dumps(CallFailure.of(error))
