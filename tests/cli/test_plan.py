"""`weft plan`: a ranked table for a newcomer, JSON for scripts, a file for weft.attention."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import weft
from weft.cli.main import main
from weft.schedule.verify import verify

SHAPE = ("plan", "960x6x16", "--topology", "4xh100", "--mask", "random:density=0.3,cv=0.8", "--block", "16")


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_the_table_has_the_best_first_and_says_why(capsys):
    assert call(*SHAPE) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "960 tokens" in lines[0] and "6 heads × 16" in lines[0] and "4xh100" in lines[0]
    assert lines[1] == "random:density=0.3,cv=0.8 · 26% active"
    assert lines[2] == (
        "assumed kernel TFLOP/s: triton 300 sparse (estimate), cudnn 600 dense (FlashAttention-3 paper)"
    )
    assert lines[3].startswith("assumed host µs: call 50, attend 50, copy 6")
    first = next(line for line in lines if line.startswith("1 "))
    assert "1.00×" in first
    assert any(line.startswith("Why: " + first.split()[1]) for line in lines)


def test_json_is_ranked_and_has_every_figure(capsys):
    assert call(*SHAPE, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    plans = found["plans"]
    assert [p["seconds"] for p in plans] == sorted(p["seconds"] for p in plans)
    assert {"plan", "exposed", "imbalance", "bound", "intra_bytes", "inter_bytes", "memory"} <= set(plans[0])
    assert all(p["imbalance"] >= 1 and p["bound"] >= 1 for p in plans)
    assert found["why"]
    assert found["assumed"]["kernel TFLOP/s"].startswith("triton 300 ")


def test_what_is_saved_is_a_schedule_that_loads(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert call(*SHAPE, "--save", str(path), "--json") == 0
    schedule = weft.Schedule.load(path)
    assert schedule.name == json.loads(capsys.readouterr().out)["plans"][0]["plan"]
    verify(schedule)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "plan.json holds no schedule: This is not JSON"),
        ("[1]", "plan.json holds no schedule."),
        ('{"kind": "Car"}', "kind of value 'Car'"),
        (None, "plan.json cannot be read"),
    ],
)
def test_what_is_no_schedule_is_refused(text, says, tmp_path):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(weft.WeftError, match=says):
        weft.Schedule.load(path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("wan2.1-14",), "no model 'wan2.1-14'. Did you mean 'wan2.1-14b'"),
        (("960x6x16", "--topology", "8xh1000"), "no cluster '8xh1000'. Write 8xh100"),
        (("960x6x16", "--mask", "stq"), "no mask 'stq'. Did you mean 'sta'"),
        (("wan2.1-14b", "--size", "big"), "'big' is not width x height. Write it like"),
        (("wan2.1-14b", "--size", "0x0"), "'0x0' is not width x height. Write it like"),
        (("wan2.1-14b", "--frames", "-1"), "--frames must be >= 0, got -1. 0 takes the default"),
        (("960x6",), "no model '960x6'. Known: wan2.1-1.3b"),
        (("960x6",), "Or write a shape, TOKENSxHEADSxDIM"),
        (("960x6x16", "--topology", "none.toml"), "none.toml cannot be read"),
        (("960x6x16", "--dtype", "int8"), "dtype 'int8' is not supported"),
        (("0x6x16",), "All sizes of 0x6x16 must be >= 1"),
        (("960x6x16", "--size", "1280x720"), "960x6x16 already has its token count"),
        (("99999999999x6x16",), "Use blocks of"),
    ],
)
def test_mistakes_get_a_sentence_and_exit_2(words, says, capsys):
    assert call("plan", *words) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("place", "says"), [("no/plan.json", "There is no folder"), ("", "is a folder")])
def test_where_no_plan_can_be_saved_is_told_before_the_planning(place, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("weft.plan.choose.choose", lambda *_: pytest.fail("planned"))
    assert call(*SHAPE, "--save", str(tmp_path / place)) == 2
    said = capsys.readouterr().err
    assert says in said and "Give another --save." in said


def test_what_is_sent_inside_and_between_machines_is_told_apart(capsys):
    assert call(*SHAPE) == 0
    assert "between" not in capsys.readouterr().out
    assert call("plan", "960x6x16", "--topology", "2x2xh100") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "sent: by a rank, inside its machine · between: by a rank, to other machines" in said


def test_a_shape_may_be_a_video(capsys):
    assert call("plan", "4x10x24x6x16", *SHAPE[2:4], "--mask", "svg:density=0.1", "--block", "16") == 0
    assert "960 tokens · 6 heads × 16" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_a_bad_mask_is_an_error_without_a_header(verb, capsys):
    assert call(verb, "960x6x16", "--mask", "stq") == 2
    assert capsys.readouterr().out == ""


def test_every_other_kind_has_a_reason_and_json_says_what_was_asked(capsys):
    assert call(*SHAPE) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("why not "))
    shown = [line.split()[0] for line in lines[start + 1 : lines.index("", start)]]
    assert call(*SHAPE, "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert shown == [each["plan"] for each in plain["why_not"]]
    assert {name.split(":")[0].split("+")[0] for name in shown} == {"gather", "usp", "ring"}
    causes = ("exposed communication", "uneven work", "smaller pieces", "launches", "as fast")
    assert all(each["because"].startswith(causes) for each in plain["why_not"])
    asked = {"model": "960x6x16", "tokens": 960, "mask": SHAPE[5], "topology": "4xh100", "plan": "ulysses"}
    assert asked.items() <= plain.items()


def test_an_empty_mask_has_nothing_to_plan(tmp_path, capsys):
    empty = (*SHAPE[:4], "--mask", "random:density=0", "--block", "16")
    assert call(*empty, "--save", str(tmp_path / "plan.json")) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "random:density=0 · 0% active",
        "Nothing is active: no rank has anything to do, and every plan takes no time.",
    ]
    assert not list(weft.Schedule.load(tmp_path / "plan.json").attends())
    assert call(*empty, "--json") == 0
    assert all(p["imbalance"] == 1 for p in json.loads(capsys.readouterr().out)["plans"])


def test_a_narrow_terminal_shows_every_figure(capsys, monkeypatch):
    assert call(*SHAPE) == 0
    whole = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in whole if line[:2] in ("1 ", "2 ", "3 ")]
    monkeypatch.setenv("COLUMNS", "40")
    assert call(*SHAPE) == 0
    divided = [line for line in capsys.readouterr().out.splitlines() if line[:2] in ("1 ", "2 ", "3 ")]
    assert max(map(len, divided)) <= 40
    for number, name, *figures in rows:
        parts = [line.split()[2:] for line in divided if line.split()[:2] == [number, name]]
        assert [figure for part in parts for figure in part] == figures


def test_what_is_left_out_is_listed_with_the_reason(capsys):
    assert call(*SHAPE, "--all") == 0
    assert "not built, 6 have less" in capsys.readouterr().out


def test_planning_needs_no_torch():
    code = "import sys; sys.modules.update(dict.fromkeys(['torch', 'matplotlib', 'diffusers']));"
    code += "from weft.cli.main import main; main(sys.argv[1:])"
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, *SHAPE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Why: " in done.stdout
