"""bench.memory: what its rows judge, what it tracks, and one small case in both halves."""

from __future__ import annotations

import pytest
import torch

from bench.dry import DryKernel, DryRun, Held, Storages, schedule_of
from bench.memory import Figures, MemoryCase, cases, figures, judge, names, row
from weft.core.mask import BlockMask

MB = 1_000_000


def of(printed: int, held: int, workspace: int = 40, bound: int = 40, stale: int = 0) -> Figures:
    alive = Held(held * MB, stale * MB, [(held * MB, 1)])
    return Figures(printed * MB, alive, workspace * MB, bound * MB, ("kv0 20.0", "q0 20.0"))


@pytest.mark.parametrize(
    ("here", "missed"),
    [
        (of(100, 101), []),
        (of(100, 102), ["holds 1.020 × what is printed: 1 × 102.0"]),
        (of(100, 98), ["holds 0.980 × what is printed: 1 × 98.0"]),
        (
            of(100, 150, stale=50),
            ["holds 1.500 × what is printed, of which earlier kernel calls 50: 1 × 150.0"],
        ),
        (of(100, 100, workspace=42), []),
        (of(100, 100, workspace=43), ["workspace 1.075 × live: kv0 20.0, q0 20.0"]),
        (of(110, 110), []),
        (of(111, 111), ["prints 1.110 × what it did; live: kv0 20.0, q0 20.0"]),
    ],
)
def test_row_judges_held_workspace_and_printed_bytes(here: Figures, missed: list[str]) -> None:
    result, notes = row("a case", here, of(100, 200), forward=True)
    assert notes == missed and result.holds == (not missed)
    assert (result.peer, result.peer_name, result.unit) == (200.0, "45b0107", "MB")
    assert result.limit == (here.printed - here.workspace + here.bound) / MB


def test_printed_bytes_are_compared_in_the_forward_only_and_with_a_peer() -> None:
    assert row("a case", of(150, 150), of(100, 200), forward=False)[0].holds
    alone, _ = row("a case", of(150, 150), None, forward=True)
    assert alone.holds and alone.peer is None and alone.peer_name == ""


def test_named_cases_come_first_with_a_bar_of_their_own() -> None:
    done = [
        (MemoryCase("ulysses", 8), {"forward": of(9, 9)}),
        (MemoryCase("ring", 32), {"forward": of(301, 301)}),
    ]
    report = judge(done, None)
    assert [(each.case, each.bar, each.holds) for each in report.rows[:1]] == [
        ("ring on 32, dense, forward, at most", "≤ 300", False)
    ]
    assert [each.holds for each in report.rows[1:]] == [True, True]


def test_names_cover_every_factorization() -> None:
    assert [name for name, _ in names(8, "dense")] == [
        "ring", "zigzag", "ulysses", "gather", "usp:2x4", "usp:4x2", "torus:2x4", "torus:4x2", "torus:8x1",
    ]  # fmt: skip
    assert "zigzag" not in dict(names(8, "sta"))
    assert dict(names(32, "sta"))["torus:8x4"] == "4x8xh100"


def test_balanced_is_a_case_only_where_it_differs() -> None:
    found = {case.name for case, _ in cases(8, "dense")}
    assert {"ulysses", "usp:2x4"} < found and "ulysses+balanced" not in found


def test_storages_count_what_is_alive_and_kernel_returns_beyond_one_call() -> None:
    kernel = DryKernel()
    q = torch.empty(1, 1, 4, 8, device="meta")  # 128 bytes
    with Storages(kernel, [q]) as storages:
        a = torch.empty(64, dtype=torch.uint8, device="meta")
        view = a[:32]
        del a, view
        b = torch.empty(72, dtype=torch.uint8, device="meta")
        first = kernel.attend_backward(q, q, q, q, None, None, 1.0)
        del first
    assert storages.held()[:2] == (128 + 72, 0), "a is gone before b is made"
    with Storages(kernel, [q]) as storages:
        kept = [kernel.attend_backward(q, q, q, q, None, None, 1.0) for _ in range(3)]
    assert storages.held()[:2] == (128 + 2 * 384, 2 * 384)
    del b, kept


def test_a_small_ring_holds_what_is_printed() -> None:
    schedule = schedule_of("ring", 4, mask=BlockMask.dense(2, 256))
    found = figures(schedule)
    shard = 2 * 64 * 128 * 2
    for direction in ("forward", "saving"):
        each = found[direction]
        assert each.held.num_bytes == pytest.approx(each.printed, rel=0.02)
        assert 4 * shard < each.limit <= each.printed
    assert found["backward"].held.num_bytes >= found["backward"].printed
    assert found["forward"].live[0].startswith("in ") or "out of q0" in " ".join(found["forward"].live)


def test_held_bytes_do_not_depend_on_the_run_before() -> None:
    schedule = schedule_of("usp:2x2", 4, mask=BlockMask.dense(2, 256))
    run = DryRun(schedule, 1)
    run.forward(keep=True)
    assert run.held("backward").num_bytes == DryRun(schedule, 1).held("backward").num_bytes
