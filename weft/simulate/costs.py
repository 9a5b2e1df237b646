"""Costs: what one message and one attention call take on a topology.

Where devices are processes that share the cores of a machine, nothing is hidden for free: copying a
byte through a socket takes the time of a core that could compute. Then no machine is done before its
cores have done all that its ranks compute and send.
"""

from __future__ import annotations

import math

from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Attend, Schedule
from weft.core.topology import Topology
from weft.program.steps import Attention, Gradient, Post, Step, Wait

ATTENTIONS = (Attention, Gradient)
ROW = 64  # queries that a kernel takes at a time where the mask has no blocks of its own


class Prices:
    """What the steps of a schedule's programs cost on a topology.

    `works` are the active triples of each Attend, `seconds` what it takes where that has been measured.
    """

    def __init__(
        self,
        schedule: Schedule,
        topology: Topology,
        works: dict[int, int],
        seconds: dict[int, float] | None = None,
    ) -> None:
        self.schedule, self.topology, self.works, self.measured = schedule, topology, works, seconds
        self.attention = schedule.attention if schedule.mask is not None else None
        self.byte_seconds = 2 / topology.memory_bandwidth if topology.memory_bandwidth else 0.0

    def seconds(self, step: Step) -> float:
        """Return how long a step keeps the compute lane busy; what a Wait takes only events can tell."""
        if isinstance(step, ATTENTIONS):
            if self.measured is not None:
                return self.measured[step.op]
            op = self.schedule.ops[step.op]
            assert isinstance(op, Attend) and self.attention, f"operation {step.op} is no attention"
            return attend_seconds(self.topology, *self.attention, self.works[step.op], op)
        if isinstance(step, Post):
            return self.topology.post_seconds * (len(step.sends) + len(step.receives))
        return 0.0 if isinstance(step, Wait) or not self.byte_seconds else step.num_bytes * self.byte_seconds


def send_seconds(topology: Topology, src: int, dst: int, num_bytes: int) -> float:
    """One message, while the other devices of its machine send theirs."""
    link = topology.link(src, dst)
    bandwidth = link.bandwidth
    if topology.nic_bandwidth and topology.machine(src) != topology.machine(dst):
        bandwidth = min(bandwidth, topology.nic_bandwidth / topology.devices)
    return link.latency + (num_bytes + topology.half_bytes) / bandwidth


def capped(topology: Topology, src: int, dst: int) -> bool:
    """Whether a pair has less than a device; its messages to others go on meanwhile."""
    return topology.pair_bandwidth > 0 and topology.link(src, dst) is topology.intra


def attend_seconds(
    topology: Topology, problem: Problem, mask: BlockMask, pairs: float, op: Attend | None = None
) -> float:
    """One call over so many active (head, query token, key token) triples.

    With `op`, its sizes are looked up among the topology's measured calls, and no call is faster than
    memory gives it its operands.
    """
    flops = 4 * problem.head_dim * problem.batch * pairs
    call = topology.call_seconds
    if op is not None and topology.row_seconds:
        call += topology.row_seconds * block_rows(problem, mask, op.q.heads.size, op.q.tokens.size)
    if (
        op is not None
        and topology.attention
        and (speed := measured_speed(topology, problem, mask, pairs, op))
    ):
        return call + flops / speed
    tiles = 0.0 if mask.is_dense else problem.batch * pairs / (mask.block_q * mask.block_k)
    busy = flops / topology.flops + tiles * topology.tile_seconds
    if op is not None and topology.memory_bandwidth:
        # Queries and outputs, keys and values.
        cells = 2 * op.q.heads.size * op.q.tokens.size + 2 * op.kv.heads.size * op.kv.tokens.size
        busy = max(busy, cells * problem.row_elements * problem.item_bytes / topology.memory_bandwidth)
    return call + busy


def block_rows(problem: Problem, mask: BlockMask, heads: float, tokens: float) -> float:
    """Rows of blocks, by head, that a call over so many heads and queries goes through."""
    return problem.batch * heads * tokens / (ROW if mask.is_dense else mask.block_q)


def measured_speed(
    topology: Topology, problem: Problem, mask: BlockMask, pairs: float, op: Attend
) -> float | None:
    """FLOP/s of the nearest measured call, if one is within a factor of two in each of its sizes."""
    if not pairs:
        return None
    rows, cols = op.q.tokens.size, op.kv.tokens.size
    density = pairs / (op.q.heads.size * rows * cols)
    block = math.sqrt(rows * cols if mask.is_dense else mask.block_q * mask.block_k)
    sizes = (math.sqrt(rows * cols), density, block, problem.head_dim)
    found: list[tuple[float, float]] = []
    for row in topology.attention:
        # A dense call is one tile, so its block says nothing that its tokens have not said.
        given = (row.tokens, row.density, block if density == row.density == 1 else row.block, row.head_dim)
        apart = [abs(math.log2(a / b)) for a, b in zip(sizes, given, strict=True)]
        if max(apart) <= 1:
            found.append((sum(apart), row.flops))
    return min(found, key=lambda item: item[0])[1] if found else None


def shared_seconds(topology: Topology, compute: list[float], sending: list[float]) -> float:
    """When the cores of the busiest machine are done with everything; 0 where nothing is shared."""
    if not topology.cores:
        return 0.0
    busy = [0.0] * topology.machines
    for rank in range(topology.ranks):
        # Where there are several machines, most of what is sent waits for the network and not for a core.
        busy[topology.machine(rank)] += compute[rank] + sending[rank] * (topology.machines == 1)
    return max(busy) / min(topology.cores, topology.devices)
