"""`weft calibrate`: mistakes are told before anything is measured, and what was measured is kept."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from weft.cli import calibrate
from weft.cli.main import main
from weft.core.codec import from_plain
from weft.core.topology import Topology


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-o", "nowhere/at/all.toml"), "no folder nowhere/at for all.toml"),
        (("-o", "/"), "/ is a folder"),
        (("--ranks", "0"), "ranks=0"),
        (("--dtype", "int8"), "dtype 'int8' is not supported"),
        (("--backend", "fa5"), "backend='fa5' is unknown"),
    ],
)
def test_mistakes_are_told_before_the_measuring(words, says, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "_measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *words])
    assert ended.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


TWO = replace(Topology.local(4), machines=2)


@pytest.fixture
def pool(monkeypatch):
    """Ranks that have measured TWO; what they were asked for."""
    asked = []
    ranks = SimpleNamespace(run=lambda work: asked.append(work.keywords) or [TWO, None])
    monkeypatch.setattr("weft.run.pool.Pool", lambda size: nullcontext(ranks) if size == 8 else None)
    return asked


def test_what_was_measured_is_written_and_said(pool, tmp_path, capsys):
    target = tmp_path / "two.toml"
    with pytest.raises(SystemExit) as ended:
        main(
            ["calibrate", "--ranks", "8", "--head-dim", "96", "--dtype", "bfloat16"]
            + ["--backend", "exact", "-o", str(target)]
        )
    assert ended.value.code == 0
    assert pool == [{"head_dim": 96, "dtype": "bfloat16", "backend": "exact"}]
    assert Topology.from_toml(target) == TWO
    said = capsys.readouterr().out
    assert all(
        word in said for word in ("2 × 4 devices", "GFLOP/s", "intra", "inter", f"--topology {target}")
    )


def test_what_was_measured_as_json(pool, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "--ranks", "8", "--json", "-o", str(tmp_path / "two.toml")])
    assert ended.value.code == 0
    assert from_plain(json.loads(capsys.readouterr().out)) == TWO


def test_under_a_launcher_one_rank_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.run.world.is_launched", lambda: True)
    monkeypatch.setattr("weft.run.calibrate.calibrate", lambda **_: TWO)
    for rank in (1, 0):
        world = SimpleNamespace(comm=SimpleNamespace(rank=rank))
        monkeypatch.setattr("weft.run.world.world_of", lambda *_, world=world: world)
        with pytest.raises(SystemExit) as ended:
            main(["calibrate", "-o", str(tmp_path / "two.toml")])
        assert ended.value.code == 0
        assert (tmp_path / "two.toml").exists() is (rank == 0)
