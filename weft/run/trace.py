"""Traces: what each rank of a real run did when, a file for each rank, read back as one Timeline.

    with weft.trace("out/trace"):     or the environment: WEFT_TRACE=out/trace
        weft.attention(q, k, v)
    timeline = read_trace("out/trace")

Reading needs no torch. While nothing is traced, a run pays for one look at `active`.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from weft.core.errors import InputError
from weft.core.files import read_bytes
from weft.core.timeline import Span, Timeline

if TYPE_CHECKING:
    from weft.run.bind import Bound, Frame

MAX_BYTES = 1 << 30
"""Of the file of a rank."""


class Watch(Protocol):
    """Who runs programs in place of their own `run`, to see how long each step takes."""

    def run(self, bound: Bound, frame: Frame) -> None: ...


active: Watch | None = None


def run(bound: Bound, frame: Frame) -> None:
    """One run of a program, watched if anybody watches; then what it was lent is given back."""
    if active is None:
        bound.run(frame)
    else:
        active.run(bound, frame)
    if frame.lender is not None:
        frame.lender.end()


@contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    global active
    before, active = active, watch
    try:
        yield
    finally:
        active = before


@contextmanager
def trace(directory: str | Path) -> Iterator[None]:
    """Write what this rank does to `directory`/rank3.jsonl; all ranks of the world enter together."""
    from weft.run.recorder import Tracer

    tracer = Tracer(Path(directory))
    tracer.meet_world()
    try:
        with watched_by(tracer):
            yield
    finally:
        tracer.close()


def follow_environment() -> None:
    """Trace all that this process runs if WEFT_TRACE names a directory."""
    global active
    if directory := os.environ.get("WEFT_TRACE"):
        from weft.run.recorder import Tracer

        active = tracer = Tracer(Path(directory))
        atexit.register(tracer.close)


def read_trace(directory: str | Path, call: int | None = None) -> Timeline:
    """All ranks on one clock that begins with the first span; with `call`, that run of each rank only.

    A rank that was killed may have left half a line, which is left out.
    """
    parts = [_read(path) for path in sorted(Path(directory).glob("rank*.jsonl"))]
    if not parts:
        raise InputError(f"{directory} holds no trace.", hint="Look for a folder with rank0.jsonl in it.")
    spans = [span for part in parts for span in part.spans if call in (None, span.call)]
    zero = min((span.start for span in spans), default=0.0)
    spans = [span._replace(start=span.start - zero, end=span.end - zero) for span in spans]
    first = max(parts, key=lambda part: len(part.clocks))
    return replace(first, ranks=max(part.ranks for part in parts), spans=tuple(_arrived(spans)))


def _read(path: Path) -> Timeline:
    text = read_bytes(path, limit=MAX_BYTES).decode("utf-8", "replace")
    return Timeline.from_jsonl(text[: text.rfind("\n") + 1])


def _arrived(spans: Iterable[Span]) -> Iterator[Span]:
    """Sends end when their receiver has stopped waiting for them, if that is before the sender knew."""
    spans = sorted(spans, key=lambda span: (span.start, span.end, span.rank))
    waited = {(s.call, s.op, s.peer, s.rank): s.end for s in spans if s.kind == "wait"}
    for span in spans:
        if span.kind == "send":
            there = waited.get((span.call, span.op, span.rank, span.peer), span.end)
            # Clocks of two machines agree only so far; nothing arrives before it was sent.
            span = span._replace(end=max(span.start, min(span.end, there)))
        yield span
