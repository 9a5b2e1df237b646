"""Simulate: run a schedule on a topology that we may not have, event by event.

Every rank walks its program (see `programs`); what takes time is a task with so much left to do and a
speed. Speeds change when tasks that share something come or go: the links of a device, the network of
a machine, its cores. Shares are equal; what a task cannot use of its share is lost to the others.

Devices that are processes on a CPU share its cores by lanes: a rank that computes is one, a rank that
sends is another, and all lanes are equally fast.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from heapq import heappop, heappush

from weft.core.errors import InputError
from weft.core.schedule import Schedule
from weft.core.timeline import Span, Timeline
from weft.core.topology import Topology
from weft.schedule.measure import attend_works, peak_memory
from weft.simulate.programs import Meet, Message, Post, Programmer, Step, Wait, Work
from weft.simulate.sharing import Network, Task

MEASURED = 64  # Ranks up to which memory is walked through: the walk visits each operation for each rank.


def simulate(
    schedule: Schedule,
    topology: Topology,
    works: dict[int, int] | None = None,
    *,
    seconds: dict[int, float] | None = None,
    memory: bool = True,
) -> Timeline:
    """What every rank does when.

    `works` are those of `schedule.measure.attend_works`, if they are known already; `seconds`, by
    operation, are what each Attend takes, if that has been measured. Without `memory` it is left out.
    """
    ranks = schedule.problem.ranks
    if topology.ranks != ranks:
        raise InputError(
            f"The topology {topology.name} has {topology.ranks} ranks, the schedule {ranks}.",
            hint="Give as many machines × devices as there are ranks.",
        )
    if works is None:
        works = {} if seconds else attend_works(schedule)
    with _without_collector():
        run = _Run(topology, Programmer(schedule, topology).write(works, seconds))
        run.play()
        run.spans.sort(key=lambda span: (span.rank, span.lane, span.start, span.end))
        spans = tuple(run.spans)
        del run  # before the collector looks through a million steps that nobody needs
    peaks = peak_memory(schedule) if memory and ranks <= MEASURED else ()
    return Timeline(
        schedule.name, ranks, spans, topology=topology.name, machines=topology.machines, memory=peaks
    )


@contextmanager
def _without_collector() -> Generator[None]:
    """A million small values without cycles: looking for cycles among them would take half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Run:
    def __init__(self, topology: Topology, programs: list[list[Step]]) -> None:
        self.topology, self.programs, self.cores = topology, programs, topology.cores
        self.now = 0.0
        self.events: list[tuple[float, int, int, Task | Message]] = []
        self.count = 0
        self.spans: list[Span] = []
        ranks = range(len(programs))
        self.at = [0 for _ in ranks]
        self.since = [0.0 for _ in ranks]
        self.waiting: list[Wait | None] = [None for _ in ranks]
        self.meeting: list[int] = []
        self.dirty: dict[Task, None] = {}
        self.network = Network(topology)
        self.computing: list[Task | None] = [None for _ in ranks]
        self.sending = [0 for _ in ranks]
        self.talking = [0 for _ in ranks]
        self.lanes = [0] * topology.machines
        self.on_machine: list[dict[Task, None]] = [{} for _ in range(topology.machines)]

    def play(self) -> None:
        for rank in range(len(self.programs)):
            self._advance(rank)
        self._settle()
        events = self.events
        while events:
            self.now, _, version, thing = heappop(events)
            if isinstance(thing, Message):
                self._begin_message(thing)
            elif thing.version == version:
                self._finish(thing)
            if not events or events[0][0] != self.now:
                self._settle()

    def _advance(self, rank: int) -> None:
        """Walk a rank's program until something takes time."""
        steps = self.programs[rank]
        while self.at[rank] < len(steps):
            step = steps[self.at[rank]]
            if isinstance(step, Work):
                self._add(Task(rank, step, step.seconds, 1.0, (), self.cores > 0))
                return
            if isinstance(step, Wait):
                if not step.message.done:
                    self.waiting[rank], self.since[rank] = step, self.now
                    return
            elif isinstance(step, Post):
                for message in step.messages:
                    message.posts -= 1
                    if not message.posts:
                        self._start_message(message)
            elif not self._meet(rank, step):
                return
            self.at[rank] += 1

    def _meet(self, rank: int, step: Meet) -> bool:
        """Whether a rank is the last at a barrier; then all others go on."""
        self.since[rank] = self.now
        if len(self.meeting) + 1 < len(self.programs):
            self.meeting.append(rank)
            return False
        others, self.meeting = self.meeting, []
        for other in others:
            self._span(other, "compute", "barrier", step.name, self.since[other], step.op)
        for other in others:
            self.at[other] += 1
            self._advance(other)
        return True

    def _start_message(self, message: Message) -> None:
        message.start = self.now
        route = self.network.route(message.src, message.dst)
        self.count += 1
        heappush(self.events, (self.now + route.latency, self.count, 0, message))

    def _begin_message(self, message: Message) -> None:
        """The first byte arrives: from here on it shares."""
        route = self.network.route(message.src, message.dst)
        left = message.num_bytes + self.topology.half_bytes
        # What leaves a machine waits for its network, not for a core.
        on_core = self.cores > 0 and route.near
        self._add(Task(message.src, message, left, route.rate, route.pools, on_core))

    def _add(self, task: Task) -> None:
        task.start = task.since = self.now
        for pool in task.pools:
            pool.tasks[task] = None
        self._share(task, 1)
        self.dirty[task] = None

    def _finish(self, task: Task) -> None:
        task.version = -1
        self._share(task, -1)
        for pool in task.pools:
            del pool.tasks[task]
        self.dirty.pop(task, None)
        thing = task.thing
        if isinstance(thing, Work):
            self._span(task.rank, "compute", thing.kind, thing.name, task.start, thing.op)
            self.at[task.rank] += 1
            self._advance(task.rank)
        else:
            self._arrive(thing)

    def _share(self, task: Task, change: int) -> None:
        """A task comes or goes: mark the tasks whose speed that may change."""
        for pool in task.pools:
            if pool.capacity < pool.top * len(pool.tasks):
                self.dirty.update(pool.tasks)
        thing, rank = task.thing, task.rank
        if isinstance(thing, Work):
            self.computing[rank] = task if change > 0 else None
            alone = True
        else:
            self.sending[rank] += change * task.on_core
            alone = self.sending[rank] == max(0, change)
            if self.topology.comm_slowdown:
                for end in (thing.src, thing.dst):
                    self.talking[end] += change
                    if hindered := self.computing[end]:
                        self.dirty[hindered] = None
        if task.on_core:
            self._share_cores(task, change if alone else 0)

    def _share_cores(self, task: Task, change: int) -> None:
        machine = self.topology.machine(task.rank)
        self.on_machine[machine][task] = None
        # The tasks of one lane divide it, so one more of them matters to the others of its rank.
        if max(self.lanes[machine], self.lanes[machine] + change) > self.topology.cores:
            self.dirty.update(self.on_machine[machine])
        self.lanes[machine] += change
        if task.version < 0:
            del self.on_machine[machine][task]

    def _settle(self) -> None:
        """Give every task that may have become faster or slower its new speed and its new end."""
        for task in self.dirty:
            speed = self._speed(task)
            if speed != task.speed:
                task.left -= task.speed * (self.now - task.since)
                task.speed, task.since = speed, self.now
                task.version += 1
                self.count += 1
                end = self.now + max(0.0, task.left) / speed
                heappush(self.events, (end, self.count, task.version, task))
        self.dirty.clear()

    def _speed(self, task: Task) -> float:
        speed = task.rate
        for pool in task.pools:
            speed = min(speed, pool.capacity / len(pool.tasks))
        if self.talking[task.rank] and isinstance(task.thing, Work):
            speed *= 1 - self.topology.comm_slowdown
        if task.on_core:
            lanes = self.lanes[self.topology.machine(task.rank)]
            speed *= min(1.0, self.cores / lanes)
        return speed

    def _arrive(self, message: Message) -> None:
        message.done = True
        self._span(
            message.src,
            "comm",
            "send",
            message.name,
            message.start,
            message.op,
            message.dst,
            message.num_bytes,
        )
        for rank in (message.dst, message.src):
            wait = self.waiting[rank]
            if wait is not None and wait.message is message:
                self.waiting[rank] = None
                self._span(rank, "compute", "wait", wait.name, self.since[rank], message.op, wait.peer)
                self.at[rank] += 1
                self._advance(rank)

    def _span(  # noqa: PLR0913 - the fields of a Span, which ends now
        self,
        rank: int,
        lane: str,
        kind: str,
        name: str,
        start: float,
        op: int,
        peer: int = -1,
        num_bytes: int = 0,
    ) -> None:
        if self.now > start or kind not in ("wait", "barrier"):
            self.spans.append(Span(rank, lane, kind, name, start, self.now, op, peer, num_bytes))
