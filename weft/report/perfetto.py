"""Perfetto: a timeline as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open.

A rank is a process, its lanes are threads. Sends that are under way together lie on several comm
threads, as spans of one thread must not overlap. An arrow leads from each send to what waited for it,
or was the first to begin once it had arrived.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.core.timeline import Span, Timeline

GZIP_ABOVE = 5_000_000  # bytes
Event = dict[str, Any]
Thread = tuple[int, int]
"""(pid, tid): a rank, and 0 for its compute lane or 1 and more for its comm lanes."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return spans, arrows and bytes in flight of all ranks as trace events; times in microseconds."""
    lanes = [[s for s in timeline.of(rank) if s.lane == "compute"] for rank in range(timeline.ranks)]
    placed = [(span, (span.rank, 0)) for lane in lanes for span in lane]
    for rank in range(timeline.ranks):
        placed += _packed(rank, [s for s in timeline.of(rank) if s.lane == "comm"])
    placed.sort(key=lambda pair: (pair[0].start, pair[1]))
    events = [*_names(timeline, {thread for _, thread in placed})]
    events += [_slice(span, thread) for span, thread in placed]
    events += _flows([(span, thread) for span, thread in placed if span.kind == "send"], lanes)
    for rank in range(timeline.ranks):
        events += _in_flight(rank, [s for s in timeline.of(rank) if s.kind == "send"])
    about = {"name": timeline.name, "measured": timeline.measured, "topology": timeline.topology}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def write_trace(timeline: Timeline, path: str | Path) -> Path:
    """Write the trace as JSON, gzipped (.gz) above 5 MB; return the path."""
    path = Path(path)
    data = json.dumps(chrome_trace(timeline), ensure_ascii=False).encode()
    if len(data) > GZIP_ABOVE:
        path, data = path.with_name(path.name + ".gz"), gzip.compress(data, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _packed(rank: int, spans: list[Span]) -> Iterator[tuple[Span, Thread]]:
    """Assign each span to the first comm thread that is free when it begins."""
    free: list[float] = []
    for span in spans:
        lane = next((i for i, end in enumerate(free) if end <= span.start), len(free))
        free[lane : lane + 1] = [span.end]
        yield span, (rank, 1 + lane)


def _names(timeline: Timeline, used: set[Thread]) -> Iterator[Event]:
    for rank in range(timeline.ranks):
        name = f"rank {rank} · machine {rank * timeline.machines // timeline.ranks}"
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for rank, tid in sorted(used | {(rank, tid) for rank in range(timeline.ranks) for tid in (0, 1)}):
        name = "comm" if tid == 1 else f"comm {tid}" if tid else "compute"
        yield {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _slice(span: Span, thread: Thread) -> Event:
    args = {"op": span.op, "call": span.call}
    if span.peer >= 0:
        args["peer"] = span.peer
    if span.num_bytes:
        args["bytes"] = span.num_bytes
    start, end = _micro(span.start), _micro(span.end)
    return _event("X", thread, start, name=span.name, cat=span.kind, dur=round(end - start, 3), args=args)


def _flows(sends: list[tuple[Span, Thread]], lanes: list[list[Span]]) -> Iterator[Event]:
    """Return an arrow for each send; `lanes` are the compute and wait spans of the ranks, in order."""
    waits: dict[tuple[int, ...], list[Span]] = defaultdict(list)
    for span in (s for lane in lanes for s in lane if s.kind == "wait"):
        waits[span.call, span.op, span.peer, span.rank].append(span)
    starts = [[s.start for s in lane] for lane in lanes]
    for number, (send, thread) in enumerate(sends):
        about = {"id": number, "name": send.name, "cat": "flow"}
        yield _event("s", thread, _micro(send.start), **about)
        waited = waits[send.call, send.op, send.rank, send.peer]
        begun = lanes[send.peer][bisect_left(starts[send.peer], send.end) :][:1]
        then = next((s for s in (*waited, *begun) if s.end >= send.end), None)
        if then is not None:
            at = min(max(then.start, send.start), then.end)
            yield _event("f", (then.rank, 0), _micro(at), bp="e", **about)
        else:
            # The receiver has no later span: the arrow ends where the message arrives.
            arrival = (send.peer, 1), _micro(send.end)
            yield _event("X", *arrival, name=f"arrival from {send.rank}", cat="arrival", dur=0.0)
            yield _event("f", *arrival, bp="e", **about)


def _in_flight(rank: int, sends: list[Span]) -> Iterator[Event]:
    changes: dict[float, int] = {}
    for span in sends:
        for time, change in ((span.start, span.num_bytes), (span.end, -span.num_bytes)):
            changes[_micro(time)] = changes.get(_micro(time), 0) + change
    going = 0
    for time in sorted(changes):
        going += changes[time]
        yield {"ph": "C", "pid": rank, "ts": time, "name": "bytes in flight", "args": {"bytes": going}}


def _event(phase: str, thread: Thread, ts: float, **rest: Any) -> Event:
    return {"ph": phase, "pid": thread[0], "tid": thread[1], "ts": ts, **rest}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
