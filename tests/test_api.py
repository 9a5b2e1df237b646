"""The names of `import weft`: each has an example that runs and a short repr; `help` and `dir` list them."""

from __future__ import annotations

import doctest
import pydoc
import sys
import tempfile
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.core.errors import InputError
from weft.plan.choose import choose

NAMES: dict[str, Any] = {"torch": torch, "nn": nn, "weft": weft, "tempfile": tempfile}
"""What examples may use beside the names of their module."""


@pytest.mark.parametrize("name", weft.__all__)
def test_the_example_of_every_public_name_runs(name: str) -> None:
    value = getattr(weft, name)
    module = value if isinstance(value, ModuleType) else sys.modules[value.__module__]
    globs = vars(module) | NAMES
    test = doctest.DocTestParser().get_doctest(value.__doc__ or "", globs, name, None, None)
    assert test.examples, f"weft.{name} has no example"
    problems: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL).run(test, out=problems.append)
    assert not result.failed, "".join(problems)


def test_help_has_the_examples_and_all_names() -> None:
    text = pydoc.plain(pydoc.render_doc(weft))
    assert "weft.parallelize(pipe" in text
    assert "weft.verify(schedule)" in text
    assert all(name in text for name in weft.__all__)


def test_dir_lists_what_is_public() -> None:
    assert dir(weft) == sorted([*weft.__all__, "__version__"])


def test_a_plan_can_be_asked_for_before_and_after_its_package_is_imported() -> None:
    mask = weft.BlockMask.dense(4, 64, 33)
    tokens, keys = weft.Layout.even(64, 2), weft.Layout.even(33, 2)
    problem = weft.Problem(batch=3, heads=4, kv_heads=2, head_dim=8, q=tokens, kv=keys, dtype="float32")
    import_module("weft.plan.choose")
    plan = weft.plan(mask, "2xh100", head_dim=8, batch=3, kv_heads=2, dtype="float32")
    assert plan.schedule.problem == problem
    assert plan.explain() == choose(problem, mask, "2xh100").explain()
    assert list(signature(weft.plan).parameters)[:3] == ["mask", "topology", "head_dim"]


@pytest.mark.parametrize("name", ["ulysses", "ring", "zigzag", "gather", "usp:2x4+balanced", "ring+cuts"])
def test_a_strategy_may_be_planned_alone(name: str) -> None:
    mask = weft.mask("radial", grid=(4, 8, 9), heads=6, block=16)
    for each in (mask, weft.BlockMask.dense(6, 290)):
        plan = weft.plan(each, "8xh100", strategy=name)
        assert plan.ranked[0].name == name and plan.ranked[0].seconds > 0
        assert plan.schedule == weft.build(name, plan.schedule.attention[0], each, "8xh100")


def test_a_plan_without_ranks_is_refused() -> None:
    with pytest.raises(InputError, match='needs the ranks. Pass a topology, such as "8xh100", or tokens='):
        weft.plan(weft.BlockMask.dense(2, 64))


def test_reprs_fit_a_line() -> None:
    tokens = weft.Layout.even(75_600, 1024)
    problem = weft.Problem(batch=2, heads=40, kv_heads=40, head_dim=128, q=tokens, kv=tokens)
    small = weft.Problem(
        batch=1, heads=40, kv_heads=8, head_dim=128, q=weft.Layout.even(99, 8), kv=weft.Layout.even(77, 8)
    )
    plan = choose(small, topology="2x4xh100")
    values = [
        tokens, problem, small, plan, plan.ranked[0], plan.ranked[0].timing, plan.schedule,
        weft.verify(plan.schedule), weft.reverse(plan.schedule), plan.schedule.mesh, weft.Topology.local(8),
        weft.Mesh.of(ring=2, ulysses=4).arranged((1, 0, 2, 3, 4, 5, 6, 7)), weft.TokenGrid(21, 30, 52),
        weft.mask("sta", grid=(4, 8, 8), heads=2),
    ]  # fmt: skip
    for value in values:
        assert type(value).__name__ in repr(value)
        assert len(repr(value)) <= 120
        assert "\n" not in repr(value)
