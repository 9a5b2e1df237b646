"""Load: requests that arrive whether or not those before them were answered, and how long each took.

    work = arrivals(rate=2.0, duration=60.0, mix={"image": 0.8, "video": 0.2}, seed=0)
    found = asyncio.run(measure("http://127.0.0.1:8000", work, slo=3.0))
    found.percentile("image", 95), found.attained()

A time counts from the moment that a request was due, not from when this machine came to send it, so a server
that slows its clients down does not look better for it.
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
from typing import Any

import httpx
import numpy as np

from weft.core.errors import CommError, InputError
from weft.serve.jobs import KINDS

PROMPT = "a red circle moving left"
TIMES = 3
"""That each kind is made alone, after once that does not count."""
PATIENCE = 3600.0
"""Seconds until an answer is given up."""
DELETES = 8
"""At once, when all is done."""


@dataclass(frozen=True)
class Arrival:
    at: float
    kind: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What became of one arrival; `seconds` is from when it was due to its end."""

    kind: str
    at: float
    seconds: float
    code: str = "ok"
    """Or the server's code of what went wrong; `connection` if it did not answer."""
    queue: float | None = None
    """Seconds until the first ranks took it, as the server tells."""
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All samples, beside what each kind takes alone."""

    samples: Sequence[Sample]
    alone: Mapping[str, float]
    slo: float

    def of(self, kind: str | None = None) -> list[Sample]:
        return [sample for sample in self.samples if kind in (None, sample.kind)]

    def percentile(self, kind: str | None, q: float, what: str = "seconds") -> float | None:
        """Of those that were made; None if there are none."""
        done = [getattr(sample, what) for sample in self.of(kind) if sample.code == "ok"]
        known = [number for number in done if number is not None]
        return float(np.percentile(known, q)) if known else None

    def attained(self, kind: str | None = None) -> float:
        """The share that was made within `slo` times what it takes alone; what failed was not."""
        asked = self.of(kind)
        return sum(self.in_time(sample) for sample in asked) / max(1, len(asked))

    def in_time(self, sample: Sample) -> bool:
        return sample.code == "ok" and sample.seconds <= self.slo * self.alone[sample.kind]

    @property
    def throughput(self) -> float:
        """Jobs made per second, from the first arrival to the last end."""
        done = [sample for sample in self.samples if sample.code == "ok"]
        span = max((each.at + each.seconds for each in done), default=0) - min(
            (s.at for s in done), default=0
        )
        return len(done) / span if span else 0.0

    @property
    def errors(self) -> dict[str, int]:
        return dict(Counter(sample.code for sample in self.samples if sample.code != "ok").most_common())

    def depth(self, kind: str | None = None) -> list[tuple[float, int]]:
        """How many had come and not ended, whenever that changed."""
        events = [(s.at, 1) for s in self.of(kind)] + [(s.at + s.seconds, -1) for s in self.of(kind)]
        found, now = [(0.0, 0)], 0
        for at, change in sorted(events):
            now += change
            found.append((at, now))
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "alone": dict(self.alone), "slo": self.slo, "throughput": self.throughput, "errors": self.errors,
            "attained": self.attained(), "kinds": {kind: self._summary(kind) for kind in self.alone},
            "samples": [asdict(sample) for sample in self.samples],
        }  # fmt: skip

    def _summary(self, kind: str) -> dict[str, Any]:
        seconds = {f"p{q}": self.percentile(kind, q) for q in (50, 95, 99)}
        queue = {f"queue_p{q}": self.percentile(kind, q, "queue") for q in (50, 95)}
        return {"sent": len(self.of(kind)), "attained": self.attained(kind), **seconds, **queue}


@dataclass(frozen=True, kw_only=True)
class Asks:
    """What every request asks for; None is the model's default."""

    size: str | None = None
    steps: int | None = None
    frames: int | None = None
    prompt: str = PROMPT

    def body(self, kind: str, seed: int) -> dict[str, Any]:
        said = {"size": self.size, "num_inference_steps": self.steps, "seed": seed, "prompt": self.prompt}
        said |= {"num_frames": self.frames} if kind == "video" else {}
        return {name: value for name, value in said.items() if value is not None}


def arrivals(rate: float, duration: float, mix: Mapping[str, float], seed: int = 0) -> list[Arrival]:
    """A Poisson stream: the same seed brings the same requests at the same times."""
    shares = dict(mix)
    if rate <= 0 or duration <= 0 or not shares or min(shares.values()) < 0 or not sum(shares.values()):
        raise InputError(
            f"rate={rate:g}, duration={duration:g}, mix={shares} brings no requests.",
            hint="All are above 0, such as --rate 2 --duration 60 --mix image:0.8,video:0.2.",
        )
    if unknown := [kind for kind in shares if kind not in KINDS]:
        raise InputError(f"There is no kind {unknown[0]!r}.", hint=f"There is {' and '.join(KINDS)}.")
    dice, found, now = random.Random(seed), [], 0.0
    while (now := now + dice.expovariate(rate)) < duration:
        kind = dice.choices(list(shares), list(shares.values()))[0]
        found.append(Arrival(now, kind, dice.randrange(2**31)))
    return found


def read_trace(path: Path) -> list[Arrival]:
    """Arrivals from a file with a line `{"at": seconds, "kind": "image"}` for each."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        found = [
            Arrival(float(line["at"]), str(line["kind"]), int(line.get("seed", at)))
            for at, line in enumerate(lines)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"The trace {path} cannot be read: {type(error).__name__} {error}.",
            hint='It has a line such as {"at": 0.5, "kind": "image"} for each request.',
        ) from error
    if not found or any(each.kind not in KINDS or each.at < 0 for each in found):
        raise InputError(
            f"The trace {path} has no requests, or some of another kind.", hint=f"Kinds: {KINDS}."
        )
    return sorted(found, key=lambda each: each.at)


class _Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """Its argument is the code."""


class Client:
    """One server, as its users see it."""

    def __init__(self, url: str, key: str | None = None) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(PATIENCE, connect=10.0), limits=limits,
            headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=False,
        )  # fmt: skip

    async def __aenter__(self) -> Client:
        try:
            (await self._http.get("/health")).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            await self._http.aclose()
            raise CommError(
                f"No server is ready at {self._http.base_url}: {error}.", hint="weft serve starts one."
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def make(self, kind: str, body: Mapping[str, Any]) -> tuple[str, float | None]:
        """An id, and seconds in the queue; returns when it is made."""
        if kind == "image":
            said = _checked(await self._http.post("/v1/images/generations", json=dict(body)))["weft"][0]
            return said["id"], said["timings"].get("queue")
        id = await self.create(body)
        said = await self.end(id)
        if said["status"] != "completed":
            raise _Refusal((said.get("error") or {}).get("code", "failed"))
        return id, said["weft"]["timings"].get("queue")

    async def create(self, body: Mapping[str, Any]) -> str:
        """The id of a video that is queued."""
        return _checked(await self._http.post("/v1/videos", json=dict(body)))["id"]

    async def end(self, id: str) -> dict[str, Any]:
        """A video when it has ended, from its events: asking again and again would add to the load."""
        name = ""
        async with self._http.stream("GET", f"/v1/videos/{id}/events") as answer:
            if answer.status_code >= 400:
                await answer.aread()
                _checked(answer)
            async for line in answer.aiter_lines():
                sort, _, value = line.partition(":")
                name = value.strip() if sort == "event" else name
                if sort == "data" and name == "done":
                    return json.loads(value)
        raise _Refusal("connection")

    async def sample(self, arrival: Arrival, body: Mapping[str, Any], start: float) -> Sample:
        """Make it when it is due; `start` is when 0 is, by this machine's steady clock."""
        await asyncio.sleep(max(0.0, start + arrival.at - time.monotonic()))
        code, id, queue = "ok", "", None
        try:
            id, queue = await self.make(arrival.kind, body)
        except _Refusal as refusal:
            code = str(refusal)
        except httpx.HTTPError:
            code = "connection"
        seconds = time.monotonic() - start - arrival.at
        return Sample(kind=arrival.kind, at=arrival.at, seconds=seconds, code=code, queue=queue, id=id)

    async def delete(self, ids: Iterable[str]) -> None:
        """What was made only to be measured."""
        few = asyncio.Semaphore(DELETES)

        async def one(id: str) -> None:
            async with few:
                await self._http.delete(f"/v1/{id.partition('_')[0]}s/{id}")

        await asyncio.gather(*(one(id) for id in ids if id), return_exceptions=True)


def _checked(answer: httpx.Response) -> dict[str, Any]:
    try:
        said = answer.json()
    except ValueError:
        said = {}
    if answer.status_code >= 400:
        raise _Refusal(said.get("error", {}).get("code") or f"http_{answer.status_code}")
    return said


async def alone(client: Client, kinds: Iterable[str], asks: Asks) -> dict[str, float]:
    """Median seconds of each kind on a server that does nothing else."""
    found: dict[str, float] = {}
    for kind in kinds:
        took: list[float] = []
        for seed in range(TIMES + 1):
            sample = await client.sample(Arrival(0.0, kind, seed), asks.body(kind, seed), time.monotonic())
            await client.delete([sample.id])
            if sample.code != "ok":
                raise CommError(f"The server made no {kind} when asked for one alone: {sample.code}.")
            took.append(sample.seconds)
        found[kind] = median(took[1:])
    return found


async def measure(
    url: str, work: Sequence[Arrival], *, slo: float = 3.0, asks: Asks | None = None, key: str | None = None,
    known: Mapping[str, float] | None = None, tell: Callable[[str], object] = lambda _: None,
) -> Measured:  # fmt: skip
    """Send what is due when it is due; `known` are the times alone, which are measured first if not given."""
    asks = asks or Asks()
    async with Client(url, key) as client:
        tell("each kind alone …")
        kinds = sorted({arrival.kind for arrival in work})
        single = dict(known) if known else await alone(client, kinds, asks)
        ended, start = 0, time.monotonic()

        async def one(arrival: Arrival) -> Sample:
            nonlocal ended
            body = asks.body(arrival.kind, arrival.seed) | {"deadline_seconds": slo * single[arrival.kind]}
            sample = await client.sample(arrival, body, start)
            ended += 1
            tell(f"{ended} of {len(work)} ended, {time.monotonic() - start:.0f} s")
            return sample

        samples = await asyncio.gather(*(one(arrival) for arrival in work))
        await client.delete(sample.id for sample in samples)
    return Measured(samples=samples, alone=single, slo=slo)
