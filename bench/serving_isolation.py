"""Isolation: what a video whose steps are as long as the server admits does to the jobs beside it.

Servers are started with `--max-step`, and the video has as many frames as `/v1/plan` admits. An image is
asked for while a step of it runs on both ranks. On a server that gives each job one rank, the video is
deleted in the middle of a step, while another job runs beside it. What the image and that job must be is made
first, undisturbed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import httpx

from bench.rows import Results, Row

MAX_STEP_SECONDS = 12.0
"""Above the 5 s after which the ranks of a cancelled step are replaced."""
OPTIONS = ("--max-step", f"{MAX_STEP_SECONDS:g}s", "--max-time", "24h")
SLACK_SECONDS = 2.0
"""The bar: what an image may wait beside one step and its own time."""
FREE_SECONDS = 10.0
"""The bar: when the ranks of a deleted job are free."""
PATIENCE_SECONDS = 300.0
MAX_FRAMES = 4096
PROMPT = "a red circle moving left"
CASE = "beside a video of the longest step that is admitted"


def image_beside_longest(report: Results, url: str) -> None:
    with _client(url) as http:
        expected = _image(http)
        alone = _plan(http, frames=1)["seconds"]
        long, step = _start_longest(http, lambda plan: plan["admitted"])
        began = time.monotonic()
        same = _image(http) == expected
        waited = time.monotonic() - began
        http.delete(f"/v1/videos/{long}").raise_for_status()
    allowed = MAX_STEP_SECONDS + alone + SLACK_SECONDS
    report.rows.append(
        Row(
            case=f"an image {CASE}{'' if same else ': OTHER BITS'}", measured=waited, unit="s",
            peer=alone, peer_name="alone, predicted", limit=alone,
            bar=f"≤ one step (--max-step {MAX_STEP_SECONDS:g} s; predicted {step:.1f}) + its own + "
            f"{SLACK_SECONDS:g} s = {allowed:.1f} s",
            holds=waited <= allowed and same,
        )
    )  # fmt: skip


def delete_of_longest(report: Results, url: str) -> None:
    """Until all ranks are ready again; the job beside it must come out as it was alone."""
    beside = {"seed": 2, "num_inference_steps": 300}
    with _client(url) as http:
        expected = _content(http, _post(http, **beside))
        long, step = _start_longest(
            http, lambda plan: plan["admitted"] and _step_of_one(plan) <= MAX_STEP_SECONDS
        )
        short = _post(http, **beside)
        _wait(lambda: _is_running(http, short))
        began = time.monotonic()
        http.delete(f"/v1/videos/{long}").raise_for_status()
        _wait(lambda: _is_free(http))
        freed = time.monotonic() - began
        same = _content(http, short) == expected
    report.rows.append(
        Row(
            case=f"DELETE of that video, until its ranks are free{'' if same else ': OTHER BITS BESIDE IT'}",
            measured=freed, unit="s", peer=step, peer_name="to the end of its step", limit=0.0,
            bar=f"≤ {FREE_SECONDS:g} s, and the job beside it keeps its bits",
            holds=freed <= FREE_SECONDS and same,
        )
    )  # fmt: skip


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False)


def _start_longest(http: httpx.Client, fits: Callable[[dict[str, Any]], bool]) -> tuple[str, float]:
    """Ask for as many frames as fit; return the id and the predicted step once it runs."""
    facts = http.get("/v1/models").raise_for_status().json()["data"][0]["weft"]
    unit = int(facts["default"]["num_frames"])  # its multiples are legal for every model
    few, many = 1, MAX_FRAMES // unit
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(_plan(http, frames=middle * unit)) else (few, middle)
    id = _post(http, num_frames=few * unit, seed=3)
    _wait(lambda: _is_running(http, id))
    return id, _plan(http, frames=few * unit)["step_seconds"]


def _step_of_one(plan: dict[str, Any]) -> float:
    """Seconds of a step on one rank."""
    return plan["seconds_by_ranks"]["1"] / plan["default"]["num_inference_steps"]


def _plan(http: httpx.Client, *, frames: int) -> dict[str, Any]:
    return http.get("/v1/plan", params={"frames": frames}).raise_for_status().json()


def _image(http: httpx.Client) -> str:
    made = http.post("/v1/images/generations", json={"prompt": PROMPT, "seed": 1}).raise_for_status()
    return made.json()["data"][0]["b64_json"]


def _post(http: httpx.Client, **asks: Any) -> str:
    return http.post("/v1/videos", json={"prompt": PROMPT, **asks}).raise_for_status().json()["id"]


def _content(http: httpx.Client, id: str) -> str:
    """Return the digest of a video when it is made."""
    _wait(lambda: http.get(f"/v1/videos/{id}").json()["status"] == "completed")
    return hashlib.sha256(http.get(f"/v1/videos/{id}/content").raise_for_status().content).hexdigest()


def _is_running(http: httpx.Client, id: str) -> bool:
    running = http.get("/v1/status").raise_for_status().json()["running"]
    return any(id in batch["jobs"] and batch["ranks"] for batch in running)


def _is_free(http: httpx.Client) -> bool:
    """Whether all ranks are ready, and none works for a job that was deleted."""
    status = http.get("/v1/status").raise_for_status().json()
    is_ready = http.get("/health").status_code == 200
    return is_ready and not any(batch["cancelled"] for batch in status["running"])


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"The server did not come there in {PATIENCE_SECONDS:g} s.")
        time.sleep(0.05)
