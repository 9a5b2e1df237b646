"""Prove: no two accesses of the programs of a schedule race, in whatever order streams and messages proceed.

Only this is taken to be ordered:

- Steps of a rank run in list order on its compute stream. A message is in flight from its Post to its Wait:
  in between, its buffer may be read or written at any moment.
- What a rank does before a Post happens before what the receiver does after its Wait. A message to a near
  peer is read in place, also by ranks that it is passed on to, so it must not change until the call ends.
  Where it lands in the workspace of its receivers, each of them has read it after its own Wait, and what is
  passed on is read from its owner's memory, not from the workspace.

Slots are checked by their bytes: a write to the bytes of another slot makes that one unreadable. Each cell of
a slot is first written and then read, so that a step in the wrong place is always detected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NoReturn

from weft.core.errors import ScheduleError
from weft.core.schedule import Piece, Schedule
from weft.program.extents import Access, Content, Extent, pieces_accessed
from weft.program.lower import lower_all
from weft.program.pairing import check_messages, fail
from weft.program.pieces import RangeMap
from weft.program.slots import Slot
from weft.program.steps import Fill, Post, Program, Step, Target, Wait, accesses
from weft.program.workspace import Workspace, assign, window
from weft.schedule.reverse import reverse


def prove(programs: Sequence[Program], workspaces: Sequence[Workspace] | None = None) -> None:
    """Raise a ScheduleError that names the steps if programs of all ranks, in rank order, can go wrong."""
    if workspaces is None:
        workspaces = [assign(program) for program in programs]
    for program, workspace in zip(programs, workspaces, strict=True):
        _Rank(program, workspace).check()
    check_messages(programs)


def prove_schedule(schedule: Schedule) -> int:
    """Prove the programs of a schedule and its backward for every transport; return the number of steps."""
    ranks = schedule.problem.ranks
    directions = [(schedule, frozenset[str]())]
    if not schedule.backward:
        backward = reverse(schedule)
        kept = {piece.tensor for pieces in backward.kept for piece in pieces}
        directions += [(schedule, frozenset({"q"} | (kept & {"kv"}))), (backward, frozenset())]
    steps = 0
    every = frozenset(range(ranks))
    transports = (Target(), Target(collective=True), Target(near=every), Target(near=every, lands=True))
    for target in transports:
        for direction, save in directions:
            programs = lower_all(direction, replace(target, save=save))
            prove(programs)
            steps += sum(len(program.steps) for program in programs)
    return steps


class _Rank:
    """Walks through the steps of one rank: what its memory holds, and which messages are in flight."""

    def __init__(self, program: Program, workspace: Workspace) -> None:
        self.program, self.steps = program, program.steps
        self.places: dict[Slot, tuple[object, int]] = {}
        self._place(workspace)
        self.extents: dict[Slot, Extent] = {}
        self.in_flight: defaultdict[object, RangeMap[Access]] = defaultdict(RangeMap)
        self.pending: dict[tuple[int, int, bool], tuple[Slot, Access]] = {}
        """Messages that are to be waited for, by (op, peer, sent)."""
        self.contents: dict[Slot, Content] = {}
        self.written: defaultdict[object, RangeMap[Slot]] = defaultdict(RangeMap)
        """Roots that have contents, by their bytes."""
        self.overwriters: dict[Slot, int] = {}
        """Steps that wrote over the contents of a root."""

    def _place(self, workspace: Workspace) -> None:
        """Blocks are the workspace, the window, and other roots; the workspace borrows those of results."""
        for slot, (number, start) in workspace.places.items():
            block, size = "workspace", workspace.num_bytes
            if number:
                block, plane = workspace.results[number - 1]
                size = block.num_bytes // block.shape[0]
                start += plane * size
                size += plane * size
            self.places[slot] = block, start
            if start + slot.num_bytes > size:
                self.fail(f"{slot.name} is at byte {start:,}, beyond the end of its block")
        self.places |= {slot: ("window", start) for slot, (_, start) in window(self.program).places.items()}

    def check(self) -> None:
        for slot in self.program.slots.values():
            if slot.root.memory in ("input", "saved"):
                self.fill(self.extent(slot.root))
        for at, step in enumerate(self.steps):
            if isinstance(step, Post):
                self.post(at, step)
            elif isinstance(step, Wait):
                self.wait(at, step)
            else:
                self.compute(at, step)
        for slot, access in self.pending.values():
            self.fail(f"no step waits for the message {slot.name}", access.at)
        for slot in self.program.slots.values():
            self.read(len(self.steps), self.extent(slot))
        for slot in self.program.saved.values():
            if slot.num_bytes and slot.root not in self.contents:
                self.fail(f"no step writes {slot.name}, which is saved for the backward")

    def post(self, at: int, step: Post) -> None:
        near = self.program.target.near
        in_place = frozenset[int]() if self.program.target.lands else near
        for peer, slot in step.sends:
            if peer in near and peer not in in_place and slot.root.memory == "peer":
                self.read(at, self.extent(slot))  # it has arrived, and is read from its owner's memory
                continue
            access = self.start(Access(at, self.extent(slot), writes=False))
            self.read(at, access.extent)
            if slot.num_bytes:
                self.contents[slot.root].note_reader(at, access.extent.slot, access.extent.piece)
            if peer not in near:
                self.pending[step.op, peer, True] = slot, access
        for peer, slot in step.receives:
            access = Access(at, self.extent(slot), writes=True)
            if peer not in in_place:
                self.start(access)
                self.clear(at, access.extent)
            self.pending[step.op, peer, False] = slot, access

    def start(self, access: Access) -> Access:
        """Put a message in flight."""
        self.check_race(access)
        block, start, stop, *_ = access.extent
        self.in_flight[block].add(start, stop, access)
        return access

    def wait(self, at: int, step: Wait) -> None:
        slot, access = self.pending.pop((step.op, step.peer, step.sent), (None, None))
        if access is None or slot is not step.slot:
            self.fail(f"{step.slot.name} is not in flight", at)
        extent = access.extent
        target = self.program.target
        if step.peer not in target.near or target.lands:  # else its peer reads it in place
            self.in_flight[extent.block].remove(extent.start, access)
        if not step.sent:
            self.fill(extent)

    def compute(self, at: int, step: Step) -> None:
        reads, writes = ([self.extent(*piece) for piece in pieces] for pieces in pieces_accessed(step))
        both = [Access(at, extent, writes=False) for extent in reads]
        both += [Access(at, extent, writes=True) for extent in writes]
        for access in both:
            self.check_race(access)
        sums = {extent.slot for extent in writes}
        for extent in reads:
            self.read(at, extent)
            if extent.slot not in sums and extent.slot.num_bytes:
                self.contents[extent.slot.root].note_reader(at, extent.slot, extent.piece)
        roots = {extent.slot.root for extent in reads}
        for extent in writes:
            self.write(at, extent, roots)

    def write(self, at: int, extent: Extent, reads: set[Slot]) -> None:
        slot, is_fill = extent.slot, isinstance(self.steps[at], Fill)
        if slot.root.memory in ("input", "peer"):
            self.fail(f"it writes {slot.name}, which is not the program's own", at)
        if lost := reads.intersection(self.clear(at, extent)):
            self.fail(f"it writes {slot.name} over {lost.pop().name}, which it reads", at)
        self.fill(extent)
        content = self.contents[slot.root]
        if (other := content.out_of_order(slot, extent.piece, is_fill=is_fill)) is not None:
            self.fail(f"the second writes {slot.name}, and the first comes too early for that", other, at)
        if not is_fill:
            content.note_writer(at, slot)

    def check_race(self, access: Access) -> None:
        block, start, stop, slot, _ = access.extent
        for other in self.in_flight[block].overlapping(start, stop):
            if access.conflicts(other):
                verb, verbs = ("writes" if one.writes else "reads" for one in (other, access))
                self.fail(
                    f"the first {verb} {other.extent.slot.name} while the second {verbs} {slot.name}",
                    other.at,
                    access.at,
                )

    def read(self, at: int, extent: Extent) -> None:
        """Check that what is read has been written, and not been overwritten."""
        slot, root = extent.slot, extent.slot.root
        if not slot.num_bytes or (root in self.contents and self.contents[root].has(slot, extent.piece)):
            return
        reader = [at] if at < len(self.steps) else []
        if root in self.overwriters:
            self.fail(f"it writes over {slot.name}, which is read later", self.overwriters[root], *reader)
        writers = (i for i, step in enumerate(self.steps) if i > at and root in _written(step))
        what = "is read" if reader else "is a result"
        self.fail(f"{slot.name} {what}, but not all of it has been written", *reader, *islice(writers, 1))

    def clear(self, at: int, extent: Extent) -> list[Slot]:
        """Drop the contents of other roots in bytes that are written now."""
        roots, own = self.written[extent.block], extent.slot.root
        lost = [root for root in roots.overlapping(extent.start, extent.stop) if root is not own]
        for root in lost:
            del self.contents[root]
            roots.remove(self.extent(root).start, root)
            self.overwriters[root] = at
        return lost

    def fill(self, extent: Extent) -> None:
        root = extent.slot.root
        if root not in self.contents:
            self.contents[root] = Content()
            self.overwriters.pop(root, None)
            _, start, stop, *_ = self.extent(root)
            self.written[extent.block].add(start, stop, root)
        self.contents[root].add(extent.slot, extent.piece)

    def extent(self, slot: Slot, piece: Piece | None = None) -> Extent:
        known = self.extents.get(slot)
        if known is None:
            known = self.extents[slot] = Extent.of(slot, *self.places.get(slot.root, (slot.root, 0)))
        return known if piece is None else known._replace(piece=piece)

    def fail(self, reason: str, *steps: int) -> NoReturn:
        if not steps:
            raise ScheduleError(f"Rank {self.program.rank}: {reason}.")
        fail(reason, *((self.program, at) for at in steps))


def _written(step: Step) -> set[Slot]:
    """The roots that a step writes, or whose message it waits for."""
    slots = (step.slot,) if isinstance(step, Wait) else accesses(step)[1]
    return {slot.root for slot in slots}
