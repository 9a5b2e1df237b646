"""The predictor: slower links never help, overlap does, and work shared is time saved."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Piece, Schedule
from weft.core.topology import Link, Speed, Topology
from weft.plan.choose import build
from weft.schedule.measure import attend_works
from weft.schedule.reverse import reverse
from weft.simulate.costs import AttendPrice
from weft.simulate.predict import critical_path

FREE = Link(latency=0.0, bandwidth=1e30)


def of(ranks: int, tokens: int = 840, heads: int = 12) -> Problem:
    layout = Layout.even(tokens, ranks)
    return Problem(batch=1, heads=heads, kv_heads=heads, head_dim=8, q=layout, kv=layout)


def dense(name: str, ranks: int) -> Schedule:
    return build(name, of(ranks), BlockMask.dense(12, 840))


def cluster(ranks: int, link: Link, flops: float = 1e10) -> Topology:
    return Topology(devices=ranks, intra=link, inter=link, flops=flops)


@given(cases(max_tokens=97), st.floats(0, 1e-3), st.floats(1e4, 1e9), st.floats(1, 100))
@settings(max_examples=60)
def test_time_never_falls_as_a_link_slows(case, latency, bandwidth, factor):
    ranks = case.problem.ranks
    for schedule in (case.schedule, reverse(case.schedule)):
        fast, slow, late = (
            critical_path(schedule, cluster(ranks, link)).seconds
            for link in (
                Link(latency=latency, bandwidth=bandwidth * factor),
                Link(latency=latency, bandwidth=bandwidth),
                Link(latency=latency * factor, bandwidth=bandwidth),
            )
        )
        assert fast <= slow <= late


@given(cases(max_tokens=97))
@settings(max_examples=60)
def test_time_is_at_least_the_busiest_rank_and_the_busiest_wire(case):
    topology = Topology.local(case.problem.ranks)
    timing = critical_path(case.schedule, topology)
    assert timing.seconds >= max(timing.compute)
    sent = [0] * case.problem.ranks
    for _, transfer in case.schedule.transfers():
        sent[transfer.src] += transfer.piece.num_bytes(case.problem)
    assert timing.seconds >= max(sent) / topology.intra.bandwidth
    assert 0 <= timing.exposed <= 1


@pytest.mark.parametrize("name", ["ring", "ulysses", "gather"])
def test_more_ranks_compute_less_each(name):
    times = [critical_path(dense(name, ranks), cluster(ranks, FREE)) for ranks in (1, 2, 3, 4)]
    calls = [sum(op.rank == 0 for _, op in dense(name, ranks).attends()) for ranks in (1, 2, 3, 4)]
    work = [t.compute[0] - n * Topology().call_seconds for t, n in zip(times, calls, strict=True)]
    assert work == pytest.approx([work[0] / ranks for ranks in (1, 2, 3, 4)])
    assert [t.seconds for t in times] == sorted((t.seconds for t in times), reverse=True)


def test_one_rank_takes_its_flops():
    timing = critical_path(dense("ring", 1), cluster(1, FREE, flops=1e9))
    assert timing.seconds == pytest.approx(Topology().call_seconds + 4 * 8 * 12 * 840**2 / 1e9)
    assert timing.exposed == 0


def test_a_ring_hides_what_travels_while_it_computes():
    ranks, ring = 4, dense("ring", 4)
    attend = critical_path(ring, cluster(ranks, FREE)).compute[0] / ranks
    shard = 2 * 12 * 210 * 8 * 4
    hidden = Link(latency=0.0, bandwidth=shard / (0.9 * attend))
    assert critical_path(ring, cluster(ranks, hidden)).seconds == pytest.approx(ranks * attend)
    exposed = Link(latency=0.0, bandwidth=shard / (2 * attend))
    assert critical_path(ring, cluster(ranks, exposed)).seconds == pytest.approx((2 * 3 + 1) * attend)


def test_hops_posted_after_their_attention_are_not_hidden():
    ring = dense("ring", 4)
    blocking = replace(ring, ops=tuple(_after_attention(ring)))
    link = Link(latency=1e-3, bandwidth=1e8)
    assert critical_path(blocking, cluster(4, link)).seconds > critical_path(ring, cluster(4, link)).seconds


def _after_attention(ring: Schedule) -> list[Exchange | Attend]:
    """Each hop is posted when the attention that could have hidden it is done."""
    found: list[Exchange | Attend] = []
    waiting: list[Exchange] = []
    for op in ring.ops:
        if isinstance(op, Exchange):
            found += waiting
            waiting = [op]
        else:
            found.append(op)
            if waiting and sum(isinstance(o, Attend) for o in found) % 4 == 0:
                found += waiting
                waiting = []
    return found


def test_only_the_slow_link_is_felt():
    schedule, slow = dense("ring", 3), Link(latency=1.0, bandwidth=1e9)
    topology = cluster(3, FREE)
    against, along = (replace(topology, links=((*ends, slow),)) for ends in ((1, 0), (0, 1)))
    assert critical_path(schedule, against) == critical_path(schedule, topology)
    assert critical_path(schedule, along).seconds > 2


def test_nothing_takes_no_time():
    empty = BlockMask.from_tiles(np.zeros((12, 1, 1)), q_len=840, kv_len=840, block_q=840)
    timing = critical_path(build("ring", of(3), empty), Topology.local(3))
    assert (timing.seconds, timing.exposed) == (0.0, 0.0)


def test_the_network_of_a_machine_is_shared():
    schedule, link = dense("ring", 4), Link(latency=0.0, bandwidth=1e6)
    wide = Topology(machines=2, devices=2, intra=FREE, inter=link, flops=1e12)
    shared = replace(wide, nic_bandwidth=1e6)
    ratio = critical_path(schedule, shared).seconds / critical_path(schedule, wide).seconds
    assert ratio == pytest.approx(2, rel=0.01)


def test_a_pair_has_its_cap_but_pairs_run_side_by_side():
    wide = cluster(4, Link(latency=0.0, bandwidth=6e6), flops=1e30)
    capped = replace(wide, pair_bandwidth=2e6)
    ring, ulysses = (
        critical_path(dense(name, 4), capped).seconds / critical_path(dense(name, 4), wide).seconds
        for name in ("ring", "ulysses")
    )
    assert ring == pytest.approx(3, rel=0.01)
    assert ulysses < 1.7


ROW = Speed(tokens=420, density=1.0, block=64, head_dim=8, flops=1e9)


@pytest.mark.parametrize(
    ("row", "speed"),
    [
        (ROW, 1e9),
        (replace(ROW, tokens=800), 1e9),
        (replace(ROW, tokens=900), 1e10),
        (replace(ROW, tokens=200), 1e10),
        (replace(ROW, head_dim=17), 1e10),
        (replace(ROW, density=0.4), 1e10),
    ],
)
def test_a_measured_call_tells_more_than_flops_if_it_is_near(row, speed):
    mask, schedule = BlockMask.dense(12, 840), dense("ring", 2)
    topology = replace(cluster(2, FREE), attention=(row,), call_seconds=0.5)
    for index, op in schedule.attends():
        pairs = attend_works(schedule)[index]
        found = AttendPrice(topology, schedule.problem, mask)(pairs, op)
        assert found == pytest.approx(0.5 + 4 * 8 * pairs / speed)


def test_the_nearest_measured_call_counts():
    schedule = dense("ring", 2)
    rows = tuple(replace(ROW, tokens=tokens, flops=tokens * 1e6) for tokens in (300, 430, 700))
    timing = critical_path(schedule, replace(cluster(2, FREE), attention=rows, call_seconds=0.0))
    assert timing.compute[0] == pytest.approx(4 * 8 * 12 * 840**2 / 2 / 430e6)


def test_a_block_matters_where_the_mask_is_sparse():
    tiles = np.arange(14 * 14).reshape(1, 14, 14).repeat(12, axis=0) % 2
    mask = BlockMask.from_tiles(tiles, q_len=840, kv_len=840, block_q=60)
    schedule = build("ring", of(1), mask)
    row = replace(ROW, tokens=840, density=0.5, block=50)
    near, far = (
        critical_path(schedule, replace(cluster(1, FREE), attention=(given,), call_seconds=0.0)).seconds
        for given in (row, replace(row, block=16))
    )
    assert near == pytest.approx(10 * far)


def test_no_call_is_faster_than_its_operands_come():
    schedule = dense("ring", 1)
    topology = replace(cluster(1, FREE, flops=1e30), call_seconds=0.0, memory_bandwidth=1e6)
    assert critical_path(schedule, topology).seconds == pytest.approx(4 * 12 * 840 * 8 * 4 / 1e6)


def test_a_row_of_blocks_costs_in_every_call_that_goes_through_it():
    mask = BlockMask.dense(2, 256)
    layout = Layout.even(256, 2)
    problem = Problem(batch=1, heads=2, kv_heads=2, head_dim=8, q=layout, kv=layout)
    topology = Topology(devices=2, row_seconds=1.0, call_seconds=0.0, flops=1e30, intra=FREE)
    # A rank of a ring goes through its 128 rows of 2 heads twice, one of ulysses through 256 of 1 head once.
    ring, ulysses = (critical_path(build(name, problem, mask), topology) for name in ("ring", "ulysses"))
    assert (ring.seconds, ulysses.seconds) == pytest.approx((8.0, 4.0))


def test_dense_and_sparse_tiles_have_speeds_of_their_own():
    """The last head is dense: it has a call of its own, by the kernel for dense tiles."""
    tiles = np.ones((2, 4, 4), dtype=bool)
    tiles[0, :, 2:] = False
    mask = BlockMask.from_tiles(tiles, q_len=840, kv_len=840, block_q=210)
    topology = replace(cluster(1, FREE, flops=4e9), sparse_flops=1e9, call_seconds=0.0)
    price = AttendPrice(topology, of(1, heads=2), mask)
    rows = Indices.span(0, 840)
    pairs, work = 840 * 840, 4 * 8
    both = Attend(0, Piece("q", Indices.span(0, 2), rows), Piece("kv", Indices.span(0, 2), rows))
    assert price(1.5 * pairs, both) == pytest.approx(0.5 * pairs * work / 1e9 + pairs * work / 4e9)
    last = Attend(0, Piece("q", Indices.of([1]), rows), Piece("kv", Indices.of([1]), rows))
    assert price(pairs, last) == pytest.approx(pairs * work / 4e9)


def test_a_backward_has_more_work_and_a_speed_of_its_own():
    forward = dense("ring", 1)
    topology = replace(cluster(1, FREE, flops=1e9), call_seconds=0.0)
    alone = critical_path(forward, topology).seconds
    assert critical_path(reverse(forward), topology).seconds == pytest.approx(2.5 * alone)
    slower = replace(topology, backward_flops=0.5e9)
    assert critical_path(reverse(forward), slower).seconds == pytest.approx(5 * alone)
    assert critical_path(forward, slower).seconds == alone
