"""Recorder: write the steps of programs as spans of a trace.

While a program runs only marks are taken; they become text when the run is over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from weft.core.codec import dumps
from weft.core.mask import AnyMask
from weft.core.schedule import Schedule
from weft.core.timeline import Span, Timeline
from weft.plan.explanation import Explanation
from weft.program.steps import Attention, Gradient, Post, Program, Step, View, Wait, span_name
from weft.run.bind import Bound, RunFrame
from weft.run.comm import Comm
from weft.run.comm.group import GroupComm
from weft.run.comm.onesided import OneSidedComm
from weft.run.measure.clocks import MarkedRuns, align
from weft.run.world import is_launched, machines, world_of

MAX_PENDING_STEPS = 1 << 14  # unwritten marks: about a megabyte
WRITE_SECONDS = 1.0  # a killed rank loses at most the spans of this time

Outline = list[tuple[Span, int, int]]
"""Spans without times, and the marks between which each lies."""
Texts = list[tuple[str, int, int]]
"""The same with each span as the beginning of its line in a file."""


def outline(program: Program, members: Sequence[int]) -> Outline:
    """Return the spans of a program's run. Mark i is taken before step i, the last one after the last step.

    The steps of a rank are on its compute lane, one after another. A send is on the comm lane from the start
    of its post until the transport reports that the buffer is free; gloo reports it only in a wait.
    """
    steps, me = program.steps, members[program.rank]
    freed = {
        (step.op, step.peer): at + 1 for at, step in enumerate(steps) if isinstance(step, Wait) and step.sent
    }
    spans: Outline = []
    for at, step in enumerate(steps):
        kind = _KINDS.get(type(step), "copy")
        peer = members[step.peer] if isinstance(step, Wait) else -1
        op = step.op if kind != "copy" or isinstance(step, Post) else -1
        span = Span(me, "compute", kind, span_name(step), 0.0, 0.0, op, peer)
        if isinstance(step, View):
            continue
        if spans and kind == "copy" and spans[-1][0] == span and spans[-1][2] == at:
            spans[-1] = (span, spans[-1][1], at + 1)  # copies in a row are one span
        else:
            spans.append((span, at, at + 1))
        for to, slot in step.sends if isinstance(step, Post) else ():
            send = Span(
                me, "comm", "send", span_name(step, to), 0.0, 0.0, step.op, members[to], slot.num_bytes
            )
            spans.append((send, at, freed.get((step.op, to), len(steps))))
    return spans


_KINDS: dict[type[Step], str] = {Attention: "attend", Gradient: "attend", Wait: "wait"}


class Recorder:
    """One rank's file, and the runs that are not in it yet."""

    def __init__(self, directory: Path, comm: Comm) -> None:
        self.rank = _members(comm)[comm.rank]
        self.ranks = dist.get_world_size() if isinstance(comm, GroupComm | OneSidedComm) else comm.size
        self.alignment = align(comm)
        directory.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            _clear(directory, self.ranks)
        self.file = (directory / f"rank{self.rank}.jsonl").open("w", encoding="utf-8")
        self.name, self.calls, self.pending_steps, self.written_at = "", 0, 0, time.monotonic()
        self.marked = MarkedRuns()
        self.texts: WeakKeyDictionary[Program, Texts] = WeakKeyDictionary()
        self.saved = directory / "schedule.json"
        self.schedules: dict[str, Schedule] = {}

    def run(self, bound: Bound, frame: RunFrame) -> None:
        program, schedule = bound.program, bound.schedule
        if program not in self.texts:
            spans = outline(program, _members(frame.comm))
            self.texts[program] = [(_beginning(span), start, end) for span, start, end in spans]
            self.name = self.name or schedule.name
            if not schedule.backward:
                self.schedules[schedule.digest] = schedule
        self.pending_steps += len(program.steps)
        self.marked.run(bound, frame)
        is_due = time.monotonic() - self.written_at > WRITE_SECONDS
        if is_due or self.pending_steps > MAX_PENDING_STEPS:
            self.write()

    def write(self) -> None:
        """Write all runs to the file."""
        lines = [] if self.file.tell() else [self._head()]
        for call, (bound, _, marks) in enumerate(self.marked.take(), self.calls):
            # Nanoseconds with an exponent are seconds to JSON, and whole numbers are quickly written.
            times = [ns - self.alignment.shift for ns in marks]
            last = len(times) - 1  # where a run that failed ended
            lines += [
                f'{text}, "call": {call}, "start": {times[start]}e-9, "end": {times[min(end, last)]}e-9}}\n'
                for text, start, end in self.texts[bound.program]
                if start < last
            ]
            self.calls = call + 1
        self.file.write("".join(lines))
        self.file.flush()
        self.marked.rebase()
        self.pending_steps, self.written_at = 0, time.monotonic()

    def close(self) -> None:
        self.write()
        self.file.close()
        self._save_schedule()

    def _save_schedule(self) -> None:
        """Write the schedule beside the trace, for reports; of several, none would fit all calls."""
        if self.rank:
            return
        self.saved.unlink(missing_ok=True)
        if len(self.schedules) == 1:
            (only,) = self.schedules.values()
            # A schedule for any mask does not have the loads of those that ran.
            if only.problem.ranks == self.ranks and not isinstance(only.mask, AnyMask | None):
                self.saved.write_text(dumps(only), encoding="utf-8")

    def _head(self) -> str:
        clocks = tuple((ahead / 1e9, unsure / 1e9) for ahead, unsure in self.alignment.clocks)
        return Timeline(
            self.name, self.ranks, (), measured=True, machines=machines(), clocks=clocks
        ).to_jsonl()


class Tracer:
    """The observer of `weft.trace`: a recorder for each rank, usually one; tests have ranks as threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.recorders: dict[int, Recorder] = {}

    def align_world(self) -> None:
        """Align with all ranks now if there is a world; else the first run does, with its group."""
        if dist.is_initialized() or is_launched():
            self._recorder(world_of(None, 60.0).comm)

    def run(self, bound: Bound, frame: RunFrame) -> None:
        self._recorder(frame.comm).run(bound, frame)

    def save_plans(self, plans: Explanation) -> None:
        """Write the plans of a run by layer beside its trace, for reports. For rank 0."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "plans.json").write_text(plans.json(), encoding="utf-8")

    def close(self) -> None:
        for recorder in self.recorders.values():
            recorder.close()

    def _recorder(self, comm: Comm) -> Recorder:
        rank = _members(comm)[comm.rank]
        if rank not in self.recorders:
            self.recorders[rank] = Recorder(self.directory, comm)
        return self.recorders[rank]


def _members(comm: Comm) -> Sequence[int]:
    """Return the ranks of a group as the world numbers them."""
    if isinstance(comm, GroupComm | OneSidedComm):
        return dist.get_process_group_ranks(comm.group)
    return range(comm.size)


def _clear(directory: Path, ranks: int) -> None:
    """Remove files of ranks that only an earlier trace had: they would be read as part of this one."""
    for path in directory.glob("rank*.jsonl"):
        number = path.stem.removeprefix("rank")
        if number.isdecimal() and int(number) >= ranks:
            path.unlink()


def _beginning(span: Span) -> str:
    fields = {name: each for name, each in span._asdict().items() if name not in ("call", "start", "end")}
    return json.dumps(fields)[:-1]
