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
from weft.core.topology import Link, Topology
from weft.simulate.clusters import cluster


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-o", "nowhere/at/all.toml"), "no folder nowhere/at for all.toml"),
        (("-o", "/"), "/ is a folder"),
        (("--ranks", "-1"), "must be >= 1 if given, got -1"),
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
    monkeypatch.setattr(
        "weft.run.spawn.pool.Pool", lambda size, **_: nullcontext(ranks) if size == 8 else None
    )
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
    assert all(word in said for word in ("2 × 4 devices", "FLOP/s", "intra", "inter", f"--topology {target}"))


def test_what_was_measured_as_json(pool, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "--ranks", "8", "--json", "-o", str(tmp_path / "two.toml")])
    assert ended.value.code == 0
    assert from_plain(json.loads(capsys.readouterr().out)) == TWO


def test_under_a_launcher_one_rank_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.run.world.is_launched", lambda: True)
    monkeypatch.setattr("weft.run.measure.calibrate.calibrate", lambda **_: TWO)
    for rank in (1, 0):
        world = SimpleNamespace(comm=SimpleNamespace(rank=rank, size=2))
        monkeypatch.setattr("weft.run.world.world_of", lambda *_, world=world: world)
        with pytest.raises(SystemExit) as ended:
            main(["calibrate", "-o", str(tmp_path / "two.toml")])
        assert ended.value.code == 0
        assert (tmp_path / "two.toml").exists() is (rank == 0)


def test_every_gpu_is_a_rank(pool, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "-o", str(tmp_path / "eight.toml")])
    assert ended.value.code == 0
    assert len(pool) == 1
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "--ranks", "9", "-o", str(tmp_path / "nine.toml")])
    assert ended.value.code == 2
    assert "9 ranks need as many GPUs; 8 are visible." in capsys.readouterr().err


def test_what_a_gpu_machine_showed_is_said(pool, tmp_path, capsys, monkeypatch):
    slow = Link(latency=1e-5, bandwidth=2e9)
    box = replace(cluster("2xh100"), links=((0, 1, slow), (1, 0, slow)), transport="symmetric")
    monkeypatch.setattr("tests.cli.test_calibrate.TWO", box)
    with pytest.raises(SystemExit):
        main(["calibrate", "--ranks", "8", "-o", str(tmp_path / "box.toml")])
    said = capsys.readouterr().out
    assert "600 TFLOP/s, backward 515 (cudnn, FlashAttention-3 paper)" in said
    assert "of 1 pair, the slowest has 2 GB/s" in said
    assert "symmetric memory" in said
    assert Topology.from_toml(tmp_path / "box.toml") == box
