"""Recorder: runs programs with a mark of time after every step, and writes what lies between as spans.

While a program runs only marks are taken; spans become text when the run is over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from weft.core.codec import dumps
from weft.core.mask import AnyMask
from weft.core.schedule import Schedule
from weft.core.timeline import Span, Timeline
from weft.plan.explanation import Explanation
from weft.program.steps import Attention, Gradient, Post, Program, View, Wait, span_name
from weft.run.bind import Bound, Frame
from weft.run.clocks import Clock, align, clock_of
from weft.run.comm import Comm
from weft.run.comm.group import GroupComm
from weft.run.comm.onesided import OneSidedComm
from weft.run.streams import is_capturing
from weft.run.world import is_launched, machines, world_of

HELD = 1 << 14  # steps whose marks wait to be written: about a megabyte
SECONDS = 1.0  # of spans that a rank may lose if it is killed

Outline = list[tuple[Span, int, int]]
"""Spans without times, and the marks between which each lies."""
Texts = list[tuple[str, int, int]]
"""The same with each span as the beginning of its line in a file."""


def outline(program: Program, members: Sequence[int]) -> Outline:
    """What a run of a program shows. Mark i is taken before step i, the last one after the last step.

    Everything a rank does itself is on its compute lane, one thing after another. A send lies on the
    comm lane from the beginning of its post until the transport has told the sender that the buffer is
    free; gloo tells nothing before it is asked.
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


_KINDS = {Attention: "attend", Gradient: "attend", Wait: "wait"}


def run_marked(bound: Bound, frame: Frame, clock: Clock, marks: list[Any]) -> None:
    """`Bound.run` with a mark before and after every step; one that fails leaves its last mark too."""
    if is_capturing(frame.device):  # marks in a CUDA graph have no time
        bound.run(frame)
        return
    mark = clock.mark
    marks.append(mark())
    try:
        for call in bound.calls:
            call(frame)
            marks.append(mark())
    except BaseException:
        marks.append(mark())
        raise


class Recorder:
    """One rank's file, and what is not in it yet."""

    def __init__(self, directory: Path, comm: Comm) -> None:
        self.rank = _members(comm)[comm.rank]
        self.ranks = dist.get_world_size() if isinstance(comm, GroupComm | OneSidedComm) else comm.size
        self.alignment = align(comm)
        directory.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            _clear(directory, self.ranks)
        self.file = (directory / f"rank{self.rank}.jsonl").open("w", encoding="utf-8")
        self.name, self.calls, self.held, self.written = "", 0, 0, time.monotonic()
        self.pending: list[tuple[int, Texts, list[Any], Clock]] = []
        self.texts: WeakKeyDictionary[Program, Texts] = WeakKeyDictionary()
        self.saved = directory / "schedule.json"
        self.schedules: dict[str, Schedule] = {}
        self.clocks: dict[torch.device, Clock] = {}

    def run(self, bound: Bound, frame: Frame) -> None:
        program, schedule = bound.program, bound.schedule
        texts = self.texts.get(program)
        if texts is None:
            spans = outline(program, _members(frame.comm))
            texts = self.texts[program] = [(_beginning(span), start, end) for span, start, end in spans]
            self.name = self.name or schedule.name
            if not schedule.backward:
                self.schedules[schedule.digest] = schedule
        marks: list[Any] = []
        if frame.device not in self.clocks:
            self.clocks[frame.device] = clock_of(frame.device)
        clock = self.clocks[frame.device]
        self.pending.append((self.calls, texts, marks, clock))
        self.calls += 1
        self.held += len(program.steps)
        run_marked(bound, frame, clock, marks)
        if self.held > HELD or time.monotonic() - self.written > SECONDS:
            self.write()

    def write(self) -> None:
        """Put everything that has been run into the file."""
        lines = [] if self.file.tell() else [self._head()]
        for call, texts, marks, clock in self.pending:
            # Nanoseconds with an exponent are seconds to JSON, and whole numbers are quickly written.
            times = [ns - self.alignment.shift for ns in clock.nanoseconds(marks)]
            last = len(times) - 1  # further than this a run that failed did not come
            lines += [
                f'{text}, "call": {call}, "start": {times[start]}e-9, "end": {times[min(end, last)]}e-9}}\n'
                for text, start, end in texts
                if start < last
            ]
        self.file.write("".join(lines))
        self.file.flush()
        self.pending.clear()
        for clock in self.clocks.values():
            clock.begin()
        self.held, self.written = 0, time.monotonic()

    def close(self) -> None:
        self.write()
        self.file.close()
        self._save_schedule()

    def _save_schedule(self) -> None:
        """Beside the trace, a report has masks and loads of it too; of several, none would fit all calls."""
        if self.rank:
            return
        self.saved.unlink(missing_ok=True)
        if len(self.schedules) == 1:
            (only,) = self.schedules.values()
            # One for any mask says nothing of the loads of those that ran.
            if only.problem.ranks == self.ranks and not isinstance(only.mask, AnyMask | None):
                self.saved.write_text(dumps(only), encoding="utf-8")

    def _head(self) -> str:
        clocks = tuple((ahead / 1e9, unsure / 1e9) for ahead, unsure in self.alignment.clocks)
        return Timeline(
            self.name, self.ranks, (), measured=True, machines=machines(), clocks=clocks
        ).to_jsonl()


class Tracer:
    """Recorders by rank: one, unless the ranks are threads of this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.recorders: dict[int, Recorder] = {}

    def meet_world(self) -> None:
        """Align with all ranks at once where there is a world; else the first run does, with its own."""
        if dist.is_initialized() or is_launched():
            self._recorder(world_of(None, 60.0).comm)

    def run(self, bound: Bound, frame: Frame) -> None:
        self._recorder(frame.comm).run(bound, frame)

    def keep_plans(self, plans: Explanation) -> None:
        """Write the plans of a run by layer beside its trace, for reports; rank 0 has them."""
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
    """The ranks of a group as the world counts them."""
    if isinstance(comm, GroupComm | OneSidedComm):
        return dist.get_process_group_ranks(comm.group)
    return range(comm.size)


def _clear(directory: Path, ranks: int) -> None:
    """Ranks that an earlier trace had and this one has not would be read as if they were of this one."""
    for path in directory.glob("rank*.jsonl"):
        number = path.stem.removeprefix("rank")
        if number.isdecimal() and int(number) >= ranks:
            path.unlink()


def _beginning(span: Span) -> str:
    fields = span._asdict()
    for later in ("call", "start", "end"):
        del fields[later]
    return json.dumps(fields)[:-1]
