"""What a schedule costs a rank: messages, bytes, balance."""

from dataclasses import replace

import numpy as np

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.plan.choose import build
from weft.schedule.measure import measure

BATCH, DIM, SHARD = 2, 5, 7


def problem(ranks: int, heads: int) -> Problem:
    layout = Layout.even(SHARD * ranks, ranks)
    return Problem(
        batch=BATCH, heads=heads, kv_heads=heads, head_dim=DIM, q=layout, kv=layout, dtype="bfloat16"
    )


def dense(name: str, ranks: int, heads: int) -> Schedule:
    return build(name, problem(ranks, heads), BlockMask.dense(heads, SHARD * ranks))


def test_padding_is_neither_sent_nor_computed():
    plain, padded = problem(3, 3), problem(3, 3)
    padded = replace(padded, q=padded.q.padded(SHARD + 2), kv=padded.kv.padded(SHARD + 2))
    mask = BlockMask.dense(3, 3 * SHARD)
    assert measure(build("ring", plain, mask)) == measure(build("ring", padded, mask))


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
