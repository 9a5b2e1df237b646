"""Strategies: every name reads back as itself, what is none says what would be one, one file is enough."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.problem import Problem
from weft.masks.random import random_mask
from weft.plan import strategies
from weft.plan.choose import build, choose
from weft.plan.strategies import kinds, parse
from weft.plan.strategy import BALANCES, factors
from weft.schedule.reverse import reverse
from weft.schedule.verify import verify


@given(
    st.integers(1, 48),
    st.data(),
    st.sampled_from(kinds()),
    st.sampled_from(BALANCES),
)
def test_names_read_back(ranks, data, kind, balance):
    ulysses, ring = data.draw(st.sampled_from(factors(ranks)))
    strategy = kind(ulysses, ring, balance)
    again = parse(str(strategy), ranks)
    assert str(again) == str(strategy)
    assert (again.ulysses, again.ring, again.balance) == (ulysses, ring, balance)
    assert type(again) is kind or (kind.kind == "swapped" and 1 in (ulysses, ring))  # there is no difference


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("ulysses", Mesh.of(ring=1, ulysses=6)),
        ("ring+balanced", Mesh.of(ring=6, ulysses=1)),
        ("zigzag", Mesh.of(ring=6, ulysses=1)),
        ("usp:2x3+cuts", Mesh.of(ring=3, ulysses=2)),
        ("swapped:2x3", Mesh.of(ulysses=2, ring=3)),
        ("gather:3x2", Mesh.of(ring=2, ulysses=3)),
    ],
)
def test_the_inner_axis_runs_fastest(name, mesh):
    assert parse(name, 6).mesh == mesh


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("usp:2x2", "needs 4 ranks; there are 6.*usp:1x6, usp:2x3"),
        ("ulises", "no strategy 'ulises'.*ring, ulysses"),
        ("ring+blocks", "no balance 'blocks'.*balanced, cuts"),
        ("usp:0x6", "needs 0 ranks"),
        ("zigzag+balanced", "zigzag takes no other balance"),
        ("zigzag+foo", "no balance 'foo'"),
    ],
)
def test_what_is_no_strategy_says_what_would_be(name, says):
    with pytest.raises(InputError, match=says):
        parse(name, 6)


@pytest.fixture
def broadcast(tmp_path, monkeypatch):
    """The file of docs/add-strategy.md, as it stands there, in the folder."""
    page = Path(__file__).parents[2] / "docs/add-strategy.md"
    text = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "broadcast.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(tmp_path)])
    sys.modules.pop("weft.plan.strategies.broadcast", None)
    kinds.cache_clear()
    yield
    kinds.cache_clear()


@pytest.mark.parametrize("name", ["broadcast", "broadcast:2x3+balanced", "broadcast+cuts", "broadcast:6x1"])
def test_a_file_in_the_folder_is_a_strategy(broadcast, name):
    tokens = Layout.even(203, 6, prefix=7)
    problem = Problem(batch=1, heads=4, kv_heads=2, head_dim=8, q=tokens, kv=tokens)
    mask = random_mask(4, 203, 203, block=16, density=(0.3,), seed=1)
    schedule = build(name, problem, mask)
    assert schedule.name == name == str(parse(name, 6))
    verify(schedule)
    verify(reverse(schedule))
    assert "broadcast" not in {option.strategy.kind for option in choose(problem, mask).ranked}


def test_no_file_no_strategy():
    with pytest.raises(InputError, match="no strategy 'broadcast'"):
        parse("broadcast", 6)
    tokens = Layout.even(5, 1)
    problem = Problem(batch=1, heads=1, kv_heads=1, head_dim=8, q=tokens, kv=tokens)
    assert build("usp:1x1", problem, BlockMask.dense(1, 5)).name == "ring"
