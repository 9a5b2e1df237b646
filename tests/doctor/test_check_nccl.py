"""The first part, by gloo: every check holds on any number of ranks, and fails when its numbers are wrong."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from weft.doctor import check_nccl
from weft.doctor.suite import Check, CheckContext
from weft.run.spawn.pool import Pool
from weft.run.world import place

NAMES = ["all ranks meet", "all_reduce", "ring of messages", "all_to_all", "halves"]


def examined(finished: tuple[str, ...], is_made_wrong: bool) -> list[Check]:  # noqa: FBT001 - a pool's call
    rank, ranks = place()
    ctx = CheckContext(
        device=torch.device("cpu"), rank=rank, ranks=ranks, machines=1, dtype="float32",
        deadline=time.monotonic() + 30, finished=frozenset(finished), is_made_wrong=is_made_wrong,
    )  # fmt: skip
    return list(check_nccl.checks(ctx))


@pytest.mark.parametrize("ranks", [2, 3])
def test_checks_hold_on_all_ranks(worlds: Callable[[int], Pool], ranks: int) -> None:
    for checks in worlds(ranks).run(examined, (), False):
        assert [(check.name, check.status) for check in checks] == [(name, "ok") for name in NAMES]
        assert checks[0].numbers["seconds"] > 0


def test_wrong_numbers_are_wrong_and_finished_checks_are_left_out(worlds: Callable[[int], Pool]) -> None:
    for checks in worlds(2).run(examined, ("all_to_all",), True):
        assert [check.name for check in checks] == [name for name in NAMES if name != "all_to_all"]
        assert {check.status for check in checks} == {"wrong"}
