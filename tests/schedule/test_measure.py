"""What a schedule costs a rank: peak memory, messages, balance."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from tests.cases import cases
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.problem import Problem
from weft.core.schedule import Exchange, Piece, Schedule, Transfer
from weft.plan.choose import build
from weft.schedule.measure import measure
from weft.schedule.reverse import reverse

BATCH, DIM, SHARD = 2, 5, 7


def problem(ranks: int, heads: int) -> Problem:
    layout = Layout.even(SHARD * ranks, ranks)
    return Problem(
        batch=BATCH, heads=heads, kv_heads=heads, head_dim=DIM, q=layout, kv=layout, dtype="bfloat16"
    )


def dense(name: str, ranks: int, heads: int) -> Schedule:
    return build(name, problem(ranks, heads), BlockMask.dense(heads, SHARD * ranks))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ulysses_holds_three_tensors_of_its_heads_and_a_float32_output(ranks):
    heads = 2 * ranks
    one = BATCH * DIM * SHARD * heads  # E/P
    received = 3 * one * (ranks - 1) // ranks
    assert set(measure(dense("ulysses", ranks, heads)).peak_memory) == {(4 * one + received) * 2 + one * 4}


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ring_never_holds_more_than_two_shards_of_others(ranks):
    one = BATCH * DIM * SHARD * 3
    shards = min(2, ranks - 1)
    expected = 4 * one * 2 + shards * 2 * one * 2 + one * 4
    assert max(measure(dense("ring", ranks, 3)).peak_memory) == expected


@given(cases(max_tokens=97))
@settings(max_examples=50)
def test_peak_is_at_least_what_lies_at_home(case):
    p = case.problem
    for schedule in (case.schedule, reverse(case.schedule)):
        for rank, peak in enumerate(measure(schedule).peak_memory):
            rows = 2 * p.heads * p.q.rows(rank) + 2 * p.kv_heads * p.kv.rows(rank)
            assert peak >= rows * p.batch * p.head_dim * p.item_bytes


@pytest.mark.parametrize("name", ["ring", "gather", "usp:2x3"])
def test_to_keep_keys_costs_memory_and_saves_bytes(name):
    kept, sent = (measure(reverse(dense(name, 6, 6), keep=keep)) for keep in ("all", "none"))
    assert max(kept.peak_memory) >= max(sent.peak_memory)
    assert kept.total_bytes < sent.total_bytes


def test_padding_lies_in_memory_and_is_not_computed():
    plain, padded = problem(3, 3), problem(3, 3)
    padded = replace(padded, q=padded.q.padded(SHARD + 2), kv=padded.kv.padded(SHARD + 2))
    mask = BlockMask.dense(3, 3 * SHARD)
    less, more = (measure(build("ring", p, mask)) for p in (plain, padded))
    assert (less.work, less.link_bytes) == (more.work, more.link_bytes)
    assert [b - a for a, b in zip(less.peak_memory, more.peak_memory, strict=True)] == [
        2 * 4 * 3 * BATCH * DIM * 2
    ] * 3


def test_one_message_for_each_pair_and_point():
    report = measure(dense("ulysses", 3, 3))
    assert set(report.messages.values()) == {2}  # q with kv on the way there, o on the way home


def test_zigzag_balances_a_causal_mask_and_a_plain_ring_does_not():
    ranks = 4
    tiles = np.tril(np.ones((1, 2 * ranks, 2 * ranks)))
    mask = BlockMask.from_tiles(tiles, q_len=40, kv_len=40, block_q=5)
    layout = Layout.zigzag(40, ranks)
    home = {"q": layout, "kv": layout, "batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 4}
    assert measure(build("zigzag", Problem(**home), mask)).imbalance == 1.0
    home |= {"q": Layout.even(40, ranks), "kv": Layout.even(40, ranks)}
    # Blocks of rank r: 2r+1 and 2r+2 tiles; the last has 15 of 36.
    assert measure(build("ring", Problem(**home), mask)).imbalance == 15 * ranks / 36


def test_nothing_to_do_is_no_imbalance():
    empty = BlockMask.from_tiles(np.zeros((3, 1, 1)), q_len=21, kv_len=21, block_q=64)
    assert measure(build("ring", problem(3, 3), empty)).imbalance == 1


def test_partial_gradients_from_several_ranks_each_need_room():
    piece = Piece("dkv", Indices.span(0, 3), Indices.span(0, SHARD))
    arrivals = tuple(Transfer(piece, src, 0) for src in (1, 2))
    mask, mesh = BlockMask.dense(3, 3 * SHARD), Mesh.of(ring=3)
    one, both = (
        measure(Schedule("sum", problem(3, 3), mask, mesh, (Exchange(moves),), backward=True)).peak_memory[0]
        for moves in (arrivals[:1], arrivals)
    )
    assert both - one == piece.num_bytes(problem(3, 3))
