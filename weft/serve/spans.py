"""Spans: record what each rank of a segment did in its last attention call, for the page to draw."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, replace

import torch.distributed as dist

from weft.run.agree import gather_text
from weft.run.comm import Comm
from weft.run.measure.clocks import align
from weft.run.measure.meter import Meter
from weft.run.measure.recorder import outline
from weft.run.world import machines
from weft.serve.messages import AttentionSpan

LANES = {"send": "send", "wait": "wait", "barrier": "wait"}
"""By kind of step; any other is in the lane `compute`."""
MAX_SPANS = 100
"""Of one rank: a page shows no more."""


class Spans(Meter):
    """A meter that can draw the last attention call that it measured."""

    def timeline(self, comm: Comm) -> tuple[str, tuple[AttentionSpan, ...]] | None:
        """Return the name of that call and its spans on its ranks. All ranks must call this together."""
        spans = [astuple(span) for span in self._spans(align(comm).shift if machines() > 1 else 0)]
        texts = gather_text(comm, json.dumps(spans))
        # Where guidance takes two halves of the ranks, those of the other half had a call of their own.
        members = self._members()
        gathered = [AttentionSpan(*row) for text in texts for row in json.loads(text) if row[0] in members]
        if not gathered or self.last is None:
            return None
        zero = min(span.start for span in gathered)
        return self.last[0].schedule.name if len(members) > 1 else "alone", tuple(
            replace(span, start=round((span.start - zero) / 1e9, 7), end=round((span.end - zero) / 1e9, 7))
            for span in gathered
        )

    def _spans(self, shift: int) -> list[AttentionSpan]:
        """Return the spans of this rank, in nanoseconds."""
        if self.last is None:
            return []
        bound, _, marks = self.last
        times = [time - shift for time in marks]
        return [
            AttentionSpan(span.rank, LANES.get(span.kind, "compute"), span.name, times[start], times[end])
            for span, start, end in outline(bound.program, self._members())[:MAX_SPANS]
        ]

    def _members(self) -> Sequence[int]:
        """Return the ranks of that call."""
        if self.last is None:
            return ()
        comm = self.last[1]
        group = getattr(comm, "group", None)
        return range(comm.size) if group is None else dist.get_process_group_ranks(group)
