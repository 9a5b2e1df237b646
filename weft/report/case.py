"""Case: one measured or simulated run, the schedule and cluster it ran on, and its figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from weft.core.errors import InputError
from weft.core.indices import IntArray
from weft.core.schedule import Schedule
from weft.core.timeline import Span, Timeline
from weft.core.topology import Topology
from weft.plan.balance import ratio
from weft.plan.balanced import Balancer
from weft.plan.choose import build
from weft.plan.explanation import Explanation
from weft.plan.strategies import parse
from weft.program.workspace import peak_memory
from weft.report.evidence import Cause
from weft.report.replay import Replay
from weft.report.sweep import SweepPoint
from weft.report.verdict import cause_of, sentence
from weft.schedule.measure import measure
from weft.simulate.events import MAX_RANKS_OF_MEMORY


@dataclass(frozen=True)
class Loads:
    """Planned load of each rank, and the loads it is compared with."""

    after: tuple[float, ...]
    before: tuple[float, ...] = ()
    """Loads of the unbalanced plan; empty if it is the same plan or unknown."""
    bound: float | None = None
    """Lower bound of the largest load over the mean load; None if unknown."""
    unit: str = "active token pairs"
    note: str = ""
    """Why no unbalanced loads are shown."""


@dataclass(frozen=True, eq=False)
class Case:
    """A timeline with, if known, its schedule, its cluster and other plans."""

    name: str
    timeline: Timeline
    schedule: Schedule | None = None
    topology: Topology | None = None
    plans: tuple[SweepPoint, ...] = ()
    """Other plans for the same attention on the same cluster."""
    scaling: tuple[SweepPoint, ...] = ()
    traced: Timeline | None = None
    """All calls of a traced run, of which `timeline` is one."""
    model: str = ""
    """The model or shape whose attention it is, if it was named."""
    mask: str = ""
    """The mask as it was asked for, such as sta:dense=0.1."""
    explained: Explanation | None = None
    """For a pipeline with changing masks: the plan of each layer and its gain."""

    @property
    def source(self) -> str:
        return "measured" if self.timeline.measured else "simulated"

    @property
    def label(self) -> str:
        return self.name if self.source in self.name else f"{self.name}, {self.source}"

    @property
    def calls(self) -> str:
        """Index of the call that represents a traced run."""
        if not self.traced:
            return "one attention"
        calls = by_call(self.traced)
        backward = sum(map(is_backward, calls.values()))
        kinds = {"forward": len(calls) - backward, "backward": backward}
        shown = "backward" if is_backward(self.timeline.spans) else "forward"
        one = f"the median of {kinds[shown]} {shown} calls" if kinds[shown] > 1 else f"the {shown} call"
        rest = f"; {backward} backward in the trace" if backward and shown == "forward" else ""
        return one + rest

    @property
    def ranks(self) -> int:
        return self.timeline.ranks

    @cached_property
    def machines(self) -> int:
        return self.topology.machines if self.topology else max(1, self.timeline.machines)

    @cached_property
    def path(self) -> tuple[Span, ...]:
        return Replay(self.timeline).path()

    @cached_property
    def cause(self) -> Cause:
        return cause_of(self.timeline, self.schedule, self.topology)

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Peak bytes of each rank, from the timeline or else from the schedule."""
        if self.timeline.memory or not self.schedule or self.ranks > MAX_RANKS_OF_MEMORY:
            return self.timeline.memory
        return peak_memory(self.schedule)

    @cached_property
    def home_memory(self) -> tuple[int, ...]:
        """Bytes of each rank's own shards: queries, keys, values and output."""
        if not self.schedule:
            return ()
        return tuple(map(self.schedule.problem.home_bytes, range(self.ranks)))

    @cached_property
    def loads(self) -> Loads:
        if not self.schedule:
            return Loads(tuple(self.timeline.computing.tolist()), unit="seconds computing", note=ALONE)
        schedule, topology = self.schedule, self.topology or Topology.local(self.ranks)
        after = measure(schedule).work
        try:
            strategy = parse(schedule.name, self.ranks)
            plain = replace(strategy, balance="none")
            before = measure(build(str(plain), *schedule.attention, topology)).work
            bound = Balancer(*schedule.attention, topology).bound(strategy)
        except InputError:
            return Loads(after, note=f"{schedule.name!r} is no plan of weft: what it was before is unknown.")
        if before == after:
            same = "It is not balanced" if strategy == plain else "Balancing changes nothing here"
            return Loads(after, bound=bound, note=f"{same}: before and after are the same.")
        return Loads(after, before, bound)

    @cached_property
    def traffic(self) -> IntArray:
        """Bytes sent, [source rank, destination rank]."""
        return self.timeline.traffic

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of all ranks; 0 if unknown."""
        if not self.schedule:
            return 0.0
        return 4.0 * self.schedule.problem.row_elements * sum(self.loads.after)


ALONE = (
    "One state only: the trace does not say how the work was dealt. With schedule.json beside it, "
    "the load before balancing and the bound are drawn too."
)


def by_call(timeline: Timeline) -> dict[int, list[Span]]:
    spans: dict[int, list[Span]] = {}
    for span in timeline.spans:
        spans.setdefault(span.call, []).append(span)
    return spans


def is_backward(spans: Iterable[Span]) -> bool:
    """Whether a call is the gradient of an attention, judged by the step names of its program."""
    return any(span.kind == "attend" and span.name.startswith("gradient") for span in spans)


def slowest(timeline: Timeline) -> list[int]:
    """Return the ranks that are done last, or equally late to a thousandth of the time."""
    ends = [max((span.end for span in timeline.of(rank)), default=0.0) for rank in range(timeline.ranks)]
    return [rank for rank, end in enumerate(ends) if end >= (1 - TIE) * timeline.seconds]


TIE = 1e-3


def summary(case: Case) -> dict[str, Any]:
    """Return the first table: time shares of the mean rank, which sum to one, and imbalances."""
    timeline = case.timeline
    whole = timeline.seconds or 1.0
    return {
        "seconds": timeline.seconds,
        "compute": float(timeline.computing.mean()) / whole,
        "exposed": timeline.exposed,
        "idle": float(timeline.idle.mean()) / whole,
        "overlap": timeline.overlap,
        "imbalance": timeline.imbalance,
        "slowest": slowest(timeline),
    }


def numbers(case: Case) -> dict[str, Any]:
    """Return all figures as plain values, for report.json."""
    timeline, loads = case.timeline, case.loads
    figures: dict[str, Any] = {
        "name": case.name,
        "model": case.model,
        "mask": case.mask,
        "measured": timeline.measured,
        "shown": case.calls,
        "topology": case.topology.name if case.topology else timeline.topology,
        "ranks": case.ranks,
        "machines": case.machines,
        "summary": summary(case),
        "cause": {**asdict(case.cause), "verdict": sentence(case.cause, case.timeline)},
        "per_rank": {
            "compute": timeline.computing.tolist(),
            "exposed": timeline.waiting.tolist(),
            "idle": timeline.idle.tolist(),
            "sent": case.traffic.sum(axis=1).tolist(),
            "memory": list(case.memory),
        },
        "loads": {
            **asdict(loads),
            "imbalance": ratio(loads.after),
            "imbalance_before": ratio(loads.before) if loads.before else None,
            "mean": sum(loads.after) / max(1, len(loads.after)),
        },
        "traffic": case.traffic.tolist(),
        "critical_path": [
            {"rank": s.rank, "kind": s.kind, "name": s.name, "start": s.start, "end": s.end}
            for s in case.path
        ],
        "scaling": [asdict(point) for point in case.scaling],
        "plans": [asdict(point) for point in case.plans],
    }
    if case.schedule:
        figures["schedule"] = {"name": case.schedule.name, "digest": case.schedule.digest}
        figures["density"] = case.schedule.attention[1].density
        figures["flops"] = case.flops
    return figures
