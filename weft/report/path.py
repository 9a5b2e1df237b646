"""The critical path of a timeline: the chain of spans, each of which began when the one before it ended."""

from __future__ import annotations

from bisect import bisect_right

from weft.core.timeline import Span, Timeline

SLACK = 1e-3
"""Measured clocks of two ranks agree to about this share of the whole time."""


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """Walk back from the span that ends last; replace a wait by the send it waited for.

    Ties go to computing over sending, then to the lower rank: the path is the same on every machine.
    """
    busy = [s for s in timeline.spans if s.kind not in ("wait", "barrier")]
    if not busy:
        return ()
    slack = SLACK * timeline.seconds if timeline.measured else 1e-9 * timeline.seconds
    before = _Before(timeline.ranks, busy)
    current = max(busy, key=lambda s: (s.end, s.lane == "compute", -s.rank))
    path = [current]
    # Starts only decrease, and a span of zero length is visited once: the walk ends.
    while current.start > slack and (previous := before.best(current, slack, set(path))):
        current = previous
        path.append(current)
    return tuple(reversed(path))


class _Before:
    """The spans that can delay a rank: its own, and sends to it, sorted by their ends."""

    def __init__(self, ranks: int, spans: list[Span]) -> None:
        self._ends: list[list[tuple[float, int, Span]]] = [[] for _ in range(ranks)]
        for place, span in enumerate(spans):
            self._ends[span.rank].append((span.end, place, span))
            if span.kind == "send" and span.peer not in (span.rank, -1):
                self._ends[span.peer].append((span.end, place, span))
        for ends in self._ends:
            ends.sort(key=lambda item: item[:2])
        self._times = [[end for end, _, _ in ends] for ends in self._ends]

    def best(self, current: Span, slack: float, taken: set[Span]) -> Span | None:
        """Return the span that ended last before `current` began."""
        place = bisect_right(self._times[current.rank], current.start + slack)
        chosen: Span | None = None
        for end, _, span in reversed(self._ends[current.rank][:place]):
            if chosen and end < chosen.end - slack:
                break
            held_up = span.lane == current.lane or span.lane == "compute" or span.peer == current.rank
            if not held_up or span in taken or span.start >= current.end:
                continue  # computing never waits for the rank's own sends
            if chosen is None or _rank(span) > _rank(chosen):
                chosen = span
        return chosen


def _rank(span: Span) -> tuple[bool, int]:
    return span.lane == "compute", -span.rank
