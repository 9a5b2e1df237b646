"""`weft demo`: one table, whose every line is checked, and a video of the prompt."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.worlds import world
from weft.cli import demo
from weft.cli.main import main

av = pytest.importorskip("av")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less attention than for show, on the session's ranks."""
    monkeypatch.setattr(demo, "TOKENS", 211)
    monkeypatch.setattr("weft.run.spawn.pool.Pool", lambda size, **_: nullcontext(world(size)))
    monkeypatch.setattr("weft.cli.ranks.model_ranks", lambda size: nullcontext(world(size)))
    monkeypatch.setenv("COLUMNS", "200")


def ended(*words: str) -> object:
    with pytest.raises(SystemExit) as end:
        main(["demo", *words])
    return end.value.code


def test_it_ends_with_a_table_and_a_video(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "demo.mp4"
    assert ended("--ranks", "2,3", "-o", str(target)) == 0
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if "same" in line]
    assert len(rows) == 2 * len(demo.KINDS)
    assert [row.split()[1] for row in rows if "dense" in row] == ["2", "3"]
    assert "DIFFERS" not in said
    with av.open(str(target)) as container:
        assert json.loads(container.metadata["comment"])["prompt"] == demo.PROMPT


def test_a_result_that_differs_ends_it_before_the_video(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.run.measure.compare.TrialResult.holds", property(lambda _: False))
    assert ended("--ranks", "2", "-o", str(tmp_path / "demo.mp4")) == 4
    said = capsys.readouterr()
    assert "DIFFERS" in said.out
    assert "differs from one process by more than rounding" in " ".join(said.err.split())
    assert not list(tmp_path.iterdir())
