"""Every timeline is consistent with its schedule, and within bounds that none may break."""

from collections import defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases
from weft.core.schedule import Attend, Piece, Schedule
from weft.core.topology import Host, Link, Topology
from weft.program.lower import lower_all
from weft.program.workspace import peak_memory
from weft.schedule.measure import measure
from weft.schedule.reverse import reverse
from weft.simulate.costs import host_seconds
from weft.simulate.events import simulate


def topologies(ranks: int) -> st.SearchStrategy[Topology]:
    link = Link(latency=1e-5, bandwidth=1e6)
    base = Topology(devices=ranks, intra=link, inter=link, flops=1e8, call_seconds=1e-4)
    apart = replace(base, machines=ranks, devices=1)
    return st.sampled_from(
        [
            base,
            replace(base, cores=2, two_sided=True, memory_bandwidth=1e7, post_seconds=1e-5),
            replace(base, pair_bandwidth=3e5, half_bytes=100),
            replace(base, two_sided=True, comm_slowdown=0.25),
            replace(base, barriers=True),
            replace(
                base, two_sided=True, host=Host(call=1e-4, attend=3e-4, copy=1e-5, post=2e-4, message=1e-4)
            ),
            replace(apart, nic_bandwidth=7e5, two_sided=True, barriers=True),
        ]
    )


@given(cases(max_tokens=97), st.booleans(), st.data())
@settings(max_examples=80, deadline=None)
def test_every_timeline_is_consistent(case, backward, data):
    schedule = reverse(case.schedule) if backward else case.schedule
    topology = data.draw(topologies(case.problem.ranks))
    timeline = simulate(schedule, topology)
    report = measure(schedule)
    assert timeline == simulate(schedule, topology)
    assert (timeline.traffic == report.matrix()).all()
    assert timeline.memory == peak_memory(schedule)
    assert sum(s.kind == "send" for s in timeline.spans) == sum(report.messages.values())
    assert [s.op for s in sorted(timeline.spans, key=lambda s: s.op) if s.kind == "attend"] == [
        index for index, _ in schedule.attends()
    ]
    assert all(0 <= s.start <= s.end for s in timeline.spans)
    _lanes_do_not_overlap(timeline)
    _nothing_is_read_before_it_is_there(schedule, timeline)
    assert timeline.seconds >= timeline.computing.max()
    for rank in range(case.problem.ranks):
        assert timeline.seconds >= report.sent(rank) / topology.intra.bandwidth * (1 - 1e-9)
    alone = simulate(schedule, replace(topology, host=Host()))
    hosts = [host_seconds(program, topology.host) for program in lower_all(schedule)]
    assert timeline.seconds == max(alone.seconds, *hosts)
    if topology.cores:
        assert timeline.seconds >= _alone(schedule, topology) * (1 - 1e-9)


def _alone(schedule: Schedule, topology: Topology) -> float:
    """When the cores are done, if they never rest."""
    free = simulate(schedule, replace(topology, cores=0))
    sending = free.traffic.sum() / topology.intra.bandwidth
    return float(free.computing.sum() + sending) / topology.cores


def _lanes_do_not_overlap(timeline) -> None:
    for rank in range(timeline.ranks):
        spans = [s for s in timeline.of(rank) if s.lane == "compute"]
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))


def _nothing_is_read_before_it_is_there(schedule: Schedule, timeline) -> None:
    """What is at home, kept, or has arrived when an Attend starts must cover its operands."""
    problem = schedule.problem
    ends = {(s.op, s.rank, s.peer): s.end for s in timeline.spans if s.kind == "send"}
    here: dict[int, list[tuple[float, Piece]]] = defaultdict(list)
    for index, transfer in schedule.transfers():
        here[transfer.dst].append((ends[index, transfer.src, transfer.dst], transfer.piece))
    for span in (s for s in timeline.spans if s.kind == "attend"):
        op = schedule.ops[span.op]
        assert isinstance(op, Attend)
        for piece in (op.q, op.kv):
            home = Piece(piece.tensor, piece.heads, problem.home(piece.tensor).held(op.rank))
            kept = schedule.kept[op.rank] if schedule.kept else ()
            there = [p for end, p in here[op.rank] if end <= span.start] + list(kept)
            assert not piece.without([home, *(p for p in there if p.tensor == piece.tensor)])
