"""A storm over a real server: requests, while ranks and the server are killed; what must be left of it.

Every request has an Idempotency-Key and is sent until it is answered, as a careful client does. Few requests
differ, so that what each must give is made first, undisturbed.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.serve.faults import FaultInjector
from tests.serve.full_disk import mounted
from tests.serve.probe import HealthProbe
from tests.serve.storm import Left, Server, Storm

AGAIN = 0.2
"""Seconds until a request that was not answered is sent again."""
NOTICE_SECONDS = 30.0
"""In which the server must have seen that a rank was killed; generous, for a machine that has much to do."""


class Run:
    """One storm."""

    def __init__(self, storm: Storm, folder: Path) -> None:
        self.storm, self.server, self.left = storm, Server(folder, storm), Left(storm.requests)
        self.dice = random.Random(0)
        self.restarts = 0
        """As the last `_busy` saw it."""
        data = folder / "data0"
        self.faults = FaultInjector(storm.faults, self.server.url, data, self._pid, self._delete_one)
        self.probe = HealthProbe(self.server.port, lambda: self.faults.disk)
        self.http: httpx.AsyncClient = None  # type: ignore[assignment]

    async def all(self) -> Left:
        self.server.start()
        self.left.lives.append([])
        watching = None
        try:
            async with httpx.AsyncClient(base_url=self.server.url, timeout=self.storm.patience) as self.http:
                await self._ready()
                for spec in range(self.storm.specs):
                    id = await self._made(spec, f"undisturbed {spec}")
                    self.left.expected[spec] = await self._digest(id)
                watching = asyncio.ensure_future(self._watch())
                self.probe.start()
                await asyncio.wait_for(self._storm(), self.storm.patience)
                watching.cancel()
                self.probe.stop()
                await self._take_stock()
            assert self.server.signal(signal.SIGTERM) == 0
            for node in self.server.others:  # they would wait for the server to come back
                node.send_signal(signal.SIGTERM)
                assert node.wait(60) == 0
        finally:
            if watching is not None:
                watching.cancel()
                self.probe.stop()
            for node in (self.server.process, *self.server.others):
                if node is not None and node.poll() is None:
                    node.kill()
                    node.wait()
        # What torch's C++ says of a peer that was killed is not ours, and not JSON.
        said = self.server.log.read_text().splitlines()
        self.left.log = [json.loads(line) for line in said if line.startswith("{")]
        return self.left

    async def _storm(self) -> None:
        few = asyncio.Semaphore(self.storm.together)

        async def one(number: int) -> None:
            async with few:
                spec = number % self.storm.specs
                id = await self._made(spec, f"request {number}")
                self.left.answered.append(id)
                self.left.found[id] = spec, ""

        killing = asyncio.ensure_future(self._kill())
        try:
            requests = asyncio.gather(*(one(number) for number in range(self.storm.requests)))
            await self.faults.run_beside(requests)
            more = itertools.count(self.storm.requests)
            while self.left.rank_kills < self.storm.sure_kills and not killing.done():
                self.left.requests += 1
                await one(next(more))
            if killing.done():  # it never ends by itself
                killing.result()
        finally:
            killing.cancel()

    async def _made(self, spec: int, key: str) -> str:
        """Ask until it is made, and made it must be."""
        where, body = self.storm.body(spec)
        sender = {"headers": {"Idempotency-Key": key}, "json": body}
        if where == "images":
            return (await self._answer("POST", "/v1/images/generations", **sender))["weft"][0]["id"]
        job = await self._answer("POST", "/v1/videos", **sender)
        again = await self._answer("POST", "/v1/videos", **sender)  # as if the first answer had been lost
        assert again["id"] == job["id"], "one key has made two jobs"
        while job["status"] in ("queued", "in_progress"):
            await asyncio.sleep(AGAIN)
            job = await self._answer("GET", f"/v1/videos/{job['id']}")
        assert job["status"] == "completed", job
        return job["id"]

    async def _answer(self, method: str, path: str, **more: Any) -> Any:
        while True:
            with suppress(httpx.HTTPError):
                answer = await self.http.request(method, path, **more)
                if answer.status_code == 200:
                    kind = answer.headers["content-type"]
                    return answer.json() if kind.startswith("application/json") else answer.content
                assert answer.status_code in (429, 503), answer.text
            assert self.server.process is not None
            assert self.server.process.poll() in (None, -signal.SIGKILL), self.server.log.read_text()
            await asyncio.sleep(AGAIN)

    async def _digest(self, id: str) -> str:
        content = await self._answer("GET", f"/v1/{id.partition('_')[0]}s/{id}/content")
        return hashlib.sha256(content).hexdigest()

    async def _ready(self) -> None:
        await self._until(lambda: self._answer("GET", "/health"))

    async def _until(self, true: Callable[[], Awaitable[Any]]) -> Any:
        end = time.monotonic() + self.storm.patience
        while not (found := await true()):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        return found

    async def _kill(self) -> None:
        storm, left = self.storm, self.left
        due = [(n + 1) * storm.requests // (storm.server_kills + 1) for n in range(storm.server_kills)]
        done, next_rank = -1, time.monotonic() + storm.every
        while True:
            if due and len(left.answered) >= due[0] and (self.faults.is_disk_full or await self._busy()):
                due.pop(0)
                self.probe.server_is_killed()
                self.server.signal(signal.SIGKILL)
                left.server_kills += 1
                self.server.start()
                self.probe.server_is_started()
                left.lives.append([])
                await self._ready()
            elif (
                left.rank_kills < storm.rank_kills
                and len(left.answered) > done
                and time.monotonic() >= next_rank
                and (pids := await self._busy())
            ):
                done, next_rank = len(left.answered), time.monotonic() + storm.every
                with suppress(ProcessLookupError):
                    os.kill(self.dice.choice(pids), signal.SIGKILL)
                    left.rank_kills += 1
                    self.faults.rank_lost.set()
                    await self._noticed()
            await asyncio.sleep(0.02)

    async def _restarts(self) -> int:
        return (await self._answer("GET", "/v1/status"))["restarts"]

    async def _noticed(self) -> None:
        """The log of a server that is killed before it has noticed that a rank is gone would not tell."""
        end = time.monotonic() + NOTICE_SECONDS
        while await self._restarts() == self.restarts:
            assert time.monotonic() < end, "a rank was killed, and the server did not notice"
            await asyncio.sleep(0.05)

    async def _busy(self) -> list[int]:
        """The processes that make something."""
        now = await self._answer("GET", "/v1/status")
        ranks = {rank["rank"]: rank["pid"] for rank in now["ranks"] if rank["pid"]}
        self.restarts = now["restarts"]
        steps = [run for run in now["running"] if run["step"]]
        self.left.widest = max([self.left.widest, *(len(run["ranks"]) for run in steps)])
        return [ranks[rank] for run in steps for rank in run["ranks"] if rank in ranks]

    def _pid(self) -> int:
        assert self.server.process is not None
        return self.server.process.pid

    async def _delete_one(self) -> str | None:
        """Check and delete a job that was made, which must work at once, whatever happens."""
        left = self.left
        if not (ids := [id for id in left.answered if id not in self.faults.deleted]):
            return None
        id, status = self.dice.choice(ids), 0
        left.found[id] = left.found[id][0], await self._digest(id)
        while status not in (200, 404):
            try:
                answer = await self.http.delete(f"/v1/{id.partition('_')[0]}s/{id}")
            except httpx.HTTPError:  # the server was killed, maybe after it had deleted it
                status = -1
                await asyncio.sleep(AGAIN)
                continue
            assert answer.status_code == 200 or (answer.status_code == 404 and status), answer.text
            status = answer.status_code
        return id

    async def _watch(self) -> None:
        left, began = self.left, time.monotonic()
        while True:
            with suppress(psutil.Error):
                process = psutil.Process(self._pid())
                seconds, size, files = time.monotonic() - began, process.memory_info().rss, process.num_fds()
                left.peak_bytes = max(left.peak_bytes, size)
                left.peak_descriptors = max(left.peak_descriptors, files)
                if self.faults.is_calm:
                    left.lives[-1].append((seconds, size, files))
            await asyncio.sleep(0.5)

    async def _take_stock(self) -> None:
        left, probe = self.left, self.probe
        left.restarts, left.faults, left.deleted = (
            await self._restarts(), self.faults.counts, self.faults.deleted,
        )  # fmt: skip
        left.probes, left.false_probes, left.slowest_probe = probe.counts, probe.false, probe.slowest
        for kind in ("videos", "images"):
            after = ""
            while True:
                page = await self._answer("GET", f"/v1/{kind}?limit=100&order=asc{after}")
                self.left.jobs |= {job["id"]: job for job in page["data"]}
                if not page["has_more"]:
                    break
                after = f"&after={page['last_id']}"
        for id, (spec, digest) in self.left.found.items():
            self.left.found[id] = spec, digest or await self._digest(id)


def survive(storm: Storm, folder: Path) -> Left:
    """Run it, and check that nothing was lost, made twice or made otherwise."""
    with ExitStack() as stack:
        if size := storm.faults.disk_bytes:
            stack.enter_context(mounted(folder / "data0", size))
        left = asyncio.run(Run(storm, folder).all())
    (folder / "figures.json").write_text(json.dumps(left.figures()))
    # While ranks were still to be killed, more than the storm's own requests were sent.
    wanted = left.requests + storm.specs - len(left.deleted)
    assert len(left.answered) == len(set(left.answered)) == left.requests >= storm.requests
    assert len(left.jobs) == wanted, f"{len(left.jobs)} jobs for {wanted} requests"
    assert Counter(job["status"] for job in left.jobs.values()) == {"completed": wanted}
    wrong = [id for id, (spec, digest) in left.found.items() if digest != left.expected[spec]]
    assert wrong == []
    assert len(set(left.expected.values())) == storm.specs  # or the line above says nothing
    ends = Counter(line["job"] for line in left.log if line["message"] == "job ended")
    assert all(count == 1 for count in ends.values())
    assert left.server_kills == storm.server_kills
    assert left.false_probes == []
    # What a probe compares `/health` with is of the same server; these two are known from outside.
    assert left.probes["starting"] or not left.rank_kills
    assert left.probes["disk_full"] or not left.faults["full disks"]
    return left
