"""Costs: the seconds of one step, one message and one attention call on a topology.

Where devices are processes that share the cores of a machine, overlap is not free: copying a byte through a
socket takes the time of a core that could compute. Then a machine takes at least as long
as its cores need for all computation and messages of its ranks.
"""

from __future__ import annotations

import math
from collections import Counter

from weft.core.indices import Indices
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Attend, Schedule
from weft.core.topology import Host, Topology
from weft.program.steps import Attention, Cast, Copy, Fill, Gradient, Post, Program, Step, Wait

ATTENTIONS = (Attention, Gradient)
COPIES = (Copy, Cast, Fill)
BACKWARD_FLOPS_RATIO = 2.5  # FLOPs of a backward over those of its forward: five products instead of two
DENSE_BLOCK_ROWS = 64  # queries that a kernel takes at a time where the mask has no blocks of its own


class Prices:
    """The seconds of the steps of a schedule's programs on a topology.

    `works` are the active triples of each Attend, `seconds` their measured times, if there are any.
    """

    def __init__(
        self,
        schedule: Schedule,
        topology: Topology,
        works: dict[int, int],
        seconds: dict[int, float] | None = None,
    ) -> None:
        self.schedule, self.topology, self.works, self.measured = schedule, topology, works, seconds
        self.attend = attend_price(schedule, topology) if schedule.mask is not None else None
        self.byte_seconds = 2 / topology.memory_bandwidth if topology.memory_bandwidth else 0.0

    def seconds(self, step: Step) -> float:
        """Return how long a step keeps the compute lane busy; that of a Wait depends on events."""
        if type(step) in ATTENTIONS:  # no step has subclasses, and this is called a million times
            if self.measured is not None:
                return self.measured[step.op]
            op = self.schedule.ops[step.op]
            assert isinstance(op, Attend) and self.attend, f"operation {step.op} is no attention"
            return self.attend(self.works[step.op], op)
        if type(step) is Post:
            return self.topology.post_seconds * (len(step.sends) + len(step.receives))
        return 0.0 if type(step) is Wait or not self.byte_seconds else step.num_bytes * self.byte_seconds


def send_seconds(topology: Topology, src: int, dst: int, num_bytes: int) -> float:
    """Return the seconds of one message, while the other devices of its machine send theirs."""
    link = topology.link(src, dst)
    bandwidth = link.bandwidth
    if topology.nic_bandwidth and topology.machine(src) != topology.machine(dst):
        bandwidth = min(bandwidth, topology.nic_bandwidth / topology.devices)
    return link.latency + (num_bytes + topology.half_bytes) / bandwidth


def is_capped(topology: Topology, src: int, dst: int) -> bool:
    """Whether a pair has less bandwidth than a device, so that messages to other devices can overlap."""
    return topology.pair_bandwidth > 0 and topology.link(src, dst) is topology.intra


class AttendPrice:
    """The seconds of one attention call over a number of active (head, query token, key token) triples.

    Its sizes are looked up among the topology's measured calls; no call is faster than memory reads and
    writes its operands: queries and outputs, keys and values.
    """

    def __init__(
        self, topology: Topology, problem: Problem, mask: BlockMask, *, backward: bool = False
    ) -> None:
        self.topology, self.problem, self.mask = topology, problem, mask
        tiles = 0.0 if mask.is_dense else problem.batch / (mask.block_q * mask.block_k)
        self.flops = 4 * problem.head_dim * problem.batch * (BACKWARD_FLOPS_RATIO if backward else 1)
        dense, sparse = (topology.attention_flops(sparse=each, backward=backward) for each in (False, True))
        self.pair_seconds = self.flops / sparse + tiles * topology.tile_seconds
        self.dense_seconds = self.flops / dense + tiles * topology.tile_seconds
        self.splits = dense != sparse and not mask.is_dense
        self.full: dict[int, tuple[int, Indices]] = {}
        """By the identity of heads, which are held: how many of them have all tiles active."""
        block_rows = DENSE_BLOCK_ROWS if mask.is_dense else mask.block_q
        self.row_seconds = topology.row_seconds * (problem.batch / block_rows)
        cell = 2 * problem.row_elements * problem.item_bytes
        self.cell_seconds = cell / topology.memory_bandwidth if topology.memory_bandwidth else 0.0

    def __call__(self, pairs: float, op: Attend) -> float:
        q, kv = op.q, op.kv
        rows = q.heads.size * q.tokens.size
        call = self.topology.call_seconds + self.row_seconds * rows
        if self.topology.attention and (speed := self.measured_speed(pairs, op)):
            return call + self.flops * pairs / speed
        columns = kv.tokens.size
        cells = rows + kv.heads.size * columns
        # Heads with all tiles active go to the kernel for dense tiles, whatever the mask is elsewhere.
        dense = pairs if pairs >= rows * columns else self._full_heads(op) * q.tokens.size * columns
        if 0 < dense < pairs:
            call += self.topology.call_seconds
        seconds = self.dense_seconds * dense + self.pair_seconds * (pairs - dense)
        return call + max(seconds, self.cell_seconds * cells)

    def _full_heads(self, op: Attend) -> int:
        """Return how many heads of a call have a call of their own for dense tiles."""
        if not self.splits:
            return 0
        heads = op.q.heads
        if id(heads) not in self.full:
            runs = self.mask.head_runs(heads) if heads.size == op.kv.heads.size else ()
            self.full[id(heads)] = sum(end - first for first, end, full in runs if full), heads
        return self.full[id(heads)][0]

    def measured_speed(self, pairs: float, op: Attend) -> float | None:
        """Return the FLOP/s of the nearest measured call within a factor of two in each of its sizes."""
        if not pairs:
            return None
        mask, rows, cols = self.mask, op.q.tokens.size, op.kv.tokens.size
        density = pairs / (op.q.heads.size * rows * cols)
        block = math.sqrt(rows * cols if mask.is_dense else mask.block_q * mask.block_k)
        sizes = (math.sqrt(rows * cols), density, block, self.problem.head_dim)
        near: list[tuple[float, float]] = []
        for row in self.topology.attention:
            # A dense call is one tile, so its block adds nothing to its tokens.
            edge = block if density == row.density == 1 else row.block
            measured = (row.tokens, row.density, edge, row.head_dim)
            octaves = [abs(math.log2(a / b)) for a, b in zip(sizes, measured, strict=True)]
            if max(octaves) <= 1:
                near.append((sum(octaves), row.flops))
        return min(near, key=lambda item: item[0])[1] if near else None


def attend_price(schedule: Schedule, topology: Topology) -> AttendPrice:
    """Return the prices of a schedule's attentions, in its direction."""
    return AttendPrice(topology, *schedule.attention, backward=schedule.backward)


def host_seconds(program: Program, host: Host) -> float:
    """Return the seconds that the host takes to start all steps of a program, on the transport of GPUs."""
    counts = Counter(map(type, program.steps))
    peers = program.problem.ranks - 1
    batches = [
        len(step.sends) + len(step.receives)
        for step in program.steps
        if type(step) is Post and not len(step.sends) == len(step.receives) == peers
    ]
    return host.seconds(
        attends=sum(counts[kind] for kind in ATTENTIONS),
        copies=sum(counts[kind] for kind in COPIES),
        collectives=counts[Post] - len(batches),
        posts=len(batches),
        messages=sum(batches),
    )


def shared_seconds(topology: Topology, compute: list[float], sending: list[float]) -> float:
    """Return when the cores of the busiest machine have done everything; 0 where no cores are shared."""
    if not topology.cores:
        return 0.0
    busy = [0.0] * topology.machines
    for rank in range(topology.ranks):
        # Where there are several machines, most of what is sent waits for the network and not for a core.
        busy[topology.machine(rank)] += compute[rank] + sending[rank] * (topology.machines == 1)
    return max(busy) / min(topology.cores, topology.devices)
