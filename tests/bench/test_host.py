"""bench.host: the arithmetic of its rows, what counts as a launch, and a small case in a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import host
from bench.dry import DryRun, Launches, fused_launches, schedule_of
from bench.host import Rounds, alternate, count_row, growth, growth_rows, time_row
from bench.worker import TreeWorker, base_worker
from weft.core.mask import BlockMask

ROOT = Path(__file__).parents[2]


def test_time_row_judges_the_median_of_the_ratios() -> None:
    rounds = Rounds([0.001, 0.004, 0.001], [0.002, 0.008, 0.001])  # ratios 0.5, 0.5, 1
    kept = time_row("a", rounds, 0.5)
    assert (kept.measured, kept.peer, kept.holds, kept.bar) == (1.0, 2.0, True, "≤ 0.5 × 45b0107, is 0.50")
    assert not time_row("a", rounds, 0.49).holds
    assert time_row("a", rounds, 0.0).bar == "for information, is 0.50"


def test_without_a_peer_nothing_is_judged() -> None:
    row = time_row("a", Rounds([2e-6], []), 0.5, "µs")
    assert row.holds and row.measured == 2.0 and row.peer is None and row.peer_name == ""
    assert count_row("a", "launches", 11, None, 10).holds is False


def test_growth_is_for_twice_the_size() -> None:
    assert growth([(10, 1.0), (20, 2.0), (80, 32.0)]) == pytest.approx(4.0)
    (operations, steps), _ = growth_rows("ring", "forward", [(100, 10, 1e-3), (400, 20, 4e-3)])
    assert (operations.measured, steps.measured) == (pytest.approx(2.0), pytest.approx(4.0))
    assert operations.holds and not steps.holds


def test_launches_are_neither_views_nor_allocations() -> None:
    x = torch.empty(4, 6, device="meta")
    with Launches() as launches:
        y = torch.empty_like(x)
        y.view(6, 4).transpose(0, 1)[1:].unbind(0)
        y.as_strided((2, 2), (1, 1)).copy_(x[:2, :2])
        torch._foreach_copy_([y, y], [x, x])
        x.to(torch.bfloat16)
    assert launches.names == ["aten::copy_", *["aten::_foreach_copy_"] * 2, "aten::_to_copy"]


def test_ring_launches_a_copy_for_each_tensor_it_sends() -> None:
    run = DryRun(schedule_of("ring", 4, mask=BlockMask.dense(2, 256)), 1)
    run.forward()
    run.transport.calls = 0
    with Launches() as launches:
        run.forward()
    assert len(launches.names) == 3 and run.transport.calls == 6


def test_workers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def call(self, function: str, *values: int) -> float:
            assert (function, values) == ("bench.host:simulate_seconds", (4,))
            order.append(self.name)
            return 1.0

    rounds = alternate(Fake("here"), Fake("there"), 2, "simulate_seconds", 4)  # type: ignore[arg-type]
    assert order == ["there", "here", "here", "there"] and rounds.ratio == 1.0


def test_a_worker_calls_functions_of_its_tree(capfd: pytest.CaptureFixture[str]) -> None:
    with TreeWorker(ROOT) as worker:
        assert worker.call("math:hypot", 3, 4) == 5.0
        assert worker.call("builtins:print", "aside") is None
        worker.begin("math:sqrt", -1)
        with pytest.raises(RuntimeError, match="A worker ended with status 1"):
            worker.result()
    assert "aside" in capfd.readouterr().err


def test_no_worker_without_the_commit(tmp_path: Path) -> None:
    with base_worker(tmp_path) as worker:
        assert worker is None


def test_seconds_are_cpu_time_of_one_call() -> None:
    assert 0 < host.seconds_of(lambda: sum(range(10_000)), 3) < 0.1


@pytest.mark.parametrize("case", [case for case in host.CASES if case.launches], ids=str)
def test_a_copy_is_one_launch_on_a_gpu(case: host.HostCase) -> None:
    ((launches, _),) = host.counts(case.name, case.ranks, case.nodes, [3])
    assert 0 < launches <= case.launches


def test_fused_launches_are_counted_once_for_all_segments() -> None:
    schedule = schedule_of("ulysses", 4, mask=BlockMask.dense(4, 256))
    with fused_launches() as fused:
        run = DryRun(schedule, 1)
        run.forward()
        assert fused == ["copy_boxes"] * 3  # pack, unpack, pack
        with Launches() as others:
            run.forward()
    assert len(fused) == 6 and not others.names
