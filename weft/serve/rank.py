"""Rank: one process of the group that makes what the server is asked for.

It says hello, joins the others when the server tells all of them to, loads the model, warms up, says that it
is ready, and then runs segments as it is told. It ends with its connection; the launcher starts it again.
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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from weft.core.errors import CommError
from weft.models import checkpoint
from weft.models.guidance import Halves
from weft.models.parallelize import parallelize, restore
from weft.models.resume import remember_prompts
from weft.run.channel import Channel
from weft.run.devices import default_dtype, device
from weft.run.groups import new_group
from weft.run.listener import Tunnel, listen
from weft.run.secure import Address, connect
from weft.run.stores import file_store, open_store, serve_store
from weft.run.world import init_world, machines, place, world_of
from weft.serve.errors import words
from weft.serve.facts import facts_of
from weft.serve.segment import Segment
from weft.serve.tasks import groups
from weft.serve.work import Model, Work
from weft.serve.writer import Writer

BEAT_SECONDS = 1.0
Leave = Callable[[int], Any]


def main(address: Address, token: str, model: str, options: dict[str, Any], leave: Leave = os._exit) -> None:
    """Until the server says that it is the end; options are `name` and those of `weft.parallelize`."""
    channel = connect(address, token, "rank")
    rank, world = place()
    inbox = Inbox(channel, leave)
    hello = {"told": "hello", "rank": rank, "world": world, "pid": os.getpid(), "host": socket.gethostname()}
    served = None
    if machines() > 1 and rank == 0:
        with listen(("127.0.0.1", 0)) as listening:
            served, hello["store"] = serve_store(listening), listening.getsockname()[1]
    channel.send(hello)
    beat = Beat(channel, rank)
    try:
        said, _ = inbox.next()
        if said["do"] != "join":
            return
        if world > 1 and not dist.is_initialized():
            init_world(served or _store(said, world, lambda: connect(address, token, "store")))
        worker = Worker(channel, options, inbox, beat)
        worker.load(Path(model), options.get("name") or Path(model).name)
        channel.send({"told": "ready", "rank": rank, "facts": worker.model.facts})
        while (message := inbox.next())[0]["do"] == "run":
            worker.run(*message)
    except BaseException as error:
        traceback.print_exc()
        with suppress(CommError):
            said = {"told": "failed", "batch": None, "code": "internal_error", "message": words(error)}
            channel.send(said)
        raise
    finally:
        beat.stop()
        inbox.is_over = True
        channel.close()


def _store(join: dict[str, Any], world: int, reach: Callable[[], Channel]) -> Any:
    """Return the store of this generation: a file, or what rank 0 serves on its machine's loopback."""
    return open_store(Tunnel(reach).port) if machines() > 1 else file_store(join["store"], world)


class Inbox:
    """What the server says, in its order, and which batch it wants to be stopped."""

    def __init__(self, channel: Channel, leave: Leave) -> None:
        self.is_over = False
        self._channel, self._leave = channel, leave
        self._messages: SimpleQueue[tuple[dict[str, Any], bytes]] = SimpleQueue()
        self._stops: str | None = None
        threading.Thread(target=self._read, name="weft-inbox", daemon=True).start()

    def next(self) -> tuple[dict[str, Any], bytes]:
        return self._messages.get()

    def wants_stop(self, batch: str) -> bool:
        return batch == self._stops

    def _read(self) -> None:
        """Beside the main thread, which may wait for a rank that is gone: then only this one can end it."""
        with suppress(CommError):
            while True:
                said, blob = self._channel.receive()
                if said["do"] == "exit":
                    break
                if said["do"] == "stop":
                    self._stops = said["batch"]
                    continue
                self._stops = None  # or of an earlier segment, which ended by itself
                if said["do"] != "go":
                    self._messages.put((said, blob))
        if not self.is_over:
            self._leave(1)


class Beat:
    """Tells every second that this rank lives, what memory it has and how long it was busy."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel, self._rank = channel, rank
        self._since, self._busy = None, 0.0
        self._over, self._lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._tell, name="weft-beat", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def __enter__(self) -> None:
        """Busy from now on."""
        with self._lock:
            self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._busy += time.monotonic() - (self._since or 0.0)
            self._since = None

    def _take(self) -> float:
        """Busy seconds since this was last asked."""
        with self._lock:
            now = time.monotonic()
            busy = self._busy + (0.0 if self._since is None else now - self._since)
            self._busy, self._since = 0.0, None if self._since is None else now
            return busy

    def _tell(self) -> None:
        with suppress(CommError):
            while not self._over.wait(BEAT_SECONDS):
                memory, limit = _memory()
                said = {"told": "beat", "rank": self._rank, "memory": memory, "limit": limit}
                self._channel.send({**said, "busy": self._take()})


def _memory() -> tuple[int, int]:
    """Bytes that this rank has, and its share of what there is."""
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


class Worker:
    """A rank of the world: its groups, made once, and the model, which is woven for one of them at a time."""

    model: Model

    def __init__(self, channel: Channel, options: dict[str, Any], inbox: Inbox, beat: Beat) -> None:
        self.channel, self.options, self.inbox, self.beat = channel, options, inbox, beat
        self.rank, self.meshes = _join()
        self.writer = Writer()
        self._woven: tuple[int, ...] = ()

    def load(self, folder: Path, name: str) -> None:
        """Then make something small on each group, so that the first who asks does not wait for that."""
        dtype = getattr(torch, self.options.get("dtype") or default_dtype())
        pipe = checkpoint.load_pipeline(folder, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        pipe = pipe.to(device())
        remember_prompts(pipe)
        self.model = Model(folder, pipe, facts_of(pipe, name) | {"memory": _memory()[1]})
        if dist.is_initialized():
            dist.barrier()  # it is patient; other waits are bounded
        warm = Work.warm(self.model.facts)
        self.model.facts["paces"] = [
            pace for work in warm for ranks in self.meshes if (pace := self._pace(ranks, work))
        ]

    def _pace(self, ranks: tuple[int, ...], work: Work) -> dict[str, Any] | None:
        """What a step takes once all is warm; only the leader of the ranks knows."""
        told: list[dict[str, Any]] = []
        self._segment(ranks, work, tell=lambda said, _=b"": told.append(said), pause=0.0)
        seconds = [said["seconds"] for said in told if said["told"] == "step"]
        shape = asdict(work.jobs[0].shape)
        return {"shape": shape, "ranks": len(ranks), "seconds": seconds[-1]} if seconds else None

    def run(self, said: dict[str, Any], blob: bytes) -> None:
        self._segment(tuple(said["ranks"]), Work.of(said, blob), tell=self.channel.send)

    def _segment(
        self, ranks: tuple[int, ...], work: Work, tell: Callable[..., None], pause: float | None = None
    ) -> None:
        with self.beat:
            self._weave(ranks)
            comm = world_of(self.meshes[ranks], 60.0).comm
            stops = partial(self.inbox.wants_stop, work.batch)
            if not Segment(self.model, comm, self.writer, tell, stops, pause).run(work):
                self._weave(())  # it may have been left in the middle of something
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def _weave(self, ranks: tuple[int, ...]) -> None:
        """Milliseconds, and not even those if it is woven for them already."""
        if ranks == self._woven:
            return
        if self._woven:
            restore(self.model.pipe)
        self._woven = ranks
        if ranks:
            parallelize(self.model.pipe, mesh=self.meshes[ranks], **self._how(ranks))

    def _how(self, ranks: tuple[int, ...]) -> dict[str, Any]:
        """By whole heads and torch's kernel, weft's own model makes the same bits on any number of CPUs."""
        how: dict[str, Any] = {"plan": "auto", "cfg": "auto", "backend": "auto"}
        how |= {name: self.options[name] for name in how if self.options.get(name)}
        how["sparse"] = self.options.get("sparse")
        is_free = self.model.is_own and how["plan"] == how["backend"] == "auto"
        if is_free and not torch.cuda.is_available() and len(ranks) <= self.model.facts["heads"]:
            how |= {"plan": "ulysses", "backend": "exact"}
        return how


def _join() -> tuple[int, dict[tuple[int, ...], Any]]:
    """This rank, and the process groups that it is in; all are made now, and no others later."""
    world_of(None, 60.0)
    rank, world = place()
    if world == 1:
        return rank, {(0,): None}
    found: dict[tuple[int, ...], Any] = {}
    for ranks in groups(world):
        group = new_group(ranks)
        if group is not None:
            found[ranks] = group
            if len(ranks) % 2 == 0:
                Halves.of(group)
    return rank, found
