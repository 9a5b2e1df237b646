"""Verdict: why a timeline takes as long as it does, and which rank or link is the cause.

Each suspicion is tested by a replay without it: a rank that computes as fast as the others, even work, a
link as fast as its peers, a rank that starts or sends in time. What saves most is the cause. So waiting is
charged to the rank and the operation that was waited for, and not to the rank that waits.
"""

from __future__ import annotations

from weft.core import units
from weft.core.schedule import Schedule
from weft.core.timeline import Timeline
from weft.core.topology import Topology
from weft.report.evidence import Cause, Evidence
from weft.report.suspects import suspects

LEAST = 0.03
"""Share of the time that a cause must cost to be named."""
PECULIAR = 0.8
"""Of causes that explain about equally much, at least this share of the most, the most specific is named."""
MOST_SPANS = 300_000
"""A replay takes microseconds for each span, and there are about thirty."""
AGAINST_ALL = 0.25
"""A rank or link is the cause if it costs at least this share of what communication costs all ranks."""

KINDS = {
    "late start": "Late start costs most: rank {rank} begins later than the others.",
    "stall": "A stall costs most: rank {rank} stops once, at {op}.",
    "slow link": "A slow link costs most: messages from rank {source} to rank {target} take {factor} as long "
    "as others.",
    "slow rank links": "Slow links of rank {rank} cost most: its messages take {factor} as long as others.",
    "slow machine links": "The slow network of machine {machine} costs most: its messages take {factor} as "
    "long as others.",
    "late sends": "Late sends cost most: rank {rank} sends later than it could.",
    "slow rank": "Uneven speed costs most: rank {rank} computes {factor} as long as others for the same "
    "work.",
    "uneven work by head": "Uneven work costs most: the heads of rank {rank} have {factor} the mean load.",
    "uneven work": "Uneven work costs most: rank {rank} has {factor} the mean load.",
    "uneven computing": "Uneven computing costs most: rank {rank} computes {factor} as long as others, "
    "by more work or less speed: schedule.json would show which.",
    "uneven work by step": "Uneven work by step costs most: all ranks have about as much in all, but rank "
    "{rank} has up to {factor} the mean load of a step.",
    "launch": "Launching costs most: hosts take longer to launch the steps than devices to run them.",
    "latency": "Latency costs most: all ranks wait for short messages, most in {op}; no rank is the cause.",
    "bandwidth": "Bandwidth costs most: all ranks wait for data, most in {op}; no rank is the cause.",
    "communication": "Communication costs most: all ranks wait for data, most in {op}; no rank is the cause.",
    "unknown": "The timeline has more than {most:,} spans: causes are not searched.",
    "nothing": "Little is lost: the mean rank computes {compute} of the time.",
}
"""Every kind of cause; of those that explain equally much, the first is named."""


def cause_of(timeline: Timeline, schedule: Schedule | None = None, topology: Topology | None = None) -> Cause:
    """Return what costs most: a rank or link if one stands out, else what costs all of them."""
    if len(timeline.spans) > MOST_SPANS:
        return Cause("unknown")
    evidence = Evidence(timeline, schedule, topology)
    least = LEAST * timeline.seconds
    everyone = _everyone(evidence)
    launch = max((span.seconds for span in timeline.spans if span.kind == "launch"), default=0.0)
    if launch > max(least, everyone.seconds):
        return Cause("launch", launch)
    least = max(least, AGAINST_ALL * everyone.seconds)
    known = [cause for cause in suspects(evidence) if cause.seconds > least]
    most = max((cause.seconds for cause in known), default=0.0)
    known = [cause for cause in known if cause.seconds >= PECULIAR * most]
    if known:
        return min(known, key=lambda cause: (list(KINDS).index(cause.kind), -cause.seconds))
    return everyone if everyone.seconds > LEAST * timeline.seconds else Cause("nothing")


def _everyone(evidence: Evidence) -> Cause:
    """Return what communication costs all ranks."""
    spans, replay = evidence.spans, evidence.replay
    gain = replay.without(lengths=dict.fromkeys(evidence.sends, 0.0))
    without = {i: max(0.0, spans[i].seconds - evidence.latency[evidence.is_near(i)]) for i in evidence.sends}
    kind = "communication"
    if evidence.topology is not None:
        kind = "latency" if replay.without(lengths=without) > gain / 2 else "bandwidth"
    waits: dict[int, float] = {}
    for span in spans:
        if span.kind in ("wait", "barrier"):
            waits[span.op] = waits.get(span.op, 0.0) + span.seconds
    return Cause(kind, gain, op=max(waits, key=lambda op: waits[op], default=None))


def sentence(cause: Cause, timeline: Timeline) -> str:
    """Return the verdict in words."""
    source, target = cause.link or (None, None)
    wanted = "attend" if cause.kind == "stall" else "wait"
    spans = sorted((s for s in timeline.spans if s.op == cause.op), key=lambda s: s.kind != wanted)
    name = spans[0].name if spans else ""
    text = KINDS[cause.kind].format(
        rank=cause.rank,
        machine=cause.machine,
        source=source,
        target=target,
        factor=f"{cause.factor:.2f}×",
        op=f"“{name}”",
        most=MOST_SPANS,
        compute=f"{timeline.computing.mean() / (timeline.seconds or 1.0):.1%}",
    )
    if not cause.seconds:
        return text
    left = timeline.seconds - cause.seconds
    return f"{text} Without it: {units.time(left)} instead of {units.time(timeline.seconds)}."
