"""The parts that all ranks run together, on real ranks: strategies, wan, streams, graph and pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from tests.doctor.contexts import context_of, run_suite
from weft.doctor import check_strategies
from weft.doctor.suite import Check
from weft.run.kernels.cpu import Cpu
from weft.run.measure.compare import plan_names
from weft.run.spawn.pool import Pool

Worlds = Callable[[int], Pool]
NAMES = {
    "wan": ["dense · auto", "dense · ulysses", "sta · auto", "sta · ulysses"],
    "streams": ["ulysses beside ring", "ring beside ring", "gather beside ulysses"],
    "graph": ["ulysses", "ring"],
}


def run(worlds: Worlds, ranks: int, name: str, **fields: Any) -> list[list[Check]]:
    return worlds(ranks).run(_run, name, fields)


def _run(name: str, fields: dict[str, Any]) -> list[Check]:
    return run_suite(name, **fields)


def statuses(checks: list[list[Check]]) -> set[str]:
    return {check.status for each in checks for check in each}


def _with_wrong_kernel(name: str, direction: str, fields: dict[str, Any]) -> list[Check]:
    """As if a kernel of rank 1 took its first operand for something larger."""
    plain = getattr(Cpu, direction)

    def wrong(self: Any, x: Any, *rest: Any, **options: Any) -> Any:
        return plain(self, x * 1.05, *rest, **options)

    with patch.object(Cpu, direction, wrong if fields.pop("of") else plain):
        return run_suite(name, **fields)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_part_holds(name: str, ranks: int, worlds: Worlds) -> None:
    for checks in run(worlds, ranks, name):
        assert [check.name for check in checks] == NAMES[name]
        assert {check.status for check in checks} == {"measured" if name == "wan" else "ok"}


@pytest.mark.parametrize("name", NAMES)
def test_part_that_is_made_wrong_is_wrong_on_every_rank(name: str, worlds: Worlds) -> None:
    assert statuses(run(worlds, 2, name, is_made_wrong=True)) == {"wrong"}


@pytest.mark.parametrize("name", NAMES)
def test_mistake_of_one_rank_is_found(name: str, worlds: Worlds) -> None:
    per_rank = [({"of": rank == 1},) for rank in range(2)]
    checks = worlds(2).run(_with_wrong_kernel, name, "attend", per_rank=per_rank)
    assert {check.status for check in checks[1]} == {"wrong"}


def test_wrong_gradient_of_one_rank_is_found_on_streams(worlds: Worlds) -> None:
    per_rank = [({"of": rank == 1},) for rank in range(2)]
    checks = worlds(2).run(_with_wrong_kernel, "streams", "attend_backward", per_rank=per_rank)
    assert {check.status for check in checks[1]} == {"wrong"}


def test_every_strategy_holds(worlds: Worlds) -> None:
    first, *others = run(worlds, 3, "strategies")
    assert not any(others) and {check.status for check in first} == {"ok"}
    plans = [*plan_names(3), "torus:3x1"]
    names = [f"{plan} · {attention}" for attention in check_strategies.ATTENTIONS for plan in plans]
    assert [check.name for check in first] == names
    assert all(check.numbers["proved_steps"] > 0 for check in first)
    assert all(check.numbers["megabytes_sent"] > 0 for check in first)


def _few(keep: str) -> frozenset[str]:
    """Names of the strategies to leave out, as if another attempt had done them."""
    names = [name for name, _ in check_strategies._trials(context_of(ranks=2))]
    return frozenset(name for name in names if not name.startswith(keep))


def test_strategies_that_are_made_wrong_are_wrong(worlds: Worlds) -> None:
    found = run(worlds, 2, "strategies", is_made_wrong=True, finished=_few("torus"))
    assert [(check.name, check.status) for check in found[0]] == [
        (f"torus:2x1 · {attention}", "wrong") for attention in check_strategies.ATTENTIONS
    ]


@pytest.mark.parametrize("direction", ["attend", "attend_backward"])
def test_mistake_of_one_rank_is_found_by_the_strategies(direction: str, worlds: Worlds) -> None:
    per_rank = [({"of": rank == 1, "finished": _few("ring ·")},) for rank in range(2)]
    checks = worlds(2).run(_with_wrong_kernel, "strategies", direction, per_rank=per_rank)
    assert len(checks[0]) == 3 and statuses(checks) == {"wrong"}


@pytest.mark.parametrize("name", ["strategies", "wan"])
def test_ranks_end_together_when_the_time_of_one_is_over(name: str, worlds: Worlds) -> None:
    late = worlds(2).run(_run, name, per_rank=[({},), ({"deadline": 0.0},)])
    assert statuses(late) == {"skipped"} and late[0]
    assert "not reached in time" in late[0][0].note


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pipeline_holds(dtype: str, worlds: Worlds) -> None:
    pytest.importorskip("diffusers")
    for checks in run(worlds, 2, "pipeline", dtype=dtype):
        assert [check.status for check in checks] == ["ok", "ok"]
        assert "tokens split" in checks[0].name and "guidance" in checks[1].name


def test_pipeline_that_is_wrong_is_found(worlds: Worlds) -> None:
    pytest.importorskip("diffusers")
    assert statuses(run(worlds, 3, "pipeline", is_made_wrong=True)) == {"wrong"}
    per_rank = [({"of": rank == 1},) for rank in range(3)]
    checks = worlds(3).run(_with_wrong_kernel, "pipeline", "attend", per_rank=per_rank)
    assert statuses(checks) == {"wrong"} and "blocks.1.attn1: rows of rank" in checks[0][0].note


def test_pipeline_says_what_is_missing() -> None:
    from weft.doctor import check_pipeline

    with patch.object(check_pipeline, "find_spec", lambda _: None):
        (check,) = check_pipeline.checks(context_of())
    assert check.status == "skipped" and "the extra 'models'" in check.note
