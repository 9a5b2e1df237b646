"""Faults to inject into a storm: full disks, floods of connections, event streams and oversize requests.

A `FaultPlan` says how many of each; a `FaultInjector` injects them beside the requests of a storm
and counts them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.serve.full_disk import MIB, Filler
from weft.run.net.scratch import LOCK

HOLD_SECONDS = 4.0
"""For which connections of a flood, and streams, stay open."""
FULL_SECONDS = 8.0
MAX_LEFT_BYTES = 24 * 2**10
"""On a full disk."""
OVERSIZE: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (400, "too_long", {"json": {"prompt": "a red circle", "size": "720x1280"}}),
    (413, "input_too_large", {"content": bytes(20 * 10**6), "headers": {"content-type": "application/json"}}),
    (400, "", {"json": {"prompt": "a red xyzzy moving left"}}),
)
"""Requests for videos: status and code of the answer (any code if empty)."""
JUNK = (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"\xff" * 64, b"\x00\x00\x00\x02{}\x00\x00\x00\x00")


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """The faults of a storm; those with 0 do not happen."""

    disk_bytes: int = 0
    """Size of the tmpfs that holds `--data` and is filled again and again."""
    rank_connections: int = 0
    """Connections of one flood of the ranks' socket: half of them silent, half send junk."""
    idle_connections: int = 0
    """Connections to the HTTP port in the same flood that send nothing."""
    streams: int = 0
    """Event streams of one job that are opened at a time."""
    oversize: bool = False
    rounds: int = 10**6
    """Of each fault, at most."""
    pause: float = 6.0
    """Seconds between two rounds."""
    disk_pause: float = 25.0
    """The same for full disks, on which jobs only wait."""


class FaultInjector:
    """Inject the faults of a plan beside the work of a storm.

    pid       returns the process of the server.
    deletable returns a job that may be deleted, or None.
    """

    def __init__(
        self, plan: FaultPlan, url: str, folder: Path, pid: Callable[[], int],
        deletable: Callable[[], Awaitable[str | None]],
    ) -> None:  # fmt: skip
        self.plan, self.url, self._pid, self._deletable = plan, url, pid, deletable
        self.counts: Counter[str] = Counter()
        self.deleted: list[str] = []
        self.rank_lost = asyncio.Event()
        """Set by who kills a rank: the next flood begins at once."""
        self.disk: tuple[str, float] = "room", time.monotonic()
        """"full", "room" or "" while it changes; and since when."""
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._filler = Filler(folder)
        self._open, self._closed = 0, 0.0
        self._dice = random.Random(1)

    @property
    def is_calm(self) -> bool:
        """Whether no connection of ours has been open for a second: what the server holds is its own."""
        return not self._open and time.monotonic() - self._closed > 1.0

    @property
    def is_disk_full(self) -> bool:
        return self.disk[0] == "full"

    async def run_beside(self, work: Awaitable[Any]) -> None:
        """Inject faults until `work` is done, and finish rounds that have begun; raise what either raises."""
        plan, working, over = self.plan, asyncio.ensure_future(work), asyncio.Event()
        faults = (
            (self._fill_disk, plan.disk_bytes, plan.disk_pause),
            (self._flood, plan.rank_connections, plan.pause),
            (self._open_streams, plan.streams, plan.pause),
            (self._send_oversize, plan.oversize, plan.pause),
        )
        tasks = [
            asyncio.ensure_future(self._repeat(fault, pause, over))
            for fault, wanted, pause in faults
            if wanted
        ]
        try:
            # A fault that ends before the work has failed.
            await asyncio.wait({working, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            over.set()
            await asyncio.gather(working, *tasks)
        finally:
            for task in (working, *tasks):
                task.cancel()

    async def _repeat(self, fault: Callable[[], Awaitable[None]], pause: float, over: asyncio.Event) -> None:
        for _ in range(self.plan.rounds):
            await fault()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(over.wait(), pause)
                return
        await over.wait()

    async def _fill_disk(self) -> None:
        """Fill it; delete a job meanwhile; make room again."""
        self.disk = "", 0.0
        await asyncio.to_thread(self._filler.fill, self._dice.randrange(MAX_LEFT_BYTES))
        self.disk = "full", time.monotonic()
        self.counts["full disks"] += 1
        try:
            await asyncio.sleep(FULL_SECONDS / 2)
            if (id := await self._deletable()) is not None:
                self.deleted.append(id)
                self.counts["deletions on a full disk"] += 1
            await asyncio.sleep(FULL_SECONDS / 2)
        finally:
            self.disk = "", 0.0
            self._filler.empty()
            self.disk = "room", time.monotonic()

    async def _flood(self) -> None:
        """Flood the ranks' socket and the HTTP port, at once if a rank was just lost."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.rank_lost.wait(), self.plan.pause)
        self.counts["floods as ranks restart"] += self.rank_lost.is_set()
        self.rank_lost.clear()
        path = ranks_socket(self._pid())
        junk = [JUNK[n // 2 % len(JUNK)] if n % 2 else b"" for n in range(self.plan.rank_connections)]
        held = [
            self._hold(asyncio.open_unix_connection(path), each, opened="rank connections")
            for each in junk
            if path
        ]
        held += [self._hold(self._connect(), b"") for _ in range(self.plan.idle_connections)]
        await asyncio.gather(*held)
        self.counts["floods"] += 1

    async def _open_streams(self) -> None:
        """Watch the newest job by many clients, of which half read nothing."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60.0) as http:
            while True:
                with suppress(httpx.HTTPError, KeyError, IndexError):  # the server is just started again
                    id = (await http.get("/v1/videos?limit=1")).json()["data"][0]["id"]
                    break
                await asyncio.sleep(0.2)
        request = f"GET /v1/videos/{id}/events HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode()
        await asyncio.gather(*(
            self._hold(self._connect(), request, count="streams", is_read=number % 2 == 0)
            for number in range(self.plan.streams)
        ))  # fmt: skip

    async def _send_oversize(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=60.0) as http:
            for status, code, request in OVERSIZE:
                try:
                    answer = await http.post("/v1/videos", **request)
                except httpx.HTTPError:  # the server was killed
                    self.counts["oversize not answered"] += 1
                    continue
                if answer.status_code == 503:  # it starts
                    self.counts["oversize answered 503"] += 1
                    continue
                assert answer.status_code == status, answer.text
                assert answer.json()["error"]["code"] == (code or answer.json()["error"]["code"])
                self.counts["oversize refused"] += 1

    def _connect(self) -> Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        return asyncio.open_connection(self._host, self._port)

    async def _hold(
        self, connecting: Any, request: bytes, *, count: str = "", opened: str = "connections",
        is_read: bool = True,
    ) -> None:  # fmt: skip
        """Connect, send, and stay for `HOLD_SECONDS`; a server that closes it, or is killed, may."""
        self._open += 1
        try:
            with suppress(OSError, TimeoutError):
                reader, writer = await connecting
                self.counts[opened] += 1
                try:
                    writer.write(request)
                    if count:
                        status = (await reader.readline()).split(b" ")[1:2]
                        self.counts[f"{count} {status[0].decode() if status else 'cut off'}"] += 1
                    if is_read:
                        await asyncio.wait_for(_read_all(reader), HOLD_SECONDS)
                    else:
                        await asyncio.sleep(HOLD_SECONDS)
                finally:
                    writer.close()
        finally:
            self._open -= 1
            self._closed = time.monotonic()


async def _read_all(reader: asyncio.StreamReader) -> None:
    while await reader.read(2**16):
        pass
    await asyncio.sleep(HOLD_SECONDS)


def ranks_socket(pid: int) -> str | None:
    """Return the unix socket at which the server `pid` waits for ranks, or None while there is none."""
    with suppress(psutil.Error):
        for file in psutil.Process(pid).open_files():
            path = Path(file.path)
            if path.name == LOCK and path.parent.name.startswith("weft-serve-"):
                return str(path.parent / "ranks")
    return None


SOAK_FAULTS = FaultPlan(
    disk_bytes=48 * MIB, rank_connections=300, idle_connections=300, streams=300, oversize=True, pause=8.0
)
SMALL_FAULTS = FaultPlan(rank_connections=200, idle_connections=100, streams=300, oversize=True, rounds=1)
