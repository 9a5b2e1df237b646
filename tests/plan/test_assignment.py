"""Assignments: values that travel, that say whether they fit, and what changes between two of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.codec import dumps, loads
from weft.core.errors import InputError
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.topology import Topology
from weft.masks.random import random_mask
from weft.plan.assignment import Assignment
from weft.plan.balanced import Balancer
from weft.plan.choose import build
from weft.plan.split import HeadPart
from weft.plan.strategies import parse
from weft.schedule.verify import verify

STRATEGY = parse("usp:2x2+balanced", 4)
MASK = random_mask(5, 203, 203, block=16, density=0.4, seed=3)
LAYOUT = Layout.even(203, 4)
PROBLEM = Problem(batch=1, heads=5, kv_heads=5, head_dim=8, q=LAYOUT, kv=LAYOUT)


def assignment(mask: BlockMask = MASK) -> Assignment:
    return Balancer(PROBLEM, mask, Topology.local(4)).assign(STRATEGY).assignment


def with_head(part: HeadPart) -> Assignment:
    """Head 0 in other words."""
    heads = [[part if each.head == 0 else each for each in group] for group in assignment().heads]
    return replace(assignment(), heads=tuple(map(tuple, heads)))


def test_it_fits_the_masks_of_its_grid_and_no_others() -> None:
    found = assignment()
    assert found.fits(PROBLEM, MASK, STRATEGY)
    assert found.fits(PROBLEM, random_mask(5, 203, 203, block=16, density=0.9, seed=8), STRATEGY)
    assert not found.fits(PROBLEM, random_mask(5, 203, 203, block=8, density=0.4), STRATEGY)
    assert not found.fits(PROBLEM, MASK, parse("ulysses+balanced", 4))
    assert not found.fits(replace(PROBLEM, heads=6, kv_heads=6), MASK, STRATEGY)


ROWS = -(-203 // 16)
WRONG = {
    "a head twice": replace(assignment(), heads=(assignment().heads[0] * 2, assignment().heads[1])),
    "a head missing": replace(assignment(), heads=(assignment().heads[0][1:], assignment().heads[1])),
    "a head too many": with_head(HeadPart(5)),
    "a negative head": with_head(HeadPart(-1)),
    "no rows": with_head(HeadPart(0, Indices())),
    "rows missing": with_head(HeadPart(0, Indices.span(0, ROWS - 1))),
    "rows too many": with_head(HeadPart(0, Indices.span(0, ROWS + 1))),
    "rows without end": with_head(HeadPart(0, Indices(((0, 1 << 50), (1, 2))))),
    "rows out of order": with_head(HeadPart(0, Indices(((1, ROWS), (0, 1))))),
    "negative rows": with_head(HeadPart(0, Indices(((-1, ROWS - 1),)))),
    "a rank too many": replace(assignment(), rows=np.full_like(assignment().rows, 2)),
    "a negative rank": replace(assignment(), cols=np.full_like(assignment().cols, -1)),
    "blocks missing": replace(assignment(), rows=assignment().rows[:, 1:]),
    "other blocks": replace(assignment(), kv_unit=8),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_have_everything_once_does_not_fit(wrong: str) -> None:
    assert not WRONG[wrong].fits(PROBLEM, MASK, STRATEGY)
    with pytest.raises(InputError, match="does not fit"):
        build(str(STRATEGY), PROBLEM, MASK, assignment=WRONG[wrong])


@pytest.mark.parametrize("rows", [np.zeros(3, int), np.zeros((1, 3), int), np.zeros((2, 3))])
def test_what_is_no_assignment_is_refused(rows: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"integers \[2, units\]"):
        Assignment(assignment().heads, rows, assignment().cols, 16, 16)


@given(seed=st.integers(0, 99), ring=st.sampled_from([1, 2, 255, 256, 257, 70_000]))
def test_it_travels_in_few_bytes_and_stays_itself(seed: int, ring: int) -> None:
    random = np.random.default_rng(seed)
    rows, cols = (random.integers(0, ring, (2, size)) for size in (500, 400))
    plain = Assignment(assignment().heads, rows, cols, 4, 4)
    found = loads(dumps(plain.packed()))
    assert found == plain and hash(found) == hash(plain)
    assert np.array_equal(found.rows, rows) and np.array_equal(found.cols, cols)
    assert len(dumps(plain.packed())) < len(dumps(plain)) / (1.9 if ring > 65_536 else 3)


def test_a_plan_of_a_packed_one_is_the_same() -> None:
    found = assignment()
    assert found.packed().fits(PROBLEM, MASK, STRATEGY)
    schedules = [build(str(STRATEGY), PROBLEM, MASK, assignment=each) for each in (found, found.packed())]
    verify(schedules[1])
    assert schedules[0] == schedules[1]


def test_what_moved_is_a_share_of_the_blocks() -> None:
    found = assignment()
    assert found.moved(found) == 0
    rows = found.rows.copy()
    rows[0, 0] = 1 - rows[0, 0]
    assert replace(found, rows=rows).moved(found) == pytest.approx(0.5 / rows.size)
    assert found.moved(Balancer(PROBLEM, MASK, Topology.local(4)).assign(parse("ring", 4)).assignment) == 1
