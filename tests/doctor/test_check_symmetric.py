"""The part of symmetric memory over shared memory, and over a stand-in of what GPUs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from tests.doctor.contexts import OnDevice, context_of, run_suite
from tests.run.fake_symmetric import Board, patch_streams, window
from tests.run.fake_symmetric import Pool as Memory
from tests.threads import ThreadComm, run_threads
from weft.doctor import check_symmetric as suite
from weft.doctor.suite import Check
from weft.run.comm import symmetric
from weft.run.comm.onesided import OneSidedComm
from weft.run.spawn.pool import Pool

Worlds = Callable[[int], Pool]
NAMES = ["rendezvous", "ring", "all-to-all", "growth", "two groups"]


def _run(fields: dict[str, Any]) -> list[Check]:
    return run_suite("symmetric", **fields)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_checks_hold_on_all_ranks(worlds: Worlds, ranks: int) -> None:
    for checks in worlds(ranks).run(_run, {}):
        assert [(check.name, check.status) for check in checks] == [(name, "ok") for name in NAMES]


def test_wrong_numbers_are_wrong_and_finished_checks_are_left_out(worlds: Worlds) -> None:
    fields = {"finished": frozenset({"rendezvous", "ring"}), "is_made_wrong": True}
    for checks in worlds(2).run(_run, fields):
        assert [(check.name, check.status) for check in checks] == [(name, "wrong") for name in NAMES[2:]]


def test_a_rendezvous_that_a_process_died_in_is_not_tried_again(worlds: Worlds) -> None:
    assert worlds(2).run(_run, {"finished": frozenset({"rendezvous"})}) == [[], []]


def _without(fields: dict[str, Any]) -> list[Check]:
    with patch.object(suite.shm, "rendezvous", return_value=(None, "no memory to share")):
        return run_suite("symmetric", **fields)


def test_ranks_that_cannot_are_told_why(worlds: Worlds) -> None:
    expected = Check(name="rendezvous", status="skipped", note="no memory to share")
    assert worlds(2).run(_without, {}) == [[expected]] * 2


def test_exchanges_hold_in_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs would do, over a stand-in whose copies come as late as they may."""
    monkeypatch.setattr(symmetric, "GRANULE", 4096)
    monkeypatch.setattr(suite, "NUMBERS", 1 << 10)
    board = Board(2, fake=patch_streams(monkeypatch))

    def job(base: ThreadComm) -> list[Check]:
        comm = OneSidedComm(base, lambda base: (window(board, base, Memory()), ""), 10.0)
        ctx = context_of(OnDevice, rank=base.rank, ranks=2)
        exchanges = (suite._ring, suite._all_to_all, suite._growth)
        return [ctx.judged(each.__name__, *each(ctx, comm), allowed=0.0) for each in exchanges]

    for checks in run_threads(2, job):
        assert [check.status for check in checks] == ["ok"] * 3
