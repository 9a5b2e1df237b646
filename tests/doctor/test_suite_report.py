"""Merging: one part from what all ranks say of it, over the attempts that it took."""

from __future__ import annotations

from typing import Any

import pytest

from weft.doctor.suite import CheckSuite
from weft.doctor.suite_report import can_go_on, finished, first_failure, merge_checks, skipped, suite_report
from weft.doctor.supervisor import AttemptResult

PART = CheckSuite(name="toy", title="A toy", seconds=5, claims=("toys",))


def check(name: str, status: str = "ok", note: str = "", **numbers: float) -> dict[str, Any]:
    return {"name": name, "status": status, "note": note, "numbers": numbers, "data": None}


def report(*attempts: list[AttemptResult]) -> dict[str, Any]:
    return suite_report(PART, attempts, seconds=1.0, limit=5.0)


def test_wrong_check_of_any_rank_counts_and_names_the_rank() -> None:
    ranks = [
        AttemptResult(rank=0, checks=[check("a", error=1.0), check("b")]),
        AttemptResult(rank=1, checks=[check("a", "wrong", error=2.0), check("b", "wrong", "too late")]),
        AttemptResult(rank=2, checks=[check("a", "wrong", error=3.0), check("c")]),
    ]
    merged = merge_checks(ranks)
    assert list(merged) == ["a", "b", "c"]
    assert merged["a"] == check("a", "wrong", "rank 1", error=2.0)
    assert merged["b"]["note"] == "rank 1: too late"
    assert report(ranks)["status"] == "wrong"


def test_last_check_of_a_name_counts_of_the_first_rank() -> None:
    ranks = [
        AttemptResult(rank=0, checks=[check("a", note="first"), check("b"), check("a", note="last")]),
        AttemptResult(rank=1, checks=[check("a", note="other")]),
    ]
    merged = merge_checks(ranks)
    assert list(merged) == ["a", "b"]
    assert merged["a"]["note"] == "last"


def test_part_whose_checks_are_all_skipped_is_skipped_with_their_reason() -> None:
    account = AttemptResult(rank=0, checks=[check("a", "skipped", "no NVLink"), check("b", "skipped")])
    assert report([account]).items() >= {"status": "skipped", "message": "no NVLink"}.items()
    account.checks.append(check("c", "measured"))
    assert report([account])["status"] == "ok"


def test_process_that_died_is_the_cause_of_later_and_earlier_failures() -> None:
    failed = AttemptResult(rank=0, ending="failed", message="lost rank 1", ended_at=1)
    crashed = AttemptResult(rank=1, ending="crashed", message="was killed by SIGSEGV", ended_at=2)
    stopped = AttemptResult(rank=2, ending="stopped", ended_at=0)
    assert first_failure([failed, crashed, stopped]) is crashed
    later = AttemptResult(rank=3, ending="failed", ended_at=5)
    assert first_failure([later, failed]) is failed
    assert first_failure([stopped]) is None


@pytest.mark.parametrize(
    ("ending", "is_in_check", "again"),
    [
        ("crashed", True, True), ("failed", True, True), ("crashed", False, False), ("hung", True, False),
        ("ok", True, False),
    ],
)  # fmt: skip
def test_only_a_check_that_broke_its_attempt_is_left_out_by_another(
    ending: Any, is_in_check: bool, again: bool
) -> None:
    account = AttemptResult(rank=0, ending=ending, under_way="a", is_in_check=is_in_check)
    assert can_go_on([account]) is again


def test_next_attempt_leaves_out_what_is_done_and_what_crashed() -> None:
    """Not what one rank has done and another is still in; ranks may share the checks of a part."""
    ranks = [
        AttemptResult(
            rank=0, ending="stopped", checks=[check("a"), check("c")], under_way="d", is_in_check=True
        ),
        AttemptResult(rank=1, ending="crashed", checks=[check("b")], under_way="e", is_in_check=True),
        AttemptResult(rank=2, ending="stopped", under_way="c", is_in_check=True),
    ]
    assert finished([ranks]) == ("a", "b", "e")
    assert finished([ranks, [AttemptResult(rank=0, checks=[check("c")])]]) == ("a", "b", "c", "e")
    assert finished([]) == ()


def test_crashed_part_names_its_check_and_keeps_what_came_after() -> None:
    message = "was killed by SIGABRT"
    crashed = AttemptResult(rank=1, ending="crashed", message=message, under_way="b", is_in_check=True)
    crashed.traceback = "here"
    first = [AttemptResult(rank=0, ending="stopped", checks=[check("a")]), crashed]
    second = [AttemptResult(rank=0, checks=[check("c")]), AttemptResult(rank=1, checks=[check("c")])]
    merged = report(first, second)
    assert merged["status"] == "crashed" and merged["under_way"] == "b"
    assert "rank 1 was killed by SIGABRT in 'b'" in merged["message"] and "2 attempts" in merged["message"]
    assert merged["traceback"] == "rank 1:\nhere"
    statuses = {each["name"]: each["status"] for each in merged["checks"]}
    assert statuses == {"a": "ok", "b": "wrong", "c": "ok"}


def test_later_attempt_that_ran_out_of_time_does_not_hang() -> None:
    first = AttemptResult(rank=0, ending="crashed", message="died", under_way="a", is_in_check=True)
    second = AttemptResult(rank=0, ending="hung", message="still", under_way="b", is_in_check=True)
    merged = report([first], [second])
    assert merged["status"] == "crashed"
    assert [each["name"] for each in merged["checks"]] == ["a"]


def test_hung_part_shows_where_every_rank_was_and_equal_stacks_once() -> None:
    def hung(rank: int, stack: str) -> AttemptResult:
        message = "still ran after 5 s"
        return AttemptResult(
            rank=rank, ending="hung", message=message, under_way="a", is_in_check=True, traceback=stack
        )

    merged = report([hung(0, "waits"), hung(1, "sleeps"), hung(2, "waits")])
    assert merged["status"] == "hung"
    assert merged["message"] == "still ran after 5 s in 'a'"
    assert merged["traceback"] == "rank 0, 2:\nwaits\n\nrank 1:\nsleeps"


def test_failed_part_shows_where_the_ranks_were_that_did_not_end() -> None:
    failed = AttemptResult(rank=1, ending="failed", message="waited for rank 0", traceback="waits")
    merged = report([AttemptResult(rank=0, ending="stopped", traceback="sleeps"), failed])
    assert merged["traceback"] == "rank 1:\nwaits\n\nrank 0:\nsleeps"


def test_part_that_was_not_begun_says_why() -> None:
    assert skipped(PART, "no time left").items() >= {"status": "skipped", "message": "no time left"}.items()
    assert skipped(PART, "")["claims"] == ["toys"]
