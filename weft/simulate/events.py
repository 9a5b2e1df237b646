"""Events: simulate a schedule on a topology, event by event.

Each rank walks the steps of its program; a step that takes time is a task with an amount left and a speed.
Speeds change when tasks that share a resource start or end: the links of a device, the network of a machine,
its cores. Shares are equal; what a task cannot use of its share is lost to the others.

Where a host launches what a device computes, it runs ahead of the device: attentions follow one another,
layer by layer, and none waits for the host. So an attention takes as long as its device or its host,
whichever is slower; the rest of a host's time is a span of its own, at the end.

Devices that are processes on a CPU share its cores by lanes: a rank that computes is one lane, a rank that
sends another, and all lanes are equally fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain
from math import inf
from operator import itemgetter

from weft.core.errors import InputError
from weft.core.schedule import Exchange, Schedule
from weft.core.timeline import Span, Timeline
from weft.core.topology import Topology
from weft.program.lower import lower_all, without_collector
from weft.program.steps import Post, Program, Step, Wait, span_name
from weft.program.workspace import memory_of
from weft.schedule.measure import attend_works
from weft.simulate.costs import ATTENTIONS, Prices, host_seconds
from weft.simulate.sharing import Network, SimulatedTask

MAX_RANKS_OF_MEMORY = 64  # memory is computed up to this number of ranks: it takes as long as all the rest


def simulate(
    schedule: Schedule,
    topology: Topology,
    works: dict[int, int] | None = None,
    *,
    seconds: dict[int, float] | None = None,
    memory: bool = True,
) -> Timeline:
    """Return the timeline of all ranks.

    `works` are those of `schedule.measure.attend_works`, if they are known already; `seconds` are measured
    times of each Attend, by operation. Without `memory` the peaks of memory are left out.
    """
    ranks = schedule.problem.ranks
    if topology.ranks != ranks:
        raise InputError(
            f"The topology {topology.name} has {topology.ranks} ranks, the schedule {ranks}.",
            hint="Pass a topology of as many machines × devices as ranks.",
        )
    if works is None:
        works = {} if seconds else attend_works(schedule)
    with without_collector():
        programs = lower_all(schedule)
        run = _Run(schedule, Prices(schedule, topology, works, seconds), programs)
        spans = run.play()
        if any(vars(topology.host).values()):
            spans += _launches(run.end(), [host_seconds(program, topology.host) for program in programs])
        peaks = tuple(memory_of(p).total for p in programs) if memory and ranks <= MAX_RANKS_OF_MEMORY else ()
        del run, programs  # free a million steps before the garbage collector scans them
    return Timeline(
        schedule.name, ranks, spans, topology=topology.name, machines=topology.machines, memory=peaks
    )


def _launches(end: float, hosts: list[float]) -> tuple[Span, ...]:
    """Return spans of the time that each host still launches when all devices are done."""
    return tuple(
        Span(rank, "compute", "launch", "launches", end, host)
        for rank, host in enumerate(hosts)
        if host > end
    )


Key = tuple[int, int, int]
"""A message: operation, source and target."""


class _Run:
    """The state of a simulation: programs, tasks, events and resources."""

    def __init__(self, schedule: Schedule, prices: Prices, programs: list[Program]) -> None:
        self.prices, self.topology, self.cores = prices, prices.topology, prices.topology.cores
        self.walks: list[Iterator[Step]] = [iter(program.steps) for program in programs]
        """The steps that each rank has left."""
        self.now = 0.0
        self.events: list[tuple[float, int, int, SimulatedTask]] = []
        self.count = 0
        ranks = range(len(programs))
        self.sent: list[list[Span]] = [[] for _ in ranks]
        """Spans of messages by sender, in the order of their ends."""
        self.done: list[list[Span]] = [[] for _ in ranks]
        """Spans of each rank's compute lane."""
        self.since = [0.0 for _ in ranks]
        self.waiting: list[Key | None] = [None for _ in ranks]
        self.waits: dict[int, Wait] = {}
        """The message that a rank waits for, and its last Wait."""
        self.half_posted: set[Key] = set()
        """Messages that only one of their two ends has posted."""
        self.arrived: set[Key] = set()
        self.barriers = [i for i, op in enumerate(schedule.ops) if isinstance(op, Exchange)]
        if not self.topology.barriers:
            self.barriers.clear()
        self.passed = [0 for _ in ranks]
        """How many barriers each rank has passed."""
        self.at_barrier: list[int] = []
        self.dirty: dict[SimulatedTask, None] = {}
        self.network = Network(self.topology)
        self.computing: list[SimulatedTask | None] = [None for _ in ranks]
        self.sending = [0 for _ in ranks]
        self.talking = [0 for _ in ranks]
        self.lanes = [0] * self.topology.machines
        self.on_machine: list[dict[SimulatedTask, None]] = [{} for _ in range(self.topology.machines)]

    def play(self) -> tuple[Span, ...]:
        """Return all spans by rank, lane and time."""
        for rank in range(len(self.walks)):
            self._advance(rank)
        self._settle()
        events = self.events
        while events:
            self.now, _, version, task = heappop(events)
            if task.version == version:
                if not version:
                    self._begin(task)
                elif task.peer < 0:
                    self._finish(task)
                else:
                    self._arrive(task)
            if not events or events[0][0] != self.now:
                self._settle()
        for spans in self.sent:
            spans.sort(key=itemgetter(4, 5))
        return tuple(chain(*(spans for lanes in zip(self.sent, self.done, strict=True) for spans in lanes)))

    def end(self) -> float:
        """Return when the last device is done: every message is waited for, so computing ends last."""
        return max((spans[-1].end for spans in self.done if spans), default=0.0)

    def _advance(self, rank: int) -> None:
        """Walk a rank's program until something takes time."""
        walk, arrived = self.walks[rank], self.arrived
        for step in walk:
            if self.barriers and not self._pass_barriers(rank, step.op):
                self.walks[rank] = chain((step,), walk)  # after the barrier
                return
            if type(step) is Wait:
                key = (step.op, rank, step.peer) if step.sent else (step.op, step.peer, rank)
                if key not in arrived:
                    self.since[rank], self.waiting[rank], self.waits[rank] = self.now, key, step
                    return
                continue
            seconds = self.prices.seconds(step)
            if seconds or type(step) in ATTENTIONS:
                task = self.computing[rank] = SimulatedTask(rank, step, seconds, self.now)
                self.dirty[task] = None
                if self.cores:
                    self._share_cores(task, 1)
                return
            if type(step) is Post:
                self._post(rank, step)
        if self.barriers:
            self._pass_barriers(rank, inf)

    def _pass_barriers(self, rank: int, op: float) -> bool:
        """Whether all ranks have reached every exchange up to an operation; else the rank waits there."""
        while self.passed[rank] < len(self.barriers) and self.barriers[self.passed[rank]] <= op:
            self.since[rank] = self.now
            if len(self.at_barrier) + 1 < len(self.walks):
                self.at_barrier.append(rank)
                return False
            others, self.at_barrier = self.at_barrier, []
            barrier = self.barriers[self.passed[rank]]
            for other in (rank, *others):
                self.passed[other] += 1
            for other in others:
                self._waited(other, "barrier", "barrier", barrier)
                self._advance(other)
        return True

    def _post(self, rank: int, step: Post) -> None:
        """Start the messages whose other end has posted them too, or need not."""
        op, half_posted = step.op, self.half_posted
        if not self.topology.two_sided:
            for peer, slot in step.sends:
                self._start(step, rank, peer, slot.num_bytes)
            return
        for peer, slot in step.sends:
            if (key := (op, rank, peer)) in half_posted:
                half_posted.remove(key)
                self._start(step, rank, peer, slot.num_bytes)
            else:
                half_posted.add(key)
        for peer, slot in step.receives:
            if (key := (op, peer, rank)) in half_posted:
                half_posted.remove(key)
                self._start(step, peer, rank, slot.num_bytes)
            else:
                half_posted.add(key)

    def _start(self, step: Post, src: int, dst: int, num_bytes: int) -> None:
        route = self.network.routes.get((src, dst)) or self.network.route(src, dst)
        task = SimulatedTask(src, step, num_bytes + self.topology.half_bytes, self.now, route, dst, num_bytes)
        self.count += 1
        heappush(self.events, (self.now + route.latency, self.count, 0, task))

    def _begin(self, task: SimulatedTask) -> None:
        """The first byte of a message arrives: from now on it shares its route."""
        self.dirty[task] = None
        for pool in task.route.pools:
            pool.tasks[task] = None
        self._share(task, 1)

    def _arrive(self, task: SimulatedTask) -> None:
        op, src, dst = key = task.step.op, task.rank, task.peer
        task.version = -1
        self._share(task, -1)
        for pool in task.route.pools:
            del pool.tasks[task]
        self.dirty.pop(task, None)
        self.arrived.add(key)
        name = span_name(task.step, dst)
        self.sent[src].append(Span(src, "comm", "send", name, task.start, self.now, op, dst, task.num_bytes))
        for rank, peer in ((dst, src), (src, dst)):
            if self.waiting[rank] == key:
                self.waiting[rank] = None
                if self.now > self.since[rank]:
                    self._waited(rank, "wait", span_name(self.waits[rank]), op, peer)
                self._advance(rank)

    def _finish(self, task: SimulatedTask) -> None:
        """End a rank's computation and continue its program."""
        rank, step = task.rank, task.step
        task.version = -1
        if self.cores:
            self._share_cores(task, -1)
        self.dirty.pop(task, None)
        self.computing[rank] = None
        kind = "attend" if type(step) in ATTENTIONS else "copy"
        self.done[rank].append(Span(rank, "compute", kind, span_name(step), task.start, self.now, step.op))
        if type(step) is Post:
            self._post(rank, step)
        self._advance(rank)

    def _waited(self, rank: int, kind: str, name: str, op: int, peer: int = -1) -> None:
        start = self.since[rank]
        if self.now > start:
            self.done[rank].append(Span(rank, "compute", kind, name, start, self.now, op, peer))

    def _share(self, task: SimulatedTask, change: int) -> None:
        """Mark the tasks whose speed may change when a message starts or ends."""
        for pool in task.route.pools:
            if len(pool.tasks) > pool.room:
                self.dirty.update(pool.tasks)
        if self.topology.comm_slowdown:
            for end in (task.rank, task.peer):
                self.talking[end] += change
                if (slowed := self.computing[end]) and self.talking[end] == (change > 0):
                    self.dirty[slowed] = None
        if self.cores and task.route.near:  # other messages wait for the network, not for a core
            self.sending[task.rank] += change
            self._share_cores(task, change if self.sending[task.rank] == (change > 0) else 0)

    def _share_cores(self, task: SimulatedTask, change: int) -> None:
        machine = self.topology.machine(task.rank)
        self.on_machine[machine][task] = None
        # The tasks of one lane divide it, so one more of them matters to the others of its rank.
        if max(self.lanes[machine], self.lanes[machine] + change) > self.cores:
            self.dirty.update(self.on_machine[machine])
        self.lanes[machine] += change
        if task.version < 0:
            del self.on_machine[machine][task]

    def _settle(self) -> None:
        """Compute the new speed and end of every marked task."""
        now, slowed = self.now, 1 - self.topology.comm_slowdown
        for task in self.dirty:
            speed = task.route.rate
            for pool in task.route.pools:
                if len(pool.tasks) > pool.room:
                    speed = min(speed, pool.capacity / len(pool.tasks))
            if task.peer < 0 and self.talking[task.rank]:
                speed = slowed
            if self.cores and task.route.near:
                speed *= min(1.0, self.cores / self.lanes[self.topology.machine(task.rank)])
            if speed != task.speed:
                task.left -= task.speed * (now - task.since)
                task.speed, task.since = speed, now
                task.version += 1
                self.count += 1
                heappush(self.events, (now + max(0.0, task.left) / speed, self.count, task.version, task))
        self.dirty.clear()
