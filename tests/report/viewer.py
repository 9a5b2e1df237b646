"""What a viewer of Chrome traces cannot draw."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]
GRAIN = 2e-3  # microseconds: times are rounded to nanoseconds


def check(trace: dict[str, Any]) -> None:
    """Raise at the first thing that a viewer would draw wrong or leave out."""
    json.dumps(trace, allow_nan=False)
    events: list[Event] = trace["traceEvents"]
    for event in events:
        if event["ph"] != "M" and not (event["ts"] >= 0 and event.get("dur", 0) >= 0):
            raise _wrong("Time is negative", event)
        if event["ph"] == "C" and min(event["args"].values()) < 0:
            raise _wrong("A counter is negative", event)
    slices = _by(events, "X", lambda event: (event["pid"], event["tid"]))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for thread, spans in slices.items():
        if thread not in named:
            raise _wrong("The lane has no name", spans[0])
        _check_nested(spans)
    starts, ends = (_by(events, phase, lambda event: event["id"]) for phase in "sf")
    for number in starts.keys() | ends.keys():
        _check_flow(starts.get(number, []), ends.get(number, []), slices)


def _by(events: list[Event], phase: str, key: Callable[[Event], Any]) -> dict[Any, list[Event]]:
    found: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == phase:
            found[key(event)].append(event)
    return found


def _check_nested(spans: list[Event]) -> None:
    """Spans of one lane lie one after another, or one inside another."""
    open_ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while open_ends and open_ends[-1] <= span["ts"] + GRAIN:
            open_ends.pop()
        if open_ends and span["ts"] + span["dur"] > open_ends[-1] + GRAIN:
            raise _wrong("A span ends after the one it began in", span)
        open_ends.append(span["ts"] + span["dur"])


def _check_flow(starts: list[Event], ends: list[Event], slices: dict[Any, list[Event]]) -> None:
    if len(starts) != 1 or len(ends) != 1:
        raise _wrong("A flow needs one beginning and one end", *starts, *ends)
    if ends[0]["ts"] < starts[0]["ts"]:
        raise _wrong("A flow ends before it begins", *starts, *ends)
    for event in (*starts, *ends):
        spans = slices.get((event["pid"], event["tid"]), [])
        if not any(s["ts"] - GRAIN <= event["ts"] <= s["ts"] + s["dur"] + GRAIN for s in spans):
            raise _wrong("An end of a flow is in no span", event)


def _wrong(what: str, *events: Event) -> ValueError:
    shown = ", ".join(json.dumps(event, ensure_ascii=False) for event in events)
    return ValueError(f"{what}: {shown}.")
