"""The simulator: small cases, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from weft.core.errors import InputError
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Piece, Schedule, Transfer
from weft.core.topology import Link, Topology
from weft.masks.random import random_mask
from weft.plan.choose import build
from weft.simulate.events import simulate
from weft.simulate.predict import critical_path

TOKENS = 4  # of each rank; with one head of one float32, keys and values of a token are 8 bytes
SHARD = TOKENS * 8
UNIT = Link(latency=0.0, bandwidth=SHARD)  # a shard a second
FREE = Link(latency=0.0, bandwidth=1e30)


def kv(rank: int) -> Piece:
    return Piece("kv", Indices.of([0]), Indices.span(rank * TOKENS, (rank + 1) * TOKENS))


def sends(*pairs: tuple[int, int], label: str = "hop 1") -> Exchange:
    """Each source's own shard goes to a target."""
    return Exchange(tuple(Transfer(kv(src), src, dst) for src, dst in pairs), label)


def attend(rank: int, keys_of: int | None = None) -> Attend:
    keys = kv(rank if keys_of is None else keys_of)
    return Attend(rank, Piece("q", keys.heads, kv(rank).tokens), keys)


def schedule(ranks: int, *ops: Exchange | Attend) -> Schedule:
    layout = Layout.even(ranks * TOKENS, ranks)
    problem = Problem(batch=1, heads=1, kv_heads=1, head_dim=1, q=layout, kv=layout)
    return Schedule("by hand", problem, BlockMask.dense(1, ranks * TOKENS), Mesh.of(ring=ranks), ops)


def flat(ranks: int, **fields: object) -> Topology:
    return replace(Topology(devices=ranks, intra=UNIT, inter=UNIT), **fields)


def play(topology: Topology, *ops: Exchange | Attend, seconds: dict[int, float] | None = None):
    return simulate(schedule(topology.ranks, *ops), topology, seconds=seconds or {})


def of_kind(timeline, kind: str) -> list[tuple[int, float, float]]:
    return [(s.rank, s.start, s.end) for s in timeline.spans if s.kind == kind]


def test_a_message_takes_its_latency_and_its_bytes():
    link = Link(latency=0.5, bandwidth=SHARD)
    timeline = play(flat(2, intra=link), sends((0, 1)))
    assert timeline.seconds == 1.5
    assert of_kind(timeline, "wait") == [(0, 0.0, 1.5), (1, 0.0, 1.5)], "both ends see it through"


def test_a_message_of_half_bytes_has_half_the_bandwidth():
    assert play(flat(2, half_bytes=SHARD), sends((0, 1))).seconds == 2
    assert play(flat(2, half_bytes=SHARD / 4), sends((0, 1))).seconds == 1.25


def test_two_flows_on_one_nic_take_twice_as_long():
    wide = flat(2, machines=2)
    shared = replace(wide, nic_bandwidth=SHARD)
    assert play(wide, sends((0, 2), (1, 3))).seconds == 1
    assert play(shared, sends((0, 2))).seconds == 1
    assert play(shared, sends((0, 2), (1, 3))).seconds == 2
    assert play(shared, sends((0, 2), (3, 1))).seconds == 1, "there and back are two directions"
    assert play(shared, sends((0, 1), (2, 3))).seconds == 1, "inside a machine there is no network"


def test_a_nic_receives_no_faster_than_it_sends():
    crowded = flat(2, machines=3, nic_bandwidth=SHARD)
    assert play(crowded, sends((0, 4), (2, 5))).seconds == 2
    topology = flat(1, machines=3, nic_bandwidth=2 * SHARD)
    assert play(topology, sends((0, 2), (1, 2))).seconds == 2, "the receiver's own link is the limit"
    assert play(replace(topology, inter=Link(latency=0, bandwidth=2 * SHARD)), sends((0, 2))).seconds == 0.5


def test_a_flow_that_is_left_alone_speeds_up():
    topology = flat(2, machines=2, nic_bandwidth=SHARD)
    long = Exchange((Transfer(Piece("kv", kv(0).heads, Indices.span(0, 2)), 0, 2), Transfer(kv(1), 1, 3)))
    timeline = play(topology, long)
    assert of_kind(timeline, "send") == [(0, 0.0, 1.0), (1, 0.0, 1.5)]


def test_a_device_divides_its_links_and_a_pair_has_its_cap():
    topology = flat(4)
    assert play(topology, sends((0, 1), (0, 2), (0, 3))).seconds == 3
    mesh = flat(4, pair_bandwidth=SHARD / 4)
    assert play(mesh, sends((0, 1))).seconds == 4, "one pair cannot have all"
    assert play(mesh, sends((0, 1), (0, 2), (0, 3))).seconds == 4, "but three pairs run side by side"


def test_a_link_of_its_own_is_shared_with_nobody():
    own = Link(latency=0.0, bandwidth=2 * SHARD)
    topology = flat(3, links=((0, 1, own),))
    assert of_kind(play(topology, sends((0, 1), (0, 2))), "send") == [(0, 0.0, 0.5), (0, 0.0, 1.0)]


@pytest.mark.parametrize(("two_sided", "starts"), [(False, 0.0), (True, 5.0)])
def test_a_two_sided_message_waits_for_its_receiver(two_sided, starts):
    timeline = play(flat(2, two_sided=two_sided), attend(1), sends((0, 1)), seconds={0: 5.0})
    assert of_kind(timeline, "send") == [(0, starts, starts + 1)]
    assert timeline.seconds == max(5.0, starts + 1)


def test_computing_is_slower_while_messages_run():
    ops = (sends((0, 1)), attend(0))
    for loss, seconds in ((0.0, 10.0), (0.5, 10.5)):
        topology = flat(2, two_sided=True, comm_slowdown=loss)
        assert play(topology, *ops, seconds={1: 10.0}).seconds == pytest.approx(seconds)


def test_ranks_share_cores():
    ops, seconds = (attend(0), attend(1)), {0: 10.0, 1: 10.0}
    assert play(flat(2, cores=2), *ops, seconds=seconds).seconds == 10
    assert play(flat(2, cores=1), *ops, seconds=seconds).seconds == 20
    assert play(flat(2, cores=1), *ops, seconds={0: 10.0, 1: 5.0}).seconds == 15


def test_sending_takes_a_core_from_computing():
    four = Link(latency=0.0, bandwidth=SHARD / 4)
    timeline = play(
        flat(2, cores=2, intra=four), sends((0, 1)), attend(0), attend(1), seconds={1: 10.0, 2: 10.0}
    )
    # Three lanes on two cores until the message is there, after 4 s of work at two thirds of the speed.
    assert of_kind(timeline, "send") == [(0, 0.0, pytest.approx(6.0))]
    assert timeline.seconds == pytest.approx(12)


def test_what_leaves_a_machine_takes_no_core():
    four = Link(latency=0.0, bandwidth=SHARD / 4)
    apart = Topology(machines=2, devices=1, intra=UNIT, inter=four, cores=1)
    timeline = play(apart, sends((0, 1)), attend(0), attend(1), seconds={1: 10.0, 2: 10.0})
    assert of_kind(timeline, "send") == [(0, 0.0, 4.0)]
    assert timeline.seconds == 10


def test_many_messages_of_one_rank_are_one_lane():
    two = play(flat(3, cores=1), sends((0, 1), (0, 2)), attend(1), seconds={1: 2.0})
    # The lane that sends has half of the core, as has the one that computes: 2 s of work each.
    assert two.seconds == pytest.approx(4)


def test_barriers_hold_everyone_before_an_exchange():
    ops, seconds = (attend(0), attend(1), sends((0, 2))), {0: 1.0, 1: 5.0}
    free, held = (play(flat(3, barriers=b), *ops, seconds=seconds) for b in (False, True))
    assert of_kind(free, "send") == [(0, 1.0, 2.0)]
    assert of_kind(held, "send") == [(0, 5.0, 6.0)]
    assert sorted(of_kind(held, "barrier")) == [(0, 1.0, 5.0), (2, 0.0, 5.0)]


def test_what_came_is_passed_on_only_when_it_is_there():
    again = Exchange((Transfer(kv(0), 1, 2),), "hop 2")
    timeline = play(flat(3), sends((0, 1)), again, attend(2, keys_of=0), seconds={2: 1.0})
    assert of_kind(timeline, "send") == [(0, 0.0, 1.0), (1, 1.0, 2.0)]
    assert of_kind(timeline, "wait") == [(0, 0.0, 1.0), (1, 0.0, 1.0), (1, 1.0, 2.0), (2, 0.0, 2.0)]
    assert of_kind(timeline, "attend") == [(2, 2.0, 3.0)]


def test_part_of_what_came_is_passed_on_only_when_it_is_there():
    half = Piece("kv", kv(0).heads, Indices.span(0, TOKENS // 2))
    timeline = play(flat(3), sends((0, 1)), Exchange((Transfer(half, 1, 2),), "hop 2"))
    assert of_kind(timeline, "send") == [(0, 0.0, 1.0), (1, 1.0, 1.5)]


def test_results_arrive_in_place():
    out = Exchange((Transfer(Piece("o", kv(0).heads, kv(0).tokens), 1, 0),), "return")
    timeline = play(flat(2, memory_bandwidth=SHARD), out)
    packed = SHARD / 2 * 2 / SHARD
    # The one that sends has nothing that is its own: its result is zeros.
    assert of_kind(timeline, "copy") == [(1, 0.0, packed), (1, packed, 2 * packed)]
    assert of_kind(timeline, "wait") == [(0, 0.0, packed + 0.5)]


def test_posting_and_packing_cost_the_rank_its_time():
    copied = play(flat(2, memory_bandwidth=SHARD / 2), sends((0, 1)))
    # A shard is read and written; then both make a result of zeros, for they compute nothing.
    assert of_kind(copied, "copy") == [(0, 0.0, 4.0), (0, 4.0, 6.0), (1, 0.0, 2.0)]
    posted = play(flat(2, post_seconds=3.0), sends((0, 1)))
    assert of_kind(posted, "copy") == [(0, 0.0, 3.0), (1, 0.0, 3.0)]
    assert posted.seconds == 4


def test_a_ring_copies_its_shard_once_and_ulysses_its_inputs_twice():
    layout = Layout.even(64, 4)
    problem = Problem(batch=1, heads=4, kv_heads=4, head_dim=1, q=layout, kv=layout)
    topology = Topology(devices=4, intra=FREE, inter=FREE, memory_bandwidth=2.0, flops=1e30)
    tensor = 64 * 4  # bytes that a rank holds of q; a second each
    # Three quarters of q, k, v, o are packed; q, k, v are put together; o arrives in place but for its own.
    copied = 4 * tensor * 3 / 4 + 3 * tensor + tensor / 4
    for name, expected in (("ring", 2 * tensor), ("ulysses", copied)):
        timeline = simulate(build(name, problem, BlockMask.dense(4, 64)), topology)
        for rank in range(4):
            copies = [s.seconds for s in timeline.of(rank) if s.kind == "copy"]
            assert sum(copies) == pytest.approx(expected), name


def test_names_are_those_of_the_schedule():
    timeline = play(flat(2), sends((0, 1)), attend(1, keys_of=0), seconds={1: 1.0})
    assert [s.name for s in timeline.of(1)] == ["wait hop 1 ← 0", "attend hop 1"]
    assert [s.name for s in timeline.of(0) if s.kind == "send"] == ["send hop 1 → 1"]


def dense(name: str, ranks: int) -> Schedule:
    layout = Layout.even(840, ranks)
    problem = Problem(batch=1, heads=12, kv_heads=12, head_dim=8, q=layout, kv=layout)
    return build(name, problem, BlockMask.dense(12, 840))


@pytest.mark.parametrize("name", ["ring", "ulysses", "gather", "usp:2x2"])
@pytest.mark.parametrize("bandwidth", [1e7, 1e8, 1e12])
def test_the_cheap_predictor_agrees_where_nothing_is_shared(name, bandwidth):
    link = Link(latency=0.0, bandwidth=bandwidth)
    topology = Topology(devices=4, intra=link, inter=link, flops=1e10)
    found = simulate(dense(name, 4), topology).seconds
    assert found == pytest.approx(critical_path(dense(name, 4), topology).seconds, rel=0.15)
    if name == "ring":
        assert found == pytest.approx(critical_path(dense(name, 4), topology).seconds)


def test_a_slower_cluster_is_slower():
    layout = Layout.even(512, 8)
    problem = Problem(batch=1, heads=8, kv_heads=8, head_dim=8, q=layout, kv=layout)
    plan = build("usp:2x4", problem, random_mask(8, 512, 512, block=32, density=0.4, seed=3))
    base = Topology(machines=2, devices=4, intra=UNIT, inter=UNIT, nic_bandwidth=2.0 * SHARD)
    times = [simulate(plan, replace(base, nic_bandwidth=nic * SHARD)).seconds for nic in (0, 4, 2, 1)]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_nothing_takes_no_time():
    empty = BlockMask.from_tiles(np.zeros((1, 1, 1)), q_len=12, kv_len=12, block_q=12)
    timeline = simulate(build("ring", schedule(3).problem, empty), Topology.local(3))
    assert (timeline.seconds, timeline.spans) == (0.0, ())


def test_ranks_must_be_those_of_the_topology():
    with pytest.raises(InputError, match="local has 3 ranks, the schedule 2"):
        simulate(schedule(2, sends((0, 1))), Topology.local(3))
