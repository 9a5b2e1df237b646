"""Spans: what each rank of a segment did in its last attention, for the page to draw."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from weft.run.clocks import align
from weft.run.comm import Comm
from weft.run.meter import Meter
from weft.run.recorder import outline
from weft.run.world import machines

LANES = {"send": "send", "wait": "wait", "barrier": "wait"}
"""By kind; all else is compute."""
MOST = 100
"""Spans of one rank: a page shows no more."""


class Spans(Meter):
    """A meter that draws the last attention that it marked."""

    def timeline(self, comm: Comm) -> dict[str, Any] | None:
        """That attention on all ranks, who call this together: seconds from its beginning, and its name."""
        everyone = _texts(comm, json.dumps(self._own(align(comm).shift if machines() > 1 else 0)))
        spans = [span for text in everyone for span in json.loads(text)]
        if not spans or self.last is None:
            return None
        zero = min(span["start"] for span in spans)
        for span in spans:
            for end in ("start", "end"):
                span[end] = round((span[end] - zero) / 1e9, 7)
        return {"spans": spans, "label": self.last[0].schedule.name}

    def _own(self, shift: int) -> list[dict[str, Any]]:
        """In nanoseconds."""
        if self.last is None:
            return []
        bound, comm, marks = self.last
        group = getattr(comm, "group", None)
        members = range(comm.size) if group is None else dist.get_process_group_ranks(group)
        times = [time - shift for time in marks]
        return [
            {"rank": span.rank, "lane": LANES.get(span.kind, "compute"), "name": span.name,
             "start": times[start], "end": times[end]}
            for span, start, end in outline(bound.program, members)[:MOST]
        ]  # fmt: skip


def _texts(comm: Comm, text: str) -> list[str]:
    """Everyone's text."""
    data = list(text.encode())
    lengths = [row[0] for row in comm.gather_numbers([len(data)])]
    rows = comm.gather_numbers(data + [0] * (max(lengths) - len(data)))
    return [bytes(row[:length]).decode() for row, length in zip(rows, lengths, strict=True)]
