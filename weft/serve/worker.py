"""RankWorker: one process of the group that runs batches.

It sends `Hello`, joins the other ranks on `Join`, loads and warms up the model, sends `Ready`, and then runs
the batches that the server sends. It ends with its connection; the agent starts it again.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist

from weft.core.errors import CommError
from weft.diffusers.guidance import Halves
from weft.diffusers.parallelize import parallelize, restore
from weft.generate import pretrained
from weft.generate.prompts import remember_prompts
from weft.generate.step_cache import enable_cache
from weft.run.devices import default_dtype, device
from weft.run.groups import join_world, new_group
from weft.run.net.channel import Channel
from weft.run.net.listener import Tunnel, listen
from weft.run.net.secure import Address, connect
from weft.run.net.stores import open_store, serve_store
from weft.run.world import machines, place, world_of
from weft.serve import messages
from weft.serve.agent import RankOptions
from weft.serve.api_error import one_line
from weft.serve.assignment import groups
from weft.serve.executor import BatchExecutor
from weft.serve.facts import facts_of
from weft.serve.loaded_model import LoadedModel, warmup_batches
from weft.serve.messages import decode, encode
from weft.serve.model_facts import WarmupPace
from weft.serve.writer import Emit, ResultWriter

BEAT_SECONDS = 1.0
Store = dist.distributed_c10d.Store
Meshes = dict[tuple[int, ...], dist.ProcessGroup | None]


def main(
    address: Address, token: str, model: str, options: RankOptions, leave: Callable[[int], None] = os._exit
) -> None:
    """Run this rank until the server ends it."""
    channel = connect(address, token, "rank")
    rank, world = place()
    inbox = Inbox(channel, leave)
    served, port = None, 0
    if machines() > 1 and rank == 0:
        with listen(("127.0.0.1", 0)) as listening:
            served, port = serve_store(listening), listening.getsockname()[1]

    def emit(message: messages.FromRank) -> None:
        channel.send(*encode(message))

    emit(messages.Hello(rank=rank, world=world, pid=os.getpid(), host=socket.gethostname(), store_port=port))
    heartbeat = Heartbeat(emit)
    try:
        message = inbox.next()
        if not isinstance(message, messages.Join):
            return
        if world > 1 and not dist.is_initialized():
            # A new store for each generation of ranks: an old one has addresses of ranks that may be gone.
            store = served or _store(message, world, lambda: connect(address, token, "store"))
            join_world(store=store, rank=rank, world_size=world)
        worker = RankWorker(options, inbox, heartbeat)
        worker.load(Path(model), options.name or Path(model).name)
        emit(messages.Ready(facts=worker.model.facts))
        while isinstance(message := inbox.next(), messages.RunBatch):
            worker.run(message, emit)
    except BaseException as error:
        traceback.print_exc()
        with suppress(CommError):
            emit(messages.RankFailed(rank=rank, message=one_line(error)))
        raise
    finally:
        heartbeat.stop()
        inbox.is_closed = True
        channel.close()


def _store(join: messages.Join, world: int, connect_store: Callable[[], Channel]) -> Store:
    """Return the store of this generation: a file, or what rank 0 serves on its machine's loopback."""
    if machines() > 1:
        return open_store(Tunnel(connect_store).port)
    return dist.FileStore(join.store, world)  # pyright: ignore[reportPrivateImportUsage]


class Inbox:
    """The messages of the server in their order, and which batch it wants to stop."""

    def __init__(self, channel: Channel, leave: Callable[[int], None]) -> None:
        self.is_closed = False
        self._channel, self._leave = channel, leave
        self._messages: SimpleQueue[messages.FromRank | messages.ToRank] = SimpleQueue()
        self._stops: str | None = None
        threading.Thread(target=self._read, name="weft-inbox", daemon=True).start()

    def next(self) -> messages.FromRank | messages.ToRank:
        return self._messages.get()

    def wants_stop(self, batch: str) -> bool:
        return batch == self._stops

    def _read(self) -> None:
        """Read beside the main thread, which may wait for a lost rank: then only this thread can end it."""
        with suppress(CommError):
            while True:
                message = decode(*self._channel.receive())
                # Any other message withdraws a stop: it was of an earlier run, which ended by itself.
                self._stops = message.batch if isinstance(message, messages.StopBatch) else None
                if not isinstance(message, messages.StopBatch | messages.ContinueBatch):
                    self._messages.put(message)
        if not self.is_closed:
            self._leave(1)


class Heartbeat:
    """Send a beat each second. A `with` block of it counts as busy."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._since, self._busy = None, 0.0
        self._stopped, self._lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._run, name="weft-beat", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def __enter__(self) -> None:
        with self._lock:
            self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._busy += time.monotonic() - (self._since or 0.0)
            self._since = None

    def _take(self) -> float:
        """Return the busy seconds since the last call."""
        with self._lock:
            now = time.monotonic()
            busy = self._busy + (0.0 if self._since is None else now - self._since)
            self._busy, self._since = 0.0, None if self._since is None else now
            return busy

    def _run(self) -> None:
        with suppress(CommError):
            while not self._stopped.wait(BEAT_SECONDS):
                memory, limit = _memory()
                self._emit(messages.Beat(memory=memory, limit=limit, busy=self._take()))


def _memory() -> tuple[int, int]:
    """Return the bytes in use by this rank, and its share of the memory of the machine."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free, total
    with suppress(OSError, ValueError):  # as on other systems than Linux
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with suppress(OSError, ValueError):  # "max", or no container
            total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
        return resident, total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 0, 0


class RankWorker:
    """A rank of the world: its groups, made once, and the model, which is parallelized for one at a time."""

    model: LoadedModel

    def __init__(self, options: RankOptions, inbox: Inbox, heartbeat: Heartbeat) -> None:
        self.options, self.inbox, self.heartbeat = options, inbox, heartbeat
        self.meshes = _meshes()
        self.writer = ResultWriter()
        self._parallelized: tuple[int, ...] = ()

    def load(self, folder: Path, name: str) -> None:
        """Load the model, and warm it up on each group, so that the first request does not wait for that."""
        dtype = getattr(torch, self.options.dtype or default_dtype())
        pipe = pretrained.load_pipeline(folder, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        pipe = pipe.to(device())
        if cache := self.options.cache:
            enable_cache(pipe, cache)
        remember_prompts(pipe)
        facts = replace(facts_of(pipe, name), memory=_memory()[1])
        self.model = LoadedModel(folder, pipe, facts)
        if dist.is_initialized():
            dist.barrier()  # its timeout is long; those of other operations are short
        batches = warmup_batches(facts)
        paces = [self._pace(ranks, batch) for batch in batches for ranks in self.meshes]
        self.model = replace(self.model, facts=replace(facts, paces=tuple(filter(None, paces))))

    def _pace(self, ranks: tuple[int, ...], batch: messages.RunBatch) -> WarmupPace | None:
        """Return what a step takes once all is warm; None but for the leader of the ranks."""
        sent: list[messages.FromRank] = []
        self.run(replace(batch, ranks=ranks), sent.append, report_seconds=0.0)
        seconds = [message.seconds for message in sent if isinstance(message, messages.StepDone)]
        if not seconds:
            return None
        return WarmupPace(shape=batch.jobs[0].shape, ranks=len(ranks), seconds=seconds[-1])

    def run(self, batch: messages.RunBatch, emit: Emit, report_seconds: float | None = None) -> None:
        with self.heartbeat:
            self._parallelize(batch.ranks)
            comm = world_of(self.meshes[batch.ranks], 60.0).comm
            stops = partial(self.inbox.wants_stop, batch.batch)
            executor = BatchExecutor(self.model, comm, self.writer, emit, stops, report_seconds)
            if not executor.run(batch):
                self._parallelize(())  # it may have been left in the middle of something
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def _parallelize(self, ranks: tuple[int, ...]) -> None:
        """Parallelize the model over some ranks; this takes milliseconds, or nothing if it is already."""
        if ranks == self._parallelized:
            return
        if self._parallelized:
            restore(self.model.pipe)
        self._parallelized = ranks
        if ranks:
            plan, backend = self._plan(ranks)
            parallelize(
                self.model.pipe, mesh=self.meshes[ranks], plan=plan, backend=backend,
                sparse=self.options.sparse,
            )  # fmt: skip

    def _plan(self, ranks: tuple[int, ...]) -> tuple[str, str]:
        """By whole heads and torch's kernel, weft's own model makes the same bits on any number of CPUs."""
        plan, backend = self.options.plan, self.options.backend
        is_free = self.model.is_own and plan == backend == "auto"
        if is_free and not torch.cuda.is_available() and len(ranks) <= self.model.facts.heads:
            return "ulysses", "exact"
        return plan, backend


def _meshes() -> Meshes:
    """Return the process groups that this rank is in; all are made now, and no others later."""
    world_of(None, 60.0)
    world = place()[1]
    if world == 1:
        return {(0,): None}
    meshes: Meshes = {}
    for ranks in groups(world):
        group = new_group(ranks)
        if group is not None:
            meshes[ranks] = group
            if len(ranks) % 2 == 0:
                Halves.of(group)
    return meshes
