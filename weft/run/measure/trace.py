"""Trace: record when each rank ran each step, in one file per rank, and read them as one Timeline.

    with weft.trace("out/trace"):     or the environment: WEFT_TRACE=out/trace
        weft.attention(q, k, v)
    timeline = read_trace("out/trace")

Reading needs no torch. Without tracing, a run pays for one check of `active`.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from weft.core.errors import InputError
from weft.core.files import read_bytes
from weft.core.timeline import Span, Timeline

if TYPE_CHECKING:
    from weft.run.bind import Bound, RunFrame

MAX_BYTES = 1 << 30
"""Of the file of a rank."""


class ProgramObserver(Protocol):
    """Runs programs in place of `Bound.run`, to measure their steps."""

    def run(self, bound: Bound, frame: RunFrame) -> None: ...


active: ProgramObserver | None = None


def run(bound: Bound, frame: RunFrame) -> None:
    """Run a program, by the active observer if there is one, and return its lent memory."""
    if active is None:
        bound.run(frame)
    else:
        active.run(bound, frame)
    if frame.lender is not None:
        frame.lender.end()


@contextmanager
def observed_by(observer: ProgramObserver) -> Generator[None]:
    global active
    previous, active = active, observer
    try:
        yield
    finally:
        active = previous


@contextmanager
def trace(directory: str | Path) -> Generator[None]:
    """Record what this rank runs in the block, in a file of its own: `directory`/rank3.jsonl for rank 3.

    All ranks of the world enter together, to set their clocks. `weft report DIRECTORY` draws the recording,
    and `weft.run.measure.trace.read_trace` reads it. $WEFT_TRACE names a directory for a whole process.

    >>> q = torch.zeros(1, 2, 8, 4)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with trace(directory):
    ...         out = weft.attention(q, q, q)
    ...     read_trace(directory).ranks
    1
    """
    from weft.run.measure.recorder import Tracer

    tracer = Tracer(Path(directory))
    tracer.align_world()
    try:
        with observed_by(tracer):
            yield
    finally:
        tracer.close()


def trace_from_environment() -> None:
    """Trace all that this process runs if WEFT_TRACE names a directory."""
    global active
    if directory := os.environ.get("WEFT_TRACE"):
        from weft.run.measure.recorder import Tracer

        active = tracer = Tracer(Path(directory))
        atexit.register(tracer.close)


def read_trace(directory: str | Path, call: int | None = None) -> Timeline:
    """Return all ranks on one clock that begins with the first span; with `call`, only that run.

    A rank that was killed may have left half a line, which is dropped.
    """
    timelines = [_read(path) for path in sorted(Path(directory).glob("rank*.jsonl"))]
    if not timelines:
        raise InputError(f"{directory} holds no trace.", hint="Look for a folder with rank0.jsonl in it.")
    spans = [span for each in timelines for span in each.spans if call in (None, span.call)]
    zero = min((span.start for span in spans), default=0.0)
    spans = [span._replace(start=span.start - zero, end=span.end - zero) for span in spans]
    first = max(timelines, key=lambda each: len(each.clocks))
    return replace(first, ranks=max(each.ranks for each in timelines), spans=tuple(_arrived(spans)))


def _read(path: Path) -> Timeline:
    text = read_bytes(path, limit=MAX_BYTES).decode("utf-8", "replace")
    return Timeline.from_jsonl(text[: text.rfind("\n") + 1])


def _arrived(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans whose sends end with the receiver's wait, if that is before the sender's own end."""
    spans = sorted(spans, key=lambda span: (span.start, span.end, span.rank))
    waited = {(s.call, s.op, s.peer, s.rank): s.end for s in spans if s.kind == "wait"}
    for span in spans:
        if span.kind == "send":
            arrival = waited.get((span.call, span.op, span.rank, span.peer), span.end)
            # Clocks of two machines agree only so far; no message arrives before it is sent.
            span = span._replace(end=max(span.start, min(span.end, arrival)))
        yield span
