"""Torus Attention: exact on every grid of machines, staged as the paper stages it, and broken ones go red."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.run.dense import Truth
from tests.run.test_execute import both_ways, on_every_rank
from weft.core.errors import InputError, ScheduleError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Schedule
from weft.core.topology import Topology
from weft.masks.random import random_mask
from weft.plan.choose import build
from weft.plan.strategy import factors
from weft.schedule.measure import measure
from weft.schedule.reverse import reverse
from weft.schedule.torus import torus
from weft.schedule.verify import verify

GRIDS = [(n, m) for n in (1, 2, 3, 4) for m in (1, 2)]
TUNED = ("", "d0", "c2d1", "c3", "+balanced", "c2+cuts")


def problem(
    ranks: int, heads: int, tokens: int, kv_heads: int | None = None, q: Layout | None = None
) -> Problem:
    layout = q or Layout.even(tokens, ranks)
    return Problem(
        batch=1, heads=heads, kv_heads=kv_heads or heads, head_dim=3, q=layout, kv=layout, dtype="float64"
    )


def dense(name: str, machines: int, devices: int, heads: int = 12, tokens: int = 96) -> Schedule:
    where = Topology(machines=machines, devices=devices)
    return build(name, problem(where.ranks, heads, tokens), BlockMask.dense(heads, tokens), where)


def oddities(ranks: int) -> list[tuple[Problem, BlockMask]]:
    """One rank more than heads; shared key heads; an empty rank and blocks that lie on two machines."""
    few = max(1, ranks - 1)
    uneven = Layout.uneven([0, *[7 + 3 * (rank % 2) for rank in range(ranks - 1)], 5][-ranks:], prefix=2)
    size = uneven.size
    return [
        (problem(ranks, few, 41), BlockMask.dense(few, 41)),
        (problem(ranks, 6, 37, 3), random_mask(6, 37, 37, block=4, density=0.5)),
        (problem(ranks, 3, size, q=uneven), random_mask(3, size, size, block=8, density=0.4, seed=1)),
    ]


@pytest.mark.parametrize(("machines", "devices"), GRIDS)
def test_outputs_and_gradients_are_those_of_dense_attention(machines, devices):
    where = Topology(machines=machines, devices=devices)
    dense_one, *sparse = oddities(where.ranks)
    for at, (ulysses, ring) in enumerate(factors(where.ranks)):
        for case, mask in (dense_one, sparse[at % 2]):
            truth = Truth.of(case, mask)
            name = f"torus:{ulysses}x{ring}{TUNED[(at + mask.is_dense) % len(TUNED)]}"
            plan = build(name, case, mask, where)
            results = on_every_rank(
                plan, lambda executor, truth=truth: both_ways(executor, truth), "auto", "exact"
            )
            assert truth.output_error([out for out, _ in results]) < 1e-10
            assert truth.gradient_error([grads for _, grads in results]) < 1e-10


@pytest.mark.parametrize(("machines", "devices"), GRIDS)
def test_every_torus_is_proven_both_ways(machines, devices):
    where = Topology(machines=machines, devices=devices)
    for case, mask in oddities(where.ranks):
        for ulysses, ring in factors(where.ranks):
            for tuned in TUNED[ring % 3 :: 3]:
                schedule = build(f"torus:{ulysses}x{ring}{tuned}", case, mask, where)
                verify(schedule)
                verify(reverse(schedule, keep="all" if ring % 2 else "none"))


def outline(schedule: Schedule) -> list[str]:
    """Labels of exchanges; attends as the machines (from rank 0) of their queries × of their keys."""
    found = []
    for op in schedule.ops:
        if isinstance(op, Exchange):
            found.append(op.label)
        elif op.rank == 0:
            machines = schedule.problem.q.holders
            found.append(
                f"{''.join(map(str, machines(op.q.tokens)))}x{''.join(map(str, machines(op.kv.tokens)))}"
            )
    return found


def test_the_stages_of_the_paper():
    assert outline(dense("torus:4x1", 4, 1)) == [
        "pull q 1", "0x0", "pull q 2", "1x0", "pull q 3", "2x0", "pull kv 1", "3x0",
        "pull kv 2", "123x1", "pull kv 3", "123x2",
        "1x3", "push o 1", "2x3", "push o 2", "3x3", "push o 3",
        "0x1", "0x2", "0x3",
    ]  # fmt: skip


def test_stages_that_are_not_put_off_join_the_others():
    stages = outline(dense("torus:4x1d1", 4, 1))
    assert stages[8:] == [
        "pull kv 2", "0123x1", "pull kv 3", "0123x2",
        "1x3", "push o 1", "2x3", "push o 2", "3x3", "push o 3", "0x3",
    ]  # fmt: skip
    assert outline(dense("torus:4x1d0", 4, 1))[-2:] == ["push o 3", "0x3"]


def test_halves_are_posted_a_whole_machine_ahead():
    assert outline(dense("torus:2x1c2", 2, 1)) == [
        "pull q 1", "pull q 2", "0x0", "pull kv 1", "1x0", "pull kv 2", "1x0", "1x1",
        "1x1", "push o 1", "1x1", "push o 2", "0x1", "0x1",
    ]  # fmt: skip


def test_one_machine_has_no_stages():
    labels = {op.label for op in dense("torus:2x2", 1, 4).ops if isinstance(op, Exchange)}
    assert labels == {"scatter", "pass kv 0", "return"}


@pytest.mark.parametrize(
    ("name", "machines", "devices"),
    [("torus:4x2", 4, 2), ("torus:2x4c2", 4, 2), ("torus:8x1", 4, 2), ("torus:3x2", 3, 2)],
)
def test_device_i_pulls_from_device_i_and_each_machine_is_read_by_one_other(name, machines, devices):
    schedule = dense(name, machines, devices, heads=24)
    pulls = [op for op in schedule.ops if isinstance(op, Exchange) and op.label.startswith("pull")]
    assert pulls
    for op in pulls:
        assert all(t.src % devices == t.dst % devices for t in op.transfers)
        readers = {(t.src // devices, t.dst // devices) for t in op.transfers}
        assert (
            Counter(src for src, _ in readers)
            == Counter(dst for _, dst in readers)
            == Counter(range(machines))
        )
        assert all(src != dst for src, dst in readers)
    inside = [
        op for op in schedule.ops if isinstance(op, Exchange) and op.label[:4] in ("gath", "pass", "scat")
    ]
    assert all(t.src // devices == t.dst // devices for op in inside for t in op.transfers)


def test_keys_come_to_a_machine_once_and_are_passed_on_inside_it():
    schedule = dense("torus:3x2", 3, 2)
    arrived = Counter()
    for _, transfer in schedule.transfers():
        if transfer.piece.tensor == "kv" and transfer.src // 2 != transfer.dst // 2:
            for token in transfer.piece.tokens:
                arrived[transfer.dst // 2, token] += transfer.piece.heads.size
    assert set(arrived.values()) == {4}  # 12 heads over 3 machines, each token's once
    assert len(arrived) == 3 * 64


def test_what_the_mask_does_not_read_is_not_sent():
    band = np.tri(24, k=1) * np.tri(24, k=1).T
    mask = BlockMask.from_tiles(band[None].repeat(12, axis=0), q_len=96, kv_len=96, block_q=4)
    local = build("torus:2x4", problem(8, 12, 96), mask, Topology(machines=4, devices=2))
    verify(local)
    assert measure(local).total_bytes < 0.8 * measure(dense("torus:2x4", 4, 2)).total_bytes
    read = {(op.rank, token) for _, op in local.attends() for token in op.kv.tokens}
    pulled = [t for _, t in local.transfers() if t.piece.tensor == "kv" and t.src // 2 != t.dst // 2]
    # The ranks of a machine are one ring: what comes is read by one of the two.
    assert all({(t.dst, x), (t.dst ^ 1, x)} & read for t in pulled for x in t.piece.tokens)


def test_a_mask_without_far_keys_still_sends_outputs_home():
    mask = BlockMask.from_tiles(np.eye(4)[None].repeat(4, axis=0), q_len=32, kv_len=32, block_q=8)
    stripes = BlockMask.from_tiles(np.tile([1, 0, 0, 0], (4, 4, 1)), q_len=32, kv_len=32, block_q=8)
    # Each head reads the keys of the machine that it goes to: queries come, keys never do.
    at_home = BlockMask.from_tiles(np.eye(4)[:, None].repeat(4, axis=1), q_len=32, kv_len=32, block_q=8)
    for some in (mask, stripes, at_home):
        for name in ("torus:4x1", "torus:2x2c2d1"):
            schedule = build(name, problem(4, 4, 32), some, Topology(machines=4))
            verify(schedule)
            verify(reverse(schedule))


def spoiled(schedule: Schedule, label: str, after: str | None) -> Schedule:
    """Without the first exchange of a label, or with it moved right after another one."""
    ops = list(schedule.ops)
    at = next(i for i, op in enumerate(ops) if isinstance(op, Exchange) and op.label == label)
    op = ops.pop(at)
    if after is not None:
        to = next(i for i, other in enumerate(ops) if isinstance(other, Exchange) and other.label == after)
        ops.insert(to + 1, op)
    return replace(schedule, ops=tuple(ops))


@pytest.mark.parametrize(
    ("label", "after"),
    [
        ("gather q", None), ("gather kv", None), ("scatter", None), ("pull q 1", None), ("pull kv 2", None),
        ("pass kv 1", None), ("push o 1", None), ("return", None),
        ("push o 1", "pull kv 2"), ("pull kv 1", "push o 1"), ("gather kv", "pull kv 1"),
        ("pull q 2", "pull kv 2"),
    ],
)  # fmt: skip
def test_a_broken_torus_is_refused(label, after):
    schedule = dense("torus:6x2", 3, 4)
    verify(schedule)
    with pytest.raises(ScheduleError):
        verify(spoiled(schedule, label, after))


def test_a_forgotten_call_is_refused():
    schedule = dense("torus:3x2", 3, 2)
    calls = [i for i, op in enumerate(schedule.ops) if isinstance(op, Attend)]
    for at in (calls[0], calls[len(calls) // 2], calls[-1]):
        with pytest.raises(ScheduleError):
            verify(replace(schedule, ops=schedule.ops[:at] + schedule.ops[at + 1 :]))


def test_machines_that_do_not_divide_the_ranks_are_refused():
    case, mesh = problem(4, 4, 32), Mesh.of(ulysses=4)
    nothing = Partition(((),) * 4, ())
    for wrong in (
        {"machines": 3},
        {"machines": 0},
        {"machines": 2, "chunks": 0},
        {"machines": 2, "defer": -1},
    ):
        with pytest.raises(InputError, match="machines must divide 4 ranks, chunks must be ≥ 1"):
            torus(case, BlockMask.dense(4, 32), mesh, nothing, **wrong)
