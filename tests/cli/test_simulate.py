"""`weft simulate`: sizes and plans in one table, JSON for scripts, a report on the last."""

from __future__ import annotations

import json

import pytest

from weft.cli.main import main

SWEEP = ("960x6x16", "--topology", "2x2xh100", "--mask", "random:density=0.3,cv=0.8", "--block", "16")


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *map(str, words)])
    return int(ended.value.code or 0)


def test_the_table_has_a_row_for_each_size_and_a_timeline(capsys, monkeypatch):
    assert call(*SWEEP, "--devices", "1,2,4,8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[5:9]] == ["1", "2", "4", "8"]
    assert "1.00×" in lines[5] and "100%" in lines[5]
    assert any(line.startswith("rank 7") for line in lines)
    assert lines[2].startswith("assumed kernel TFLOP/s: triton 300 sparse") and "host" in lines[3]
    monkeypatch.setenv("COLUMNS", "80")
    assert call(*SWEEP, "--devices", "1,2,4,8") == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_json_has_every_plan_and_its_numbers(capsys):
    assert call(*SWEEP, "--devices", "2,4", "--plan", "all", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {"gpus", "plan", "seconds", "step_seconds", "speedup", "efficiency", "exposed"} <= set(rows[0])
    for gpus in (2, 4):
        times = [row["seconds"] for row in rows if row["gpus"] == gpus]
        assert len(times) > 4 and times == sorted(times)
    assert rows[0]["speedup"] == rows[0]["efficiency"] == 1.0
    for row in rows:
        assert row["efficiency"] == pytest.approx(row["speedup"] * 2 / row["gpus"])
        assert row["inter_bytes"] == 0 or row["gpus"] == 4


def test_a_model_has_a_step_that_is_more_than_its_attention(capsys):
    small = ("wan2.1-1.3b", "--size", "256x256", "--frames", "5", "--topology", "2xh100", "--plan", "ulysses")
    assert call(*small, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    [row] = found["rows"]
    assert row["step_seconds"] > found["layers"] * row["seconds"]
    assert call(*SWEEP, "--plan", "ring", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["step_seconds"] is None


def test_a_long_table_says_what_it_leaves_out(capsys):
    assert call(*SWEEP, "--devices", "4", "--plan", "all") == 0
    assert "slower plans are left out" in capsys.readouterr().out


def test_named_plans_are_taken(capsys):
    assert call(*SWEEP, "--plan", "ring, ulysses", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["plan"] for row in rows} == {"ring", "ulysses"} and {row["gpus"] for row in rows} == {4}


def test_an_empty_mask_takes_as_long_as_launching_zeros(capsys):
    assert call(*SWEEP[:3], "--devices", "1,4", "--mask", "random:density=0", "--block", "16", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(0 < row["seconds"] < 1e-4 for row in rows)
    assert [row["speedup"] for row in rows] == [1, 1], "more devices launch no faster"
    assert call(*SWEEP[:3], "--mask", "random:density=0", "--block", "16") == 0
    assert "0% active" in capsys.readouterr().out


def test_where_no_report_can_be_written_is_told_before_the_simulating(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("weft.report.sweep.sweep", lambda *_, **__: pytest.fail("simulated"))
    (tmp_path / "file").touch()
    assert call(*SWEEP, "--report", tmp_path / "file") == 2
    said = capsys.readouterr().err
    assert "file cannot be written: File exists." in said
    assert "Give another --report." in said


def test_a_report_has_the_curve_of_the_sweep(tmp_path, capsys):
    assert call(*SWEEP, "--devices", "1,2,4", "--report", tmp_path / "out") == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    [case] = found["cases"]
    assert [p["gpus"] for p in case["scaling"]] == [1, 2, 4]
    assert case["ranks"] == 4 and "scaling" in found["figures"]
    assert "index.html" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--devices", "3"),
            "must be a multiple of 2, the devices of one machine of 2x2xh100, got 3. Try 2 or 4",
        ),
        (("--devices", "two"), "devices='two' is not a list of counts"),
        (("--plan", "usp:4x4"), "usp:4x4 needs 16 ranks; there are 4"),
        (("--plan", "rign"), "no strategy 'rign'"),
    ],
)
def test_mistakes_get_a_sentence_and_exit_2(words, says, capsys):
    assert call(*SWEEP, *words) == 2
    assert says in " ".join(capsys.readouterr().err.split())
