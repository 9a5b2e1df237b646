"""What Prometheus is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.fake import Fake, made, serving
from weft.serve.messages import AttentionTimeline, BatchProgress, RanksLost, StepDone
from weft.serve.metrics import Metrics

FAMILIES = {
    "weft_requests", "weft_requests_queued", "weft_requests_running", "weft_request_duration_seconds",
    "weft_queue_seconds", "weft_stage_seconds", "weft_denoise_step_seconds", "weft_attention_imbalance_ratio",
    "weft_comm_exposed_seconds", "weft_compute_seconds", "weft_device_memory_bytes", "weft_build_info",
    "weft_comm_bytes", "weft_mask_density_ratio", "weft_plan_cache", "weft_plan_info", "weft_rank_restarts",
    "weft_rank_load_ratio", "weft_up", "http_requests", "http_request_duration_seconds",
}  # fmt: skip


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(found: dict[str, Any], name: str, sample: str, **labels: str) -> float:
    values = [s.value for s in found[name].samples if s.name == sample and labels.items() <= s.labels.items()]
    return sum(values)


def test_jobs_steps_ranks_and_requests_are_counted(tmp_path: Path) -> None:
    with (
        made(tmp_path, limit=4) as engine,
        serving(engine) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        for prompt in ("a cat", "fail"):
            http.post("/v1/images/generations", json={"prompt": prompt, "num_inference_steps": 5})
        engine.pace = 0.05
        id = http.post("/v1/videos", json={"prompt": "x", "num_inference_steps": 900}).json()["id"]
        while not (job := engine.store.get(id)) or not job.step:
            time.sleep(0.01)
        while_it_runs = families(http.get("/metrics").text)
        http.delete(f"/v1/videos/{id}")
        http.get("/no/such/address")
        http.request("PROPFIND", "/live")
        engine.emit(RanksLost("a test"))
        answer = http.get("/metrics")
    found = families(answer.text)
    assert answer.headers["content-type"].startswith("text/plain")
    assert set(found) >= FAMILIES
    assert not [name for name in found if ":" in name]
    for kind, status in (("image", "completed"), ("image", "failed"), ("video", "cancelled")):
        assert value(found, "weft_requests", "weft_requests_total", kind=kind, status=status) == 1
        assert (
            value(
                found,
                "weft_request_duration_seconds",
                "weft_request_duration_seconds_count",
                kind=kind,
                status=status,
            )
            == 1
        )
    assert value(while_it_runs, "weft_requests_running", "weft_requests_running", kind="video") == 1
    assert value(while_it_runs, "weft_requests_queued", "weft_requests_queued", kind="image") == 0
    assert value(found, "weft_requests_running", "weft_requests_running") == 0
    assert value(found, "weft_denoise_step_seconds", "weft_denoise_step_seconds_count", model="shapes") >= 7
    assert value(found, "weft_attention_imbalance_ratio", "weft_attention_imbalance_ratio") == 1.07
    assert value(found, "weft_rank_restarts", "weft_rank_restarts_total") == 1
    assert value(found, "weft_device_memory_bytes", "weft_device_memory_bytes", kind="limit") == 4 * 2**31
    assert value(found, "weft_stage_seconds", "weft_stage_seconds_count", stage="decode") == 1
    requests = "http_requests", "http_requests_total"
    assert value(found, *requests, handler="/v1/videos/{id}", method="DELETE", status="200") == 1
    assert value(found, *requests, handler="none", method="GET", status="404") == 1
    assert value(found, *requests, method="other", status="405") == 1
    assert "/no/such/address" not in answer.text
    assert id not in answer.text


def test_compute_is_counted_for_each_rank(tmp_path: Path) -> None:
    engine = Fake(tmp_path)
    metrics = Metrics(engine)
    full = StepDone(
        batch="a", step=1, seconds=0.5, exposed=0.1, attend=(0.1, 0.2), sent=(7, 9), density=0.25, runs=6,
        first=2,
    )  # fmt: skip
    for on_event in engine.on_event:
        on_event(BatchProgress(full, ranks=(2, 3)))
        on_event(BatchProgress(StepDone(batch="a", step=2, seconds=0.0), ranks=(2, 3)))
        on_event(AttentionTimeline(batch="a", label="", spans=()))
    found = families(metrics.text().decode())
    engine.close()
    assert value(found, "weft_compute_seconds", "weft_compute_seconds_total", rank="3") == pytest.approx(0.2)
    assert value(found, "weft_comm_bytes", "weft_comm_bytes_total", rank="2") == 7
    assert value(found, "weft_mask_density_ratio", "weft_mask_density_ratio") == 0.25
    assert value(found, "weft_plan_cache", "weft_plan_cache_total", result="hit") == 4
    assert value(found, "weft_plan_cache", "weft_plan_cache_total", result="miss") == 2
    assert value(found, "weft_comm_exposed_seconds", "weft_comm_exposed_seconds_total") == pytest.approx(0.1)
