"""Estimates: what a server that was started under load predicts after twenty steps, and what is then true.

Busy loops run until the server is ready, so that what it measures while warming up is too slow. Then it makes
one video of twenty steps, and is asked how long others would take alone: of other steps, of other sizes. They
are made one after the other. An error is the ratio of the two, the larger over the smaller.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx

from bench.rows import Line, Results, Row
from weft.serve import load_test

SEEN_STEPS = 20
STAGES = ("encode", "denoise", "decode", "media")
CASE = "estimates after 20 steps of a server started under load"


@dataclass(frozen=True)
class EstimateCase:
    name: str
    kind: str
    asks: load_test.RequestTemplate


STEPS = (
    EstimateCase("8 steps", "video", load_test.RequestTemplate(steps=8)),
    EstimateCase("40 steps", "video", load_test.RequestTemplate(steps=40)),
)
SIZES = (
    EstimateCase("an image", "image", load_test.RequestTemplate(steps=20)),
    EstimateCase("128x128", "video", load_test.RequestTemplate(size="128x128", steps=8)),
    EstimateCase("32 frames", "video", load_test.RequestTemplate(frames=32, steps=8)),
    EstimateCase("an image of 256x256", "image", load_test.RequestTemplate(size="256x256", steps=8)),
)
BARS = {"other step counts": (STEPS, 1.25), "other sizes": (SIZES, 2.0)}


@contextmanager
def busy_cores(each: int = 2) -> Iterator[None]:
    """So many busy loops for each core."""
    count = each * (os.cpu_count() or 1)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def estimates(report: Results, url: str, *, quick: bool) -> None:
    """Each case is made three times, of which the median counts; or half of the cases once."""
    bars = {name: (cases[: len(cases) // 2] if quick else cases, bar) for name, (cases, bar) in BARS.items()}
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        cases = [case for some, _ in bars.values() for case in some]
        before = {case: predicted(http, case) for case in cases}
        asyncio.run(
            seconds_of(url, EstimateCase("", "video", load_test.RequestTemplate(steps=SEEN_STEPS)), 1)
        )
        after = {case: predicted(http, case) for case in cases}
        took = {case: asyncio.run(seconds_of(url, case, 1 if quick else 3)) for case in cases}
    for name, (some, bar) in bars.items():
        worst = max(error(after[case], took[case]) for case in some)
        report.rows.append(
            Row(
                case=f"{CASE}, {name}", measured=worst, unit="×", limit=1.0,
                peer=max(error(before[case], took[case]) for case in some), peer_name="warm-ups alone",
                bar=f"worst error ≤ {bar} (is {worst:.2f})", holds=worst <= bar,
            )
        )  # fmt: skip
    report.lines.extend(
        Line(case=CASE, name=case.name, measured=took[case], unit="s", ratio=after[case] / took[case],
             note=f"predicted {after[case]:.2f} s, by warm-ups alone {before[case]:.2f} s")
        for case in cases
    )  # fmt: skip


def error(one: float, other: float) -> float:
    return max(one / other, other / one)


def predicted(http: httpx.Client, case: EstimateCase) -> float:
    frames = 1 if case.kind == "image" else case.asks.frames
    asked = {"size": case.asks.size, "frames": frames, "steps": case.asks.steps}
    answer = http.get("/v1/plan", params={name: value for name, value in asked.items() if value})
    return float(answer.raise_for_status().json()["seconds"])


async def seconds_of(url: str, case: EstimateCase, times: int) -> float:
    """The median of what its ranks spent on it."""
    spent = []
    async with load_test.ServerClient(url) as client:
        for seed in range(times):
            id, _ = await client.make(case.kind, case.asks.body(case.kind, seed))
            spent.append(sum(await timings(url, id)))
            await client.delete([id])
    return median(spent)


async def timings(url: str, id: str) -> list[float]:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        job: dict[str, Any] = (await http.get(f"/v1/{id.partition('_')[0]}s/{id}")).raise_for_status().json()
    return [job["weft"]["timings"].get(stage) or 0.0 for stage in STAGES]
