"""Local ranks of commands: how their ends are told."""

from __future__ import annotations

import pytest

from tests.worlds import world
from weft.cli import ranks
from weft.core.errors import InputError
from weft.run.spawn.launch import LaunchOutcome
from weft.run.spawn.pool import RankFailure


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (LaunchOutcome(), ""),
        (
            LaunchOutcome(code=1, rank=2, reason="was killed by SIGKILL"),
            "weft: rank 2 was killed by SIGKILL.\n",
        ),
        (
            LaunchOutcome(code=1, rank=0, reason="failed", traceback="Traceback …\nValueError\n\n"),
            "Traceback …\nValueError\n",
        ),
    ],
)
def test_a_launch_ends_with_its_code_and_one_reason(
    end: LaunchOutcome, says: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(ranks, "launch", lambda *_, **__: end)
    assert ranks.launched(3) == end.code
    assert capsys.readouterr().err == says


def refuses() -> None:
    raise InputError("No loom.", hint="Bring one.")


def breaks() -> None:
    raise ZeroDivisionError("a thread")


def test_what_all_ranks_refuse_is_one_sentence() -> None:
    with pytest.raises(InputError, match="No loom"):
        ranks.run_once(world(2), refuses)


def test_any_other_failure_has_one_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailure):
        ranks.run_once(world(2), breaks)
    assert capsys.readouterr().err.count("ZeroDivisionError: a thread") == 1


def test_ranks_of_a_model_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "usable_cores", lambda: 7)
    monkeypatch.setattr(ranks, "Pool", lambda size, **how: (size, how["threads"]))
    assert [ranks.model_ranks(size) for size in (2, 3, 9)] == [(2, 3), (3, 2), (9, 1)]
