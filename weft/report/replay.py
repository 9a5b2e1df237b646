"""Replay: how long a timeline would take if some of its spans were shorter.

A span begins when the span before it on its lane has ended and the messages that it waits for have arrived.
So waiting is not a length of its own: it follows from what the message was waiting for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping

from weft.core.timeline import Span, Timeline

SLACK = 1e-3
"""Measured clocks of two ranks agree to about this share of the whole time."""
WAITS = ("wait", "barrier")
START = -1
"""Predecessor of what is first on a rank."""


class Replay:
    """The spans of one call with what each of them begins after; `spans` are in the order of a replay."""

    def __init__(self, timeline: Timeline) -> None:
        self.slack = (SLACK if timeline.measured else 1e-9) * timeline.seconds
        # A wait is over when its message is there; what begins at the same moment comes after it.
        busy = (s for s in timeline.spans if s.kind != "launch")
        self.spans = sorted(busy, key=lambda s: (s.end, 0) if s.kind in WAITS else (s.start, 1))
        self.lanes: list[list[int]] = [[] for _ in range(timeline.ranks)]
        """Indices of the spans on the compute lane of each rank."""
        self.first = [0.0] * timeline.ranks
        """When each rank does something for the first time."""
        for i, span in enumerate(self.spans):
            if span.lane == "compute":
                self.lanes[span.rank].append(i)
        for span in sorted(self.spans, key=lambda s: s.start, reverse=True):
            self.first[span.rank] = span.start
        self._edges = [
            sorted({first, *(self.spans[i].start for i in lane), *(self.spans[i].end for i in lane)})
            for first, lane in zip(self.first, self.lanes, strict=True)
        ]
        self._ends = [[self.spans[i].end for i in lane] for lane in self.lanes]
        self.after = [START] * len(self.spans)
        """The span on whose end each span follows."""
        self.by = [span.rank for span in self.spans]
        """The rank whose program begins each span."""
        self.arrivals: list[list[int]] = [[] for _ in self.spans]
        """What else must have ended before a span begins, or before a wait ends."""
        self._link()
        self.gaps = [span.start - self._end_before(i) for i, span in enumerate(self.spans)]
        """Seconds between the end of what a span follows on and its start."""
        self.lengths = [self._length(i) for i in range(len(self.spans))]
        self.seconds = max(self.ends(), default=0.0)

    def ends(
        self,
        lengths: Mapping[int, float] | None = None,
        gaps: Mapping[int, float] | None = None,
        first: Mapping[int, float] | None = None,
    ) -> list[float]:
        """Return when each span ends if some lengths, gaps, and first moments of ranks are others."""
        length, gap, begin = list(self.lengths), list(self.gaps), list(self.first)
        for values, changes in ((length, lengths), (gap, gaps), (begin, first)):
            for key, value in (changes or {}).items():
                values[key] = value
        ends: list[float] = [span.end for span in self.spans]
        for i in range(len(ends)):
            start = (begin[self.by[i]] if self.after[i] == START else ends[self.after[i]]) + gap[i]
            for j in self.arrivals[i]:
                start = max(start, ends[j])
            ends[i] = start + length[i]
        return ends

    def path(self) -> tuple[Span, ...]:
        """Return the critical path: what each span, from the last one back, began after.

        Waits are left out: what they waited for is on the path. Of ties, computing is taken before sending.
        """
        ends = self.ends()
        path: list[Span] = []
        busy = [i for i, span in enumerate(self.spans) if span.kind not in WAITS]
        at = max(
            busy, key=lambda i: (ends[i], self.spans[i].lane == "compute", -self.spans[i].rank), default=START
        )
        while at != START and len(path) <= len(ends):
            if self.spans[at].kind not in WAITS:
                path.append(self.spans[at])
            own, place = self.after[at], at
            begin = ends[own] + self.gaps[at] if own != START else self.first[self.by[at]]
            late = [i for i in self.arrivals[at] if ends[i] > begin + self.slack]
            at = max(late, key=lambda i: ends[i], default=own)
            if at >= place and ends[at] > self.spans[place].end:  # never forward in time
                break
        return tuple(reversed(path))

    def without(self, **changes: Mapping[int, float]) -> float:
        """Return the seconds that some changes save."""
        return self.seconds - max(self.ends(**changes), default=0.0)

    def _link(self) -> None:
        sends: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for lane in self.lanes:
            for before, i in zip(lane, lane[1:], strict=False):
                self.after[i] = before
        for i, span in enumerate(self.spans):
            if span.kind == "send":
                sends[span.op, span.rank, span.peer].append(i)
                self._anchor(i)
        waited: set[int] = set()
        for i, span in enumerate(self.spans):
            if span.kind == "wait" and (message := self._message(span, sends)) is not None:
                self.arrivals[i].append(message)
                waited.add(message)
        # A message that is not waited for arrived before something else began that may need it.
        for messages in sends.values():
            for i in messages:
                if i not in waited and (then := self._next(self.spans[i])) is not None:
                    self.arrivals[then].append(i)
        self._link_barriers()

    def _anchor(self, i: int) -> None:
        """Let a send follow the last span before it in its sender's program.

        Of a message that both ends must post, the later one decides.
        """
        send = self.spans[i]
        if not self._is_edge(send.rank, send.start) and self._is_edge(send.peer, send.start):
            self.by[i] = send.peer
        self.after[i] = self._last(self.by[i], send.start, send.op)

    def _is_edge(self, rank: int, time: float) -> bool:
        """Whether a rank begins or ends something at a time."""
        edges = self._edges[rank]
        place = bisect_left(edges, time - self.slack)
        return place < len(edges) and edges[place] <= time + self.slack

    def _last(self, rank: int, time: float, op: int) -> int:
        """Return the last span of a rank that ended by a time, and belongs to operations up to `op`."""
        place = bisect_right(self._ends[rank], time + self.slack)
        for i in reversed(self.lanes[rank][:place]):
            if self.spans[i].op < op + (self.spans[i].kind != "wait"):
                return i
        return START

    def _message(self, wait: Span, sends: Mapping[tuple[int, int, int], list[int]]) -> int | None:
        """Return the message whose arrival ended a wait; a wait for a sent buffer, that of its own."""
        both = (sends.get((wait.op, *ends), []) for ends in ((wait.peer, wait.rank), (wait.rank, wait.peer)))
        near = [i for messages in both for i in messages if self.spans[i].end <= wait.end + self.slack]
        return max(near, key=lambda i: self.spans[i].end, default=None)

    def _next(self, send: Span) -> int | None:
        lane = self.lanes[send.peer]
        place = bisect_left(lane, send.end - self.slack, key=lambda i: self.spans[i].start)
        for i in lane[place:]:
            if self.spans[i].kind not in WAITS and self.spans[i].op > send.op:
                return i
        return None

    def _link_barriers(self) -> None:
        meets: dict[int, list[int]] = defaultdict(list)
        for i, span in enumerate(self.spans):
            if span.kind == "barrier":
                meets[span.op].append(i)
        for waits in meets.values():
            end = max(self.spans[i].end for i in waits)
            before = [self.after[i] for i in waits if self.after[i] != START]
            for rank in set(range(len(self.lanes))) - {self.spans[i].rank for i in waits}:
                place = bisect_right(self._ends[rank], end + self.slack)
                before += self.lanes[rank][place - 1 : place]
                waits += self.lanes[rank][place : place + 1]
            for i in waits:
                self.arrivals[i] += before

    def _end_before(self, i: int) -> float:
        return self.first[self.by[i]] if self.after[i] == START else self.spans[self.after[i]].end

    def _length(self, i: int) -> float:
        """Return how long a span takes by itself: of a wait, what is left of it when its message is there."""
        span = self.spans[i]
        if span.kind not in WAITS or not self.arrivals[i]:
            return span.seconds
        return span.end - max(span.start, *(self.spans[j].end for j in self.arrivals[i]))
