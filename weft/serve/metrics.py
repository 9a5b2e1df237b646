"""Metrics: what Prometheus reads at /metrics, fed by the events of the engine and by its snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from weft import __version__
from weft.serve.jobs import KINDS

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
        self.sent = Counter("weft_comm_bytes", "Sent to other ranks by attention.", ["rank"], **own)
        self.density = Gauge("weft_mask_density_ratio", "What the last mask left of an attention.", **own)
        self.gain = Gauge(
            "weft_plan_gain_ratio", "Attention by first plans over attention by those in force.", **own
        )
        self.plans = Counter("weft_plan_cache", "Attentions whose plan was there or not.", ["result"], **own)
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
            self._step(said)
        elif name == "restart":
            self.restarts.inc()

    def _step(self, said: dict[str, Any]) -> None:
        """Of `steps` that took `seconds` each. `exposed` is the share that ranks waited for others; `attend`
        has seconds of each rank, `sent` bytes. Of `runs` attentions `first` were the first of their plan."""
        seconds, ranks, steps = said.get("seconds") or 0, said.get("ranks", ()), said.get("steps", 1)
        for _ in range(steps):
            self.step.labels(self._engine.name).observe(seconds)
        gauges = (self.imbalance, "imbalance"), (self.density, "density"), (self.gain, "gain")
        for gauge, name in gauges:
            if said.get(name) is not None:
                gauge.set(said[name])
        self.exposed.inc((said.get("exposed") or 0) * steps * seconds * len(ranks))
        for counter, name in ((self.compute, "attend"), (self.sent, "sent")):
            for rank, amount in zip(ranks, said.get(name) or (), strict=False):
                counter.labels(rank).inc(amount)
        runs, first = said.get("runs", 0), said.get("first", 0)
        self.plans.labels("miss").inc(first)
        self.plans.labels("hit").inc(runs - first)

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
        waiting = GaugeMetricFamily("weft_requests_queued", "Jobs that wait.", labels=["kind"])
        running = GaugeMetricFamily("weft_requests_running", "Jobs on ranks.", labels=["kind"])
        for kind in KINDS:
            waiting.add_metric([kind], now.get("waiting", {}).get(kind, 0))
            running.add_metric([kind], sum(len(run["jobs"]) for run in now["running"] if run["kind"] == kind))
        plan = GaugeMetricFamily(
            "weft_plan_info", "How the usual request is split.", labels=["plan", "ranks"]
        )
        if usual := now.get("plan"):
            plan.add_metric([usual["plan"], str(usual["ranks"])], 1)
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
        return iter((waiting, running, plan, up, memory, load))
