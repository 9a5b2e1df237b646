"""Metrics for Prometheus, at /metrics: counted from events of the engine, and read from its snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from weft import __version__
from weft.serve.jobs import KINDS, Job
from weft.serve.messages import BatchProgress, EngineEvent, JobEnded, RanksLost

JOB_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
STEP_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
HTTP_METHODS = {"GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"}


class Metrics:
    """A registry of its own: two servers in one process, as in tests, do not count together."""

    def __init__(self, engine: Any) -> None:
        self.registry = own = CollectorRegistry()
        self._engine = engine
        counter, gauge = partial(Counter, registry=own), partial(Gauge, registry=own)
        job_seconds = partial(Histogram, registry=own, buckets=JOB_BUCKETS)
        step_seconds = partial(Histogram, registry=own, buckets=STEP_BUCKETS)
        self.ended = counter("weft_requests", "Jobs that ended.", ["kind", "status"])
        self.duration = job_seconds(
            "weft_request_duration_seconds", "From creation to the end.", ["kind", "status"]
        )
        self.queue = job_seconds("weft_queue_seconds", "Until the first ranks took it.", ["kind"])
        self.stage = job_seconds("weft_stage_seconds", "By stage.", ["stage"])
        self.step = step_seconds("weft_denoise_step_seconds", "One denoising step.", ["model"])
        self.imbalance = gauge("weft_attention_imbalance_ratio", "Most work over mean work, 1 is perfect.")
        self.exposed = counter("weft_comm_exposed_seconds", "Waited for what others send.")
        self.compute = counter("weft_compute_seconds", "Spent in attention.", ["rank"])
        self.sent = counter("weft_comm_bytes", "Sent to other ranks by attention.", ["rank"])
        self.density = gauge("weft_mask_density_ratio", "What the last mask left of an attention.")
        self.gain = gauge(
            "weft_plan_gain_ratio", "Attention by first plans over attention by those in force."
        )
        self.plans = counter("weft_plan_cache", "Attentions whose plan was there or not.", ["result"])
        self.restarts = counter("weft_rank_restarts", "Times that the ranks were started again.")
        Info("weft_build", "The version of weft.", registry=own).info({"version": __version__})
        self.http = counter("http_requests", "Answered requests.", ["handler", "method", "status"])
        self.http_seconds = step_seconds(
            "http_request_duration_seconds", "Until the answer was sent.", ["handler", "method"]
        )
        self.registry.register(self)  # type: ignore[arg-type] - a collector is what has collect()
        engine.on_event.append(self.on_event)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def request(self, handler: str, method: str, status: int, seconds: float) -> None:
        method = method if method in HTTP_METHODS else "other"
        self.http.labels(handler, method, status).inc()
        self.http_seconds.labels(handler, method).observe(seconds)

    def on_event(self, event: EngineEvent) -> None:
        """Count an event. Called by the engine's thread."""
        if isinstance(event, JobEnded) and event.job is not None:
            self._count_job(event.job)
        elif isinstance(event, BatchProgress):
            self._count_steps(event)
        elif isinstance(event, RanksLost):
            self.restarts.inc()

    def _count_steps(self, event: BatchProgress) -> None:
        step, ranks = event.step, event.ranks
        for _ in range(step.steps):
            self.step.labels(self._engine.name).observe(step.seconds)
        for gauge, value in (
            (self.imbalance, step.imbalance), (self.density, step.density), (self.gain, step.gain),
        ):  # fmt: skip
            if value is not None:
                gauge.set(value)
        self.exposed.inc(step.exposed * step.steps * step.seconds * len(ranks))
        for counter, amounts in ((self.compute, step.attend), (self.sent, step.sent)):
            for rank, amount in zip(ranks, amounts, strict=False):
                counter.labels(rank).inc(amount)
        self.plans.labels("miss").inc(step.first)
        self.plans.labels("hit").inc(step.runs - step.first)

    def _count_job(self, job: Job) -> None:
        cancelled = job.failure is not None and job.failure.code == "cancelled"
        kind, status = job.params.kind, "cancelled" if cancelled else job.status
        self.ended.labels(kind, status).inc()
        self.duration.labels(kind, status).observe(max(0.0, (job.completed or job.created) - job.created))
        for stage, seconds in job.timings.items():
            if stage == "queue":
                self.queue.labels(kind).observe(seconds)
            else:
                self.stage.labels(stage).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Read the gauges when Prometheus does."""
        now = self._engine.snapshot()
        waiting = GaugeMetricFamily("weft_requests_queued", "Jobs that wait.", labels=["kind"])
        running = GaugeMetricFamily("weft_requests_running", "Jobs on ranks.", labels=["kind"])
        for kind in KINDS:
            waiting.add_metric([kind], now.get("waiting", {}).get(kind, 0))
            running.add_metric([kind], sum(len(run["jobs"]) for run in now["running"] if run["kind"] == kind))
        plan = GaugeMetricFamily("weft_plan_info", "Plan of the default request.", labels=["plan", "ranks"])
        if usual := now.get("plan"):
            plan.add_metric([usual["plan"], str(usual["ranks"])], 1)
        up = GaugeMetricFamily("weft_up", "1 if the server is ready.")
        up.add_metric([], float(self._engine.status() == "ok"))
        memory = GaugeMetricFamily("weft_device_memory_bytes", "By rank.", labels=["rank", "kind"])
        load = GaugeMetricFamily("weft_rank_load_ratio", "Share of the last second in jobs.", labels=["rank"])
        for rank in now.get("ranks", ()):
            name = str(rank["rank"])
            load.add_metric([name], rank.get("load") or 0)
            memory.add_metric([name, "allocated"], rank.get("memory") or 0)
            memory.add_metric([name, "limit"], rank.get("limit") or 0)
        return iter((waiting, running, plan, up, memory, load))
