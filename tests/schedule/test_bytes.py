"""Bytes on every link: the formulas of limits.md where sizes divide, and what holds where they do not.

With E = B·L·H·D elements of a query, K = E·H_kv/H of a key, P = U·R ranks, and s (f) bytes of an element
that is copied (summed):

    forward    q  = o = (E/P)·(U-1)/U      kv = 2·(K/P)·((U-1)/U + R-1) = 2·(K/P)·(P-1)/U     all · s
    backward   do = o · s    dq = q · f    dkv = kv · f    and kv · s again if it was not kept
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from tests.cases import cases, token_mask
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.plan.choose import build
from weft.schedule.reverse import reverse
from weft.schedule.verify import verify

BATCH, DIM = 2, 5


def problem(ranks: int, tokens: int, heads: int, kv_heads: int, dtype: str = "bfloat16") -> Problem:
    layout = Layout.even(tokens, ranks)
    return Problem(
        batch=BATCH, heads=heads, kv_heads=kv_heads, head_dim=DIM, q=layout, kv=layout, dtype=dtype
    )


def matrix(schedule: Schedule, *tensors: str) -> np.ndarray:
    """Elements of some tensors from row to column."""
    found = np.zeros((schedule.problem.ranks,) * 2, dtype=np.int64)
    for _, transfer in schedule.transfers():
        if not tensors or transfer.piece.tensor in tensors:
            found[transfer.src, transfer.dst] += transfer.piece.elements(schedule.problem)
    return found


def around(ranks: int, each: int) -> np.ndarray:
    """`each` from every rank to the next of its ring."""
    return np.roll(np.eye(ranks, dtype=np.int64), 1, axis=1) * each


def everyone(ranks: int, each: int) -> np.ndarray:
    """`each` from every rank to every other."""
    return (1 - np.eye(ranks, dtype=np.int64)) * each


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("share", [1, 2])
def test_ulysses_sends_each_rank_its_heads_of_each_shard(ranks, share):
    heads, kv_heads, tokens = 2 * ranks * share, 2 * ranks, 7 * ranks
    case = problem(ranks, tokens, heads, kv_heads)
    report = verify(build("ulysses", case, BlockMask.dense(heads, tokens)))
    link = 7 * BATCH * DIM * (2 * heads + 2 * kv_heads) // ranks
    assert (report.matrix() == everyone(ranks, link * 2)).all()
    E = BATCH * DIM * tokens * heads
    for rank in range(ranks):
        # (2 + 2·H_kv/H)·(E/P)·(P-1)/P, over one denominator to stay in integers
        assert report.sent(rank) * heads * ranks**2 == 2 * (2 * heads + 2 * kv_heads) * E * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", ["ring", "zigzag"])
def test_ring_sends_keys_and_values_once_around(ranks, name):
    tokens = 6 * ranks
    layout = Layout.even(tokens, ranks) if name == "ring" else Layout.zigzag(tokens, ranks)
    case = Problem(batch=BATCH, heads=6, kv_heads=3, head_dim=DIM, q=layout, kv=layout, dtype="bfloat16")
    report = verify(build(name, case, BlockMask.dense(6, tokens)))
    K = BATCH * DIM * tokens * 3
    assert (report.matrix() == around(ranks, 2 * (K // ranks) * (ranks - 1) * 2)).all()
    assert set(report.messages.values()) == {ranks - 1}


@pytest.mark.parametrize(("u", "r"), [(1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (4, 3), (2, 5)])
@pytest.mark.parametrize("share", [1, 3])
def test_usp_sends_heads_along_one_axis_and_keys_along_the_other(u, r, share):
    ranks, kv_heads, tokens = u * r, 2 * u, 7 * u * r
    heads = kv_heads * share
    schedule = build(f"usp:{u}x{r}", problem(ranks, tokens, heads, kv_heads), BlockMask.dense(heads, tokens))
    verify(schedule)
    E = BATCH * DIM * tokens * heads
    K = E // share
    inside = np.kron(np.eye(r, dtype=np.int64), everyone(u, 1))  # ranks that differ along ulysses
    onward = np.kron(around(r, 1), np.eye(u, dtype=np.int64)) if r > 1 else 0
    assert (matrix(schedule, "q") == inside * (E // (ranks * u))).all()
    assert (matrix(schedule, "o") == inside * (E // (ranks * u))).all()
    hops = onward * (2 * K // ranks * (r - 1))
    assert (matrix(schedule, "kv") == inside * (2 * K // (ranks * u)) + hops).all()
    per_rank = matrix(schedule).sum(axis=1)
    assert (per_rank * ranks * u == (2 * E + 2 * K) * (u - 1) + 2 * K * (r - 1) * u).all()


@pytest.mark.parametrize("seed", range(20))
def test_gather_fetches_the_blocks_that_are_needed_and_not_owned(seed):
    rng = np.random.default_rng(seed)
    ranks, kv_heads, share, block = int(rng.integers(2, 6)), 3, int(rng.integers(1, 3)), 7
    tokens = block * ranks * 2
    tiles = rng.random((kv_heads * share, ranks * 2, ranks * 2)) < rng.random()
    mask = BlockMask.from_tiles(tiles, q_len=tokens, kv_len=tokens, block_q=block)
    case = problem(ranks, tokens, kv_heads * share, kv_heads)
    schedule = build("gather", case, mask)
    # [kv head, reader, reader's rows, owner, owner's keys]: who reads whose keys, straight from the mask
    own = tokens // ranks
    grid = token_mask(mask).reshape(kv_heads, share, ranks, own, ranks, own)
    fetched = grid.any(axis=(1, 3)).sum(axis=(0, 3)).T * 2 * BATCH * DIM
    np.fill_diagonal(fetched, 0)
    assert (matrix(schedule) == fetched).all()
    assert (verify(schedule).matrix() == fetched * 2).all()


@pytest.mark.parametrize("keep", ["all", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["ulysses", "ring", "gather", "usp:2x3", "usp:3x2"])
def test_backward_sends_gradients_as_their_tensors_came_and_keys_again_if_not_kept(name, dtype, keep):
    tokens, heads, kv_heads = 42, 12, 6
    forward = build(name, problem(6, tokens, heads, kv_heads, dtype), BlockMask.dense(heads, tokens))
    report = verify(reverse(forward, keep=keep))
    q, kv, o = (matrix(forward, tensor) for tensor in ("q", "kv", "o"))
    item, summed = forward.problem.item_bytes, forward.problem.sum_bytes
    # Partial dkv goes straight home, so its links are not those of a ring; each rank still sends what it got.
    again = kv * item if keep == "none" else 0 * kv
    expected = (o.T * item + q.T * summed + again).sum(axis=1) + kv.sum(axis=0) * summed
    assert [report.sent(rank) for rank in range(6)] == expected.tolist()
    if item == summed and keep == "none":
        assert report.total_bytes <= 2 * verify(forward).total_bytes


@pytest.mark.parametrize(("u", "r"), [(1, 5), (5, 1), (2, 3), (3, 2)])
def test_partial_key_gradients_go_straight_home_on_every_link(u, r):
    ranks, heads = u * r, 2 * u
    tokens = 7 * ranks
    schedule = build(f"usp:{u}x{r}", problem(ranks, tokens, heads, heads), BlockMask.dense(heads, tokens))
    gradients = reverse(schedule, keep="all")
    K = BATCH * DIM * tokens * heads
    assert (matrix(gradients, "dkv") == everyone(ranks, 2 * K // (ranks * u))).all()
    assert (matrix(gradients, "dq") == matrix(schedule, "q").T).all()
    assert (matrix(gradients, "do") == matrix(schedule, "o").T).all()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_auto_keeps_keys_where_they_no_more_than_double_what_is_held(ranks):
    tokens, heads = 7 * ranks, 2 * ranks
    case, mask = problem(ranks, tokens, heads, heads), BlockMask.dense(heads, tokens)
    assert not matrix(reverse(build("ulysses", case, mask)), "kv").any()
    assert matrix(reverse(build("ring", case, mask)), "kv").any() == (ranks > 2)


@given(cases(max_tokens=97))
@settings(max_examples=80)
def test_no_rank_sends_more_gradient_than_it_received_of_the_tensor(case):
    forward, backward = case.schedule, reverse(case.schedule, keep="none")
    assert (matrix(backward, "do") == matrix(forward, "o").T).all()
    if (
        "torus" in case.name
    ):  # its queries come through another device of their machine, dq goes straight home
        assert (matrix(backward, "dq").sum(axis=1) <= matrix(forward, "q").sum(axis=0)).all()
    else:
        assert (matrix(backward, "dq") <= matrix(forward, "q").T).all()
    assert (matrix(backward, "kv") == matrix(forward, "kv")).all()
    assert (matrix(backward, "dkv").sum(axis=1) <= matrix(forward, "kv").sum(axis=0)).all()
    assert verify(backward).total_bytes <= 2 * verify(forward).total_bytes


@given(cases(max_tokens=97))
@settings(max_examples=80)
def test_report_adds_up_the_transfers(case):
    report, links = verify(case.schedule), Counter()
    for _, transfer in case.schedule.transfers():
        links[transfer.src, transfer.dst] += transfer.piece.num_bytes(case.problem)
    assert report.link_bytes == links
    assert report.total_bytes == sum(links.values()) == sum(map(report.sent, range(report.ranks)))
    assert (report.matrix() == matrix(case.schedule) * case.problem.item_bytes).all()
    assert set(report.messages) == set(links)
