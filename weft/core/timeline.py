"""Timeline: spans of what every rank does, simulated or measured, in one format.

A rank has two lanes: it computes, and it sends. A send is one span on the lane of the sender, from the
moment its first byte leaves until its last byte has arrived; the receiver is its peer. Waiting for data
that has not arrived is a span of its own, on the lane that waits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_type_hints

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.indices import IntArray, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Intervals = list[tuple[float, float]]

MAX_RANKS, MAX_BYTES, MAX_SECONDS = 4096, 1 << 50, 1e12
"""Limits of a file: a report draws all ranks, adds bytes in 64 bits, and divides times by each other."""


class Span(NamedTuple):
    """One activity on one lane of one rank; times are seconds since the timeline's zero."""

    rank: int
    lane: str
    """compute or comm."""
    kind: str
    """attend, copy, send, wait, barrier, or launch (the host has not launched everything yet)."""
    name: str
    start: float
    end: float
    op: int = -1
    """The operation of the schedule it belongs to."""
    peer: int = -1
    """The rank that a send goes to, or that a wait waits for."""
    num_bytes: int = 0
    call: int = 0
    """Which run it belongs to, where a rank runs several attentions one after another."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """All spans of all ranks of one run."""

    name: str
    ranks: int
    spans: tuple[Span, ...] = ()
    measured: bool = False
    topology: str = ""
    machines: int = 1
    memory: tuple[int, ...] = ()
    """Peak bytes of each rank, if known."""
    clocks: tuple[tuple[float, float], ...] = ()
    """By rank, the seconds that its clock was ahead of rank 0's and their error, if measured."""

    def __post_init__(self) -> None:
        if len(self.memory) not in (0, self.ranks):
            raise InputError(f"memory has {len(self.memory):,} values for {self.ranks:,} ranks.")

    @cached_property
    def seconds(self) -> float:
        """From zero until the last span ends."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def computing(self) -> npt.NDArray[np.float64]:
        """Seconds that each rank attends or copies."""
        return self._sums(("attend", "copy"))

    @cached_property
    def waiting(self) -> npt.NDArray[np.float64]:
        """Seconds that each rank's compute lane waits for data or at a barrier."""
        return self._sums(("wait", "barrier"))

    @property
    def exposed(self) -> float:
        return exposed(self.waiting.tolist(), self.seconds)

    @property
    def idle(self) -> npt.NDArray[np.float64]:
        """Seconds in which a rank neither computes nor waits: before its first or after its last step."""
        return np.maximum(0.0, self.seconds - self.computing - self.waiting)

    @cached_property
    def overlap(self) -> float:
        """The share of all sending time during which the sender computes."""
        sent = hidden = 0.0
        for rank in range(self.ranks):
            busy = joined((s.start, s.end) for s in self.of(rank) if s.kind in ("attend", "copy"))
            going = joined((s.start, s.end) for s in self.of(rank) if s.kind == "send")
            sent += sum(end - start for start, end in going)
            hidden += _common(busy, going)
        return hidden / sent if sent else 1.0

    @cached_property
    def imbalance(self) -> float:
        mean = float(self.computing.mean()) if self.ranks else 0.0
        return float(self.computing.max()) / mean if mean else 1.0

    @property
    def slowest(self) -> int:
        """The rank whose last span ends last."""
        ends = np.zeros(self.ranks)
        for span in self.spans:
            ends[span.rank] = max(ends[span.rank], span.end)
        return int(ends.argmax())

    @cached_property
    def traffic(self) -> IntArray:
        """Bytes from row to column."""
        traffic = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        for span in self.spans:
            if span.kind == "send":
                traffic[span.rank, span.peer] += span.num_bytes
        return traffic

    @cached_property
    def _by_rank(self) -> tuple[tuple[Span, ...], ...]:
        by_rank: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            by_rank[span.rank].append(span)
        return tuple(tuple(sorted(spans, key=lambda s: (s.start, s.end))) for spans in by_rank)

    def of(self, rank: int) -> tuple[Span, ...]:
        """A rank's spans in the order of their starts."""
        return self._by_rank[rank]

    def _sums(self, kinds: tuple[str, ...]) -> npt.NDArray[np.float64]:
        seconds = np.zeros(self.ranks)
        for span in self.spans:
            if span.kind in kinds and span.lane == "compute":
                seconds[span.rank] += span.end - span.start
        return seconds

    def to_jsonl(self) -> str:
        """Return a line for the timeline, then one for each span: what runs write, rank by rank."""
        import json

        head = {name: field for name, field in asdict(self).items() if name != "spans"}
        return "\n".join([json.dumps(head), *(json.dumps(span._asdict()) for span in self.spans)]) + "\n"

    @staticmethod
    def from_jsonl(text: str) -> Timeline:
        """Read what `to_jsonl` writes, from any source; raise an InputError if it is not valid."""
        from weft.core import tables
        from weft.core.files import parse_json

        try:
            lines = ((n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip())
            head, *spans = ((n, parse_json(line, f"line {n}")) for n, line in lines)
            timeline = tables.read(Timeline, head[1], "line 1")
            ranks, machines = timeline.ranks, timeline.machines
            if not 0 <= ranks <= MAX_RANKS or not 1 <= machines <= MAX_RANKS:
                raise InputError(
                    f"ranks and machines must be ≤ {MAX_RANKS:,}, got {ranks:,} and {machines:,}."
                )
            clocks = tuple((ahead, error) for ahead, error in timeline.clocks)
            return replace(
                timeline, clocks=clocks, spans=tuple(_span(span, f"line {n}", ranks) for n, span in spans)
            )
        except ValueError as error:  # also of InputErrors, and of a text without lines
            raise InputError(
                f"This is not a timeline: {error}", hint="Pass a .jsonl that weft wrote."
            ) from None


def exposed(waiting: Sequence[float], seconds: float) -> float:
    """Return the share of the time in which the mean rank waits for data or at a barrier.

    Plans, simulations, traces, reports, `generate` and `serve` mean this by exposed communication. What a
    rank waits for may be a link or a slower rank.
    """
    return min(1.0, sum(waiting) / len(waiting) / seconds) if waiting and seconds > 0 else 0.0


@cache
def _checks() -> dict[str, Callable[[Any], bool]]:
    from weft.core.tables import check_of

    return {name: check_of(kind) for name, kind in get_type_hints(Span).items()}


def _span(table: Any, line: str, ranks: int) -> Span:
    from weft.core.tables import shown

    if not isinstance(table, dict):
        raise InputError(f"{line} must be the object of a span, got {shown(table)}.")
    checks, fields = _checks(), cast("dict[str, Any]", table)
    for name, value in fields.items():
        if name not in checks or not checks[name](value):
            raise InputError(f"{line}: {name[:80]} = {shown(value)}.")
    try:
        span = Span(**fields)
    except TypeError as error:
        raise InputError(f"{line}: {error}.") from None
    if not (0 <= span.rank < ranks and -1 <= span.peer < ranks and 0 <= span.num_bytes <= MAX_BYTES):
        raise InputError(f"{line}: rank {span.rank}, peer {span.peer} and {span.num_bytes} bytes.")
    if not (abs(span.start) <= MAX_SECONDS and abs(span.end) <= MAX_SECONDS):
        raise InputError(f"{line}: times must be within ±{MAX_SECONDS:g} s, got {span.start} to {span.end}.")
    return span


def _common(first: Intervals, second: Intervals) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        total += max(0.0, end - start)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
