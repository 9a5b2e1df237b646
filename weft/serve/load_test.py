"""Open-loop load test: send requests at their arrival times, whether or not earlier ones were answered.

    arrivals = poisson_arrivals(rate=2.0, duration=60.0, mix={"image": 0.8, "video": 0.2}, seed=0)
    result = asyncio.run(run_load_test("http://127.0.0.1:8000", arrivals, slo=3.0))
    result.percentile("image", 95), result.attained()

Latencies count from the arrival time, not from when this machine sent the request, so a server that slows its
clients down does not look better for it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import httpx
import numpy as np

from weft.core.errors import CommError, InputError
from weft.serve.jobs import KINDS, JsonObject

PROMPT = "a red circle moving left"
REPEATS_ALONE = 3
"""Measurements of each kind alone, after one that does not count."""
TIMEOUT_SECONDS = 3600.0
MAX_DELETES = 8
"""At once, at the end."""


@dataclass(frozen=True)
class RequestArrival:
    at: float
    kind: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class RequestSample:
    """The outcome of one arrival; `seconds` are from its arrival time to its end."""

    kind: str
    at: float
    seconds: float
    code: str = "ok"
    """Or the server's error code; `connection` if it did not answer."""
    queue: float | None = None
    """Seconds in the queue, as the server reports."""
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class LoadTestResult:
    """All samples, and the latency of each kind on an idle server."""

    samples: Sequence[RequestSample]
    alone: Mapping[str, float]
    slo: float

    def of(self, kind: str | None = None) -> list[RequestSample]:
        return [sample for sample in self.samples if kind in (None, sample.kind)]

    def percentile(self, kind: str | None, q: float, field: str = "seconds") -> float | None:
        """Return a percentile over completed requests; None if there are none."""
        values = [getattr(sample, field) for sample in self.of(kind) if sample.code == "ok"]
        values = [value for value in values if value is not None]
        return float(np.percentile(values, q)) if values else None

    def attained(self, kind: str | None = None) -> float:
        """Return the share completed within `slo` times the latency alone; failed requests are not."""
        samples = self.of(kind)
        in_time = [s for s in samples if s.code == "ok" and s.seconds <= self.slo * self.alone[s.kind]]
        return len(in_time) / max(1, len(samples))

    @property
    def throughput(self) -> float:
        """Completed jobs per second, from the first arrival to the last end."""
        done = [(sample.at, sample.at + sample.seconds) for sample in self.samples if sample.code == "ok"]
        span = max(end for _, end in done) - min(at for at, _ in done) if done else 0.0
        return len(done) / span if span else 0.0

    @property
    def errors(self) -> dict[str, int]:
        return dict(Counter(sample.code for sample in self.samples if sample.code != "ok").most_common())

    def depth(self, kind: str | None = None) -> list[tuple[float, int]]:
        """Return the number of open requests at each time when it changes."""
        samples = self.of(kind)
        changes = [(s.at, 1) for s in samples] + [(s.at + s.seconds, -1) for s in samples]
        depths = [(0.0, 0)]
        for at, change in sorted(changes):
            depths.append((at, depths[-1][1] + change))
        return depths

    def to_json(self) -> JsonObject:
        return {
            "alone": dict(self.alone), "slo": self.slo, "throughput": self.throughput, "errors": self.errors,
            "attained": self.attained(), "kinds": {kind: self._summary(kind) for kind in self.alone},
            "samples": [asdict(sample) for sample in self.samples],
        }  # fmt: skip

    def _summary(self, kind: str) -> JsonObject:
        seconds = {f"p{q}": self.percentile(kind, q) for q in (50, 95, 99)}
        queue = {f"queue_p{q}": self.percentile(kind, q, "queue") for q in (50, 95)}
        return {"sent": len(self.of(kind)), "attained": self.attained(kind), **seconds, **queue}


@dataclass(frozen=True, kw_only=True)
class RequestTemplate:
    """Fields of every request; None is the model's default."""

    size: str | None = None
    steps: int | None = None
    frames: int | None = None
    prompt: str = PROMPT

    def body(self, kind: str, seed: int) -> JsonObject:
        body = {"size": self.size, "num_inference_steps": self.steps, "seed": seed, "prompt": self.prompt}
        body |= {"num_frames": self.frames} if kind == "video" else {}
        return {name: value for name, value in body.items() if value is not None}


def poisson_arrivals(
    rate: float, duration: float, mix: Mapping[str, float], seed: int = 0
) -> list[RequestArrival]:
    """Draw a Poisson process: equal seeds give equal requests at equal times."""
    if rate <= 0 or duration <= 0 or not mix or min(mix.values()) < 0 or not sum(mix.values()):
        raise InputError(
            f"rate={rate:g}, duration={duration:g} and the shares of mix={dict(mix)} must be > 0.",
            hint="For example --rate 2 --duration 60 --mix image:0.8,video:0.2.",
        )
    if unknown := [kind for kind in mix if kind not in KINDS]:
        raise InputError(f"Unknown kind {unknown[0]!r}.", hint=f"Kinds are {' and '.join(KINDS)}.")
    rng, trace, now = random.Random(seed), [], 0.0
    while (now := now + rng.expovariate(rate)) < duration:
        kind = rng.choices(list(mix), list(mix.values()))[0]
        trace.append(RequestArrival(now, kind, rng.randrange(2**31)))
    return trace


def read_trace(path: Path) -> list[RequestArrival]:
    """Read arrivals from a file with a line `{"at": seconds, "kind": "image"}` for each."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        trace = [
            RequestArrival(float(line["at"]), str(line["kind"]), int(line.get("seed", index)))
            for index, line in enumerate(lines)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"The trace {path} cannot be read: {type(error).__name__} {error}.",
            hint='It has a line such as {"at": 0.5, "kind": "image"} for each request.',
        ) from error
    if not trace or any(each.kind not in KINDS or each.at < 0 for each in trace):
        message = f"The trace {path} has no requests, or some of another kind or a negative time."
        raise InputError(message, hint=f"Kinds are {' and '.join(KINDS)}.")
    return sorted(trace, key=lambda each: each.at)


class _ResponseError(Exception):
    """Its argument is the error code."""


class ServerClient:
    """A client of one server."""

    def __init__(self, url: str, key: str | None = None) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(TIMEOUT_SECONDS, connect=10.0), limits=limits,
            headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=False,
        )  # fmt: skip

    async def __aenter__(self) -> ServerClient:
        try:
            (await self._http.get("/health")).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            await self._http.aclose()
            message = f"No server is ready at {self._http.base_url}: {error}."
            raise CommError(message, hint="Start one with weft serve.") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def make(self, kind: str, body: JsonObject) -> tuple[str, float | None]:
        """Generate an image or video; return its id and its seconds in the queue."""
        if kind == "image":
            response = _checked(await self._http.post("/v1/images/generations", json=body))["weft"][0]
            return response["id"], response["timings"].get("queue")
        id = await self.create(body)
        video = await self.end(id)
        if video["status"] != "completed":
            raise _ResponseError((video.get("error") or {}).get("code", "failed"))
        return id, video["weft"]["timings"].get("queue")

    async def create(self, body: JsonObject) -> str:
        """Queue a video and return its id."""
        return _checked(await self._http.post("/v1/videos", json=body))["id"]

    async def end(self, id: str) -> JsonObject:
        """Wait for a video to end by its events: polling would add to the load."""
        name = ""
        async with self._http.stream("GET", f"/v1/videos/{id}/events") as response:
            if response.status_code >= 400:
                await response.aread()
                _checked(response)
            async for line in response.aiter_lines():
                field, _, value = line.partition(":")
                name = value.strip() if field == "event" else name
                if field == "data" and name == "done":
                    return json.loads(value)
        raise _ResponseError("connection")

    async def sample(self, arrival: RequestArrival, body: JsonObject, start: float) -> RequestSample:
        """Send a request at its arrival time; `start` is time 0 on this machine's monotonic clock."""
        await asyncio.sleep(max(0.0, start + arrival.at - time.monotonic()))
        code, id, queue = "ok", "", None
        try:
            id, queue = await self.make(arrival.kind, body)
        except _ResponseError as error:
            code = str(error)
        except httpx.HTTPError:
            code = "connection"
        seconds = time.monotonic() - start - arrival.at
        return RequestSample(kind=arrival.kind, at=arrival.at, seconds=seconds, code=code, queue=queue, id=id)

    async def delete(self, ids: Iterable[str]) -> None:
        slots = asyncio.Semaphore(MAX_DELETES)

        async def one(id: str) -> None:
            async with slots:
                await self._http.delete(f"/v1/{id.partition('_')[0]}s/{id}")

        await asyncio.gather(*(one(id) for id in ids if id), return_exceptions=True)


def _checked(response: httpx.Response) -> JsonObject:
    try:
        body = response.json()
    except ValueError:
        body = {}
    if response.status_code >= 400:
        raise _ResponseError(body.get("error", {}).get("code") or f"http_{response.status_code}")
    return body


async def measure_alone(
    client: ServerClient, kinds: Iterable[str], template: RequestTemplate
) -> dict[str, float]:
    """Return the median latency of each kind on an idle server."""
    latencies: dict[str, float] = {}
    for kind in kinds:
        seconds: list[float] = []
        for seed in range(REPEATS_ALONE + 1):
            arrival, body = RequestArrival(0.0, kind, seed), template.body(kind, seed)
            sample = await client.sample(arrival, body, time.monotonic())
            await client.delete([sample.id])
            if sample.code != "ok":
                raise CommError(f"The server failed to make one {kind} alone: {sample.code}.")
            seconds.append(sample.seconds)
        latencies[kind] = median(seconds[1:])
    return latencies


async def run_load_test(
    url: str, trace: Sequence[RequestArrival], *, slo: float = 3.0,
    template: RequestTemplate | None = None, key: str | None = None,
    alone: Mapping[str, float] | None = None, on_progress: Callable[[str], None] = lambda _: None,
) -> LoadTestResult:  # fmt: skip
    """Send requests at their arrival times; the latencies `alone` are measured first unless passed."""
    template = template or RequestTemplate()
    async with ServerClient(url, key) as client:
        if not alone:
            on_progress("each kind alone …")
            alone = await measure_alone(client, sorted({arrival.kind for arrival in trace}), template)
        ended, start = 0, time.monotonic()

        async def one(arrival: RequestArrival) -> RequestSample:
            nonlocal ended
            body = template.body(arrival.kind, arrival.seed)
            body["deadline_seconds"] = slo * alone[arrival.kind]
            sample = await client.sample(arrival, body, start)
            ended += 1
            on_progress(f"{ended} of {len(trace)} ended, {time.monotonic() - start:.0f} s")
            return sample

        samples = await asyncio.gather(*(one(arrival) for arrival in trace))
        await client.delete(sample.id for sample in samples)
    return LoadTestResult(samples=samples, alone=alone, slo=slo)
