"""A storm over a real server: requests, while ranks and the server are killed; what must be left of it.

Every request has an Idempotency-Key and is sent until it is answered, as a careful client does. Few requests
differ, so that what each must give is made first, undisturbed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.serve.hosting import ROOT
from weft.serve.host import bind

AGAIN = 0.2
"""Seconds until a request that was not answered is sent again."""


@dataclass(frozen=True, kw_only=True)
class Storm:
    requests: int
    together: int = 6
    specs: int = 4
    """Of which one in two is a video."""
    steps: int = 6
    every: float = 0.0
    """Seconds between two kills of a rank; 0 is as soon as there was progress since the last."""
    rank_kills: int = 2
    """At most."""
    server_kills: int = 1
    """At even shares of what is done."""
    ranks: int = 2
    nodes: int = 1
    """With so many ranks each; those after the first are ranks for its server."""
    policy: str = "elastic"
    transport: str = "auto"
    """Of $WEFT_TRANSPORT; "group" is what ranks of different machines have."""
    patience: float = 300.0

    def body(self, spec: int) -> tuple[str, dict[str, Any]]:
        seed, said = spec // 2, {"prompt": "a red circle moving left", "num_inference_steps": self.steps}
        if spec % 2:
            return "videos", said | {"seed": seed}
        return "images", said | {"seed": seed, "response_format": "url"}


@dataclass
class Left:
    """What a storm left: what each id is by the server, its digest, and how the server did."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    expected: dict[int, str] = field(default_factory=dict)
    found: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By id: the spec that was asked for, and the digest of what came."""
    answered: list[str] = field(default_factory=list)
    rank_kills: int = 0
    server_kills: int = 0
    restarts: int = 0
    widest: int = 0
    """The most ranks that a job was seen on."""
    lives: list[list[tuple[float, int, int]]] = field(default_factory=list)
    """Of each life of the server: seconds, bytes and descriptors."""
    log: list[dict[str, Any]] = field(default_factory=list)


class Server:
    """`weft serve` on one folder and one port, however often it is started."""

    def __init__(self, folder: Path, storm: Storm) -> None:
        self.folder, self.storm = folder, storm
        with bind("127.0.0.1", 0) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log.jsonl"
        self.process: subprocess.Popen[bytes] | None = None
        self.others: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        if self.storm.nodes == 1:
            self.process = self._node(0)
            return
        with bind("127.0.0.1", 0) as free:
            master = f"127.0.0.1:{free.getsockname()[1]}"
        token = self.folder / "token"
        token.write_text("a-secret-of-all-nodes\n")
        token.chmod(0o600)
        words = ("--nodes", self.storm.nodes, "--master", master, "--token-file", token)
        self.process, *self.others = (
            self._node(node, *words, "--node", node) for node in range(self.storm.nodes)
        )

    def _node(self, node: int, *more: object) -> subprocess.Popen[bytes]:
        data, ranks = self.folder / f"data{node}", self.storm.ranks
        words = ("--data", data, "--port", self.port, "--ranks", ranks, "--policy", self.storm.policy, *more)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "weft", "serve", *map(str, words), "--max-queue", "100000"], cwd=ROOT,
                stdout=subprocess.DEVNULL, stderr=log,
                env=os.environ | {"WEFT_TRANSPORT": self.storm.transport},
            )  # fmt: skip

    def signal(self, number: int) -> int:
        """And wait for its end."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)


class Run:
    """One storm."""

    def __init__(self, storm: Storm, folder: Path) -> None:
        self.storm, self.server, self.left = storm, Server(folder, storm), Left()
        self.dice = random.Random(0)
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
                await asyncio.wait_for(self._storm(), self.storm.patience)
                watching.cancel()
                await self._take_stock()
            assert self.server.signal(signal.SIGTERM) == 0
            for node in self.server.others:  # they would wait for the server to come back
                node.send_signal(signal.SIGTERM)
                assert node.wait(60) == 0
        finally:
            if watching is not None:
                watching.cancel()
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
            await asyncio.gather(*(one(number) for number in range(self.storm.requests)))
        finally:
            killing.cancel()

    async def _made(self, spec: int, key: str) -> str:
        """Ask until it is made, and made it must be."""
        where, body = self.storm.body(spec)
        sender = {"headers": {"Idempotency-Key": key}, "json": body}
        if where == "images":
            return (await self._answer("POST", "/v1/images/generations", **sender))["weft"][0]["id"]
        job = await self._answer("POST", "/v1/videos", **sender)
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
        done = -1
        while True:
            if due and len(left.answered) >= due[0] and await self._busy():
                due.pop(0)
                self.server.signal(signal.SIGKILL)
                left.server_kills += 1
                self.server.start()
                left.lives.append([])
                await self._ready()
            elif left.rank_kills < storm.rank_kills and len(left.answered) > done:
                if storm.every:
                    await asyncio.sleep(storm.every)
                if pids := await self._busy():
                    done = len(left.answered)
                    with suppress(ProcessLookupError):
                        before = await self._restarts()
                        os.kill(self.dice.choice(pids), signal.SIGKILL)
                        left.rank_kills += 1
                        await self._noticed(before)
            await asyncio.sleep(0.02)

    async def _restarts(self) -> int:
        return (await self._answer("GET", "/v1/status"))["restarts"]

    async def _noticed(self, before: int) -> None:
        """The log of a server that is killed before it has noticed that a rank is gone would not tell."""
        end = time.monotonic() + 10
        while await self._restarts() == before and time.monotonic() < end:
            await asyncio.sleep(0.05)

    async def _busy(self) -> list[int]:
        """The processes that make something."""
        now = await self._answer("GET", "/v1/status")
        ranks = {rank["rank"]: rank["pid"] for rank in now["ranks"] if rank["pid"]}
        steps = [run for run in now["running"] if run["step"]]
        self.left.widest = max([self.left.widest, *(len(run["ranks"]) for run in steps)])
        return [ranks[rank] for run in steps for rank in run["ranks"] if rank in ranks]

    async def _watch(self) -> None:
        began = time.monotonic()
        while True:
            with suppress(psutil.Error):
                assert self.server.process is not None
                process = psutil.Process(self.server.process.pid)
                sample = time.monotonic() - began, process.memory_info().rss, process.num_fds()
                self.left.lives[-1].append(sample)
            await asyncio.sleep(0.5)

    async def _take_stock(self) -> None:
        self.left.restarts = await self._restarts()
        for kind in ("videos", "images"):
            after = ""
            while True:
                page = await self._answer("GET", f"/v1/{kind}?limit=100&order=asc{after}")
                self.left.jobs |= {job["id"]: job for job in page["data"]}
                if not page["has_more"]:
                    break
                after = f"&after={page['last_id']}"
        for id, (spec, _) in self.left.found.items():
            self.left.found[id] = spec, await self._digest(id)


def survive(storm: Storm, folder: Path) -> Left:
    """Run it, and check that nothing was lost, made twice or made otherwise."""
    left = asyncio.run(Run(storm, folder).all())
    wanted = storm.requests + storm.specs
    assert len(left.answered) == len(set(left.answered)) == storm.requests
    assert len(left.jobs) == wanted, f"{len(left.jobs)} jobs for {wanted} requests"
    assert Counter(job["status"] for job in left.jobs.values()) == {"completed": wanted}
    wrong = [id for id, (spec, digest) in left.found.items() if digest != left.expected[spec]]
    assert wrong == []
    assert len(set(left.expected.values())) == storm.specs  # or the line above says nothing
    ends = Counter(line["job"] for line in left.log if line["message"] == "job ended")
    assert all(count == 1 for count in ends.values())
    assert left.server_kills == storm.server_kills
    return left
