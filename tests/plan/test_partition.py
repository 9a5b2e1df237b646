"""Partitions: every active tile is somebody's, once, and no block is ever cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, cases
from weft.core.errors import InputError
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition
from weft.core.problem import Problem
from weft.plan.assignment import assemble, natural, zigzag_assignment


def zigzag(problem: Problem, mask: BlockMask, mesh: Mesh) -> Partition:
    return assemble(problem, mask, mesh, zigzag_assignment(problem, mask, mesh))


both = pytest.mark.parametrize("partitioner", [natural, zigzag])


def meshes(ranks: int) -> st.SearchStrategy[Mesh]:
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return st.sampled_from(divisors).map(lambda u: Mesh.of(ring=ranks // u, ulysses=u))


@st.composite
def cut(draw: st.DrawFn, partitioner) -> tuple[Case, Mesh, Partition]:
    case = draw(cases(max_tokens=97))
    mesh = draw(meshes(case.problem.ranks))
    return case, mesh, partitioner(case.problem, case.mask, mesh)


@both
@settings(max_examples=60)
@given(data=st.data())
def test_every_row_of_every_head_is_the_work_of_one_rank(partitioner, data):
    case, _, partition = data.draw(cut(partitioner))
    done = np.zeros((case.problem.heads, case.problem.q.size), dtype=int)
    for works in partition.work:
        for work in works:
            done[np.ix_(work.heads.array, work.rows.array)] += 1
    assert (done == 1).all()


@both
@settings(max_examples=60)
@given(data=st.data())
def test_every_ring_brings_every_key_once(partitioner, data):
    case, mesh, partition = data.draw(cut(partitioner))
    for ring in mesh.groups("ring"):
        brought = [*partition.shared, *(token for rank in ring for token in partition.cols[rank])]
        assert sorted(brought) == list(range(case.problem.kv.size))


@both
@settings(max_examples=60)
@given(data=st.data())
def test_blocks_are_never_cut(partitioner, data):
    case, _, partition = data.draw(cut(partitioner))
    mask = case.mask
    rows = [work.rows for works in partition.work for work in works]
    for tokens, block, size in (
        *((tokens, mask.block_q, mask.q_len) for tokens in rows),
        *((tokens, mask.block_k, mask.kv_len) for tokens in (*partition.cols, partition.shared)),
    ):
        whole = {n for b in tokens.blocks(block) for n in range(b * block, min((b + 1) * block, size))}
        assert mask.is_dense or set(tokens) == whole


@both
@settings(max_examples=60)
@given(data=st.data())
def test_shared_keys_are_on_every_rank(partitioner, data):
    case, mesh, partition = data.draw(cut(partitioner))
    assert case.problem.kv.shared.covers(partition.shared)
    assert not partition.shared or mesh.size("ring") > 1


def of(layout: Layout, heads: int = 3) -> Problem:
    return Problem(batch=1, heads=heads, kv_heads=heads, head_dim=4, q=layout, kv=layout)


def test_natural_leaves_tokens_where_they_are():
    layout = Layout.even(35, 5)
    mask = BlockMask.from_tiles(np.eye(5)[None].repeat(3, axis=0), q_len=35, kv_len=35, block_q=7)
    partition = natural(of(layout), mask, Mesh.of(ring=5))
    for rank in range(5):
        assert [work.rows for work in partition.work[rank]] == [layout.held(rank)]
        assert partition.cols[rank] == layout.held(rank)


def test_natural_gives_a_block_to_whom_holds_most_of_it():
    mask = BlockMask.from_tiles(np.eye(2)[None], q_len=10, kv_len=10, block_q=5)
    partition = natural(of(Layout.uneven([4, 6]), heads=1), mask, Mesh.of(ring=2))
    assert [partition.work[0][0].rows, partition.work[1][0].rows] == [Indices.span(0, 5), Indices.span(5, 10)]
    partition = natural(of(Layout.uneven([2, 8]), heads=1), mask, Mesh.of(ring=2))
    assert partition.work[0] == ()


def test_fewer_blocks_or_heads_than_ranks_leave_some_without_work():
    mask = BlockMask.from_tiles(np.eye(2)[None].repeat(3, axis=0), q_len=11, kv_len=11, block_q=7)
    assert sum(map(bool, natural(of(Layout.even(11, 5)), mask, Mesh.of(ring=5)).work)) == 2
    assert sum(map(bool, natural(of(Layout.even(11, 5)), mask, Mesh.of(ulysses=5)).work)) == 3


def test_replicated_queries_are_shared_out():
    problem = of(Layout.replicated(12, 3))
    works = natural(problem, BlockMask.dense(3, 12), Mesh.of(ring=3)).work
    assert [works[rank][0].rows.size for rank in range(3)] == [4, 4, 4]


def test_zigzag_pairs_early_and_late_blocks():
    mask = BlockMask.from_tiles(np.eye(6)[None], q_len=42, kv_len=42, block_q=7)
    works = zigzag(of(Layout.even(42, 3), heads=1), mask, Mesh.of(ring=3)).work
    assert [list(works[rank][0].rows.blocks(7)) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


@both
@pytest.mark.parametrize(
    ("mask", "mesh", "words"),
    [
        (BlockMask.dense(3, 11), Mesh.of(ring=3), "ring 3 has 3 ranks, the tensors are on 2. Use axes whose"),
        (BlockMask.dense(3, 11), Mesh.of(torus=2), "A mesh axis must be ring or ulysses, got 'torus'"),
        (BlockMask.dense(3, 7), Mesh.of(ring=2), "3 heads, 7 × 7 tokens; the tensors have 3 heads, 11 × 11"),
        (BlockMask.dense(2, 11), Mesh.of(ring=2), "for 2 heads.*Make the mask for the whole sequence"),
    ],
)
def test_what_does_not_fit_is_refused(partitioner, mask, mesh, words):
    with pytest.raises(InputError, match=words):
        partitioner(of(Layout.even(11, 2)), mask, mesh)
