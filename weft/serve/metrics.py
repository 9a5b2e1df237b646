"""Metrics: what Prometheus reads at /metrics, fed by the events of the engine and by its snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from weft import __version__

LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
SHORT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
METHODS = {"GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"}


class Metrics:
    """One registry of our own: two servers in one process, as in tests, do not count together."""

    def __init__(self, engine: Any) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        own: dict[str, Any] = {"registry": self.registry}
        self.ended = Counter("weft_requests", "Jobs that ended.", ["kind", "status"], **own)
        self.duration = Histogram(
            "weft_request_duration_seconds",
            "From creation to the end.",
            ["kind", "status"],
            buckets=LONG,
            **own,
        )
        self.queue = Histogram(
            "weft_queue_seconds", "Until the first ranks took it.", ["kind"], buckets=LONG, **own
        )
        self.stage = Histogram("weft_stage_seconds", "By stage.", ["stage"], buckets=LONG, **own)
        self.step = Histogram(
            "weft_denoise_step_seconds", "One denoising step.", ["model"], buckets=SHORT, **own
        )
        self.imbalance = Gauge(
            "weft_attention_imbalance_ratio", "Most work over mean work, 1 is perfect.", **own
        )
        self.exposed = Counter("weft_comm_exposed_seconds", "Waited for what others send.", **own)
        self.compute = Counter("weft_compute_seconds", "Spent in attention.", ["rank"], **own)
        self.restarts = Counter("weft_rank_restarts", "Times that the ranks were started again.", **own)
        Info("weft_build", "The version of weft.", **own).info({"version": __version__})
        self.http = Counter("http_requests", "Answered requests.", ["handler", "method", "status"], **own)
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "Until the answer was sent.",
            ["handler", "method"],
            buckets=SHORT,
            **own,
        )
        self.registry.register(self)  # type: ignore[arg-type] - a collector is what has collect()
        engine.on_event.append(self.event)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def request(self, handler: str, method: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else "other"
        self.http.labels(handler, method, status).inc()
        self.http_seconds.labels(handler, method).observe(seconds)

    def event(self, name: str, said: dict[str, Any]) -> None:
        """Called by the engine's thread; events that we do not count are none of our business."""
        if name == "job_ended":
            self._job(said["job"])
        elif name == "step":
            self._step(**said)
        elif name == "restart":
            self.restarts.inc()

    def _step(
        self, *, seconds: float | None = None, imbalance: float | None = None, exposed: float | None = None,
        ranks: Sequence[int] = (), attend: Sequence[float] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        """`exposed` is the share of the step that ranks waited for others; `attend` has seconds of each."""
        self.step.labels(self._engine.name).observe(seconds or 0)
        if imbalance is not None:
            self.imbalance.set(imbalance)
        self.exposed.inc((exposed or 0) * (seconds or 0) * len(ranks))
        for rank, spent in zip(ranks, attend or (), strict=False):
            self.compute.labels(rank).inc(spent)

    def _job(self, job: Any) -> None:
        cancelled = job.failure is not None and job.failure.code == "cancelled"
        kind, status = job.asked.kind, "cancelled" if cancelled else job.status
        self.ended.labels(kind, status).inc()
        self.duration.labels(kind, status).observe(max(0.0, (job.completed or job.created) - job.created))
        for stage, seconds in job.timings.items():
            if stage == "queue":
                self.queue.labels(kind).observe(seconds)
            else:
                self.stage.labels(stage).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Gauges are read when they are asked for."""
        now = self._engine.snapshot()
        waiting = GaugeMetricFamily("weft_requests_queued", "Jobs that wait.")
        waiting.add_metric([], now.get("queued", 0))
        running = GaugeMetricFamily("weft_requests_running", "Jobs on ranks.")
        running.add_metric([], sum(len(run.get("jobs", ())) for run in now.get("running", ())))
        up = GaugeMetricFamily("weft_up", "1 if the server is ready.")
        up.add_metric([], float(self._engine.status() == "ok"))
        memory = GaugeMetricFamily("weft_device_memory_bytes", "By rank.", labels=["rank", "kind"])
        load = GaugeMetricFamily(
            "weft_rank_load_ratio", "Share of the last second spent on jobs.", labels=["rank"]
        )
        for rank in now.get("ranks", ()):
            name = str(rank["rank"])
            load.add_metric([name], rank.get("load") or 0)
            memory.add_metric([name, "allocated"], rank.get("memory") or 0)
            memory.add_metric([name, "limit"], rank.get("limit") or 0)
        return iter((waiting, running, up, memory, load))
