"""`weft report`: from a trace, a schedule or a model to a folder; two are compared."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.report.toys import schedule, two_ranks
from weft.cli.main import main
from weft.core.codec import dumps
from weft.core.install import install_command
from weft.core.timeline import Timeline
from weft.simulate.clusters import cluster
from weft.simulate.events import simulate

MODEL = ("960x6x16", "--mask", "random:density=0.3,cv=0.8", "--block", "16", "--topology", "4xh100")


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    return int(ended.value.code or 0)


def numbers(folder) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_a_model_is_planned_simulated_and_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert call(*MODEL, "--out", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "exposed communication" in shown and "rank 3" in shown and "index.html" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 80
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {
        "index.html",
        "report.json",
        "trace.json",
        "figures",
    }
    [case] = numbers(tmp_path / "out")["cases"]
    assert len(case["plans"]) > 1 and case["topology"] == "4xh100"


def test_a_named_plan_is_the_one_that_is_drawn(tmp_path):
    assert call(*MODEL, "--plan", "ring", "-o", tmp_path) == 0
    [case] = numbers(tmp_path)["cases"]
    assert case["name"] == "ring"
    assert case["summary"]["seconds"] == next(p["seconds"] for p in case["plans"] if p["plan"] == "ring")


def test_a_saved_schedule_is_simulated(tmp_path):
    saved = tmp_path / "plan.json"
    saved.write_text(dumps(schedule("ring", cluster=cluster("4xh100"))))
    assert call(saved, "--topology", "4xa100", "-o", tmp_path / "out") == 0
    [case] = numbers(tmp_path / "out")["cases"]
    assert (case["name"], case["topology"], case["measured"]) == ("ring", "4xa100", False)


def traced(folder, timeline: Timeline) -> None:
    folder.mkdir()
    for rank in range(timeline.ranks):
        part = Timeline(timeline.name, timeline.ranks, timeline.of(rank), measured=True)
        (folder / f"rank{rank}.jsonl").write_text(part.to_jsonl())


def test_a_trace_is_read_with_the_schedule_beside_it(tmp_path):
    plan, machine = schedule("ring", cluster=cluster("4xh100")), cluster("4xh100")
    traced(tmp_path / "run", simulate(plan, machine))
    assert call(tmp_path / "run", "-o", tmp_path / "bare") == 0
    assert not any(name.startswith("mask") for name in numbers(tmp_path / "bare")["figures"])
    (tmp_path / "run" / "schedule.json").write_text(dumps(plan))
    assert call(tmp_path / "run", "-o", tmp_path / "out") == 0
    found = numbers(tmp_path / "out")
    assert found["cases"][0]["measured"] and any(name.startswith("mask") for name in found["figures"])


def test_two_are_compared(tmp_path, capsys):
    traced(tmp_path / "run", two_ranks())
    assert call(tmp_path / "run", *MODEL, "-o", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "difference" in shown and "as fast as" in shown
    assert [c["ranks"] for c in numbers(tmp_path / "out")["cases"]] == [2, 4]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "difference" in page and "Timelines each on its own axis" in page
    assert "toy" in page and "960x6x16, " in page  # of two models, the plan's name alone would not tell


def test_plans_of_a_model_share_an_axis_and_their_figures(tmp_path, capsys):
    assert call(*MODEL, "--plan", "ring,ulysses,gather", "-o", tmp_path) == 0
    found = numbers(tmp_path)
    assert [case["name"] for case in found["cases"]] == ["ring", "ulysses", "gather"]
    assert found["figures"]["timeline"].startswith("Timelines on one axis")
    assert {"loads-a", "loads-b", "loads-c", "scaling", "roofline"} <= set(found["figures"])
    times = {case["name"]: case["summary"]["seconds"] for case in found["cases"]}
    fast, slow = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    assert f"{fast} is {times[slow] / times[fast]:.2f}× as fast as {slow}." in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_page_says_what_it_is_of_and_how_it_was_made(tmp_path):
    assert call(*MODEL, "--plan", "ring", "-o", tmp_path) == 0
    page, found = (tmp_path / "index.html").read_text(), numbers(tmp_path)
    command = (
        f"weft report 960x6x16 --topology 4xh100 --plan ring --mask {MODEL[2]} --block 16 --out {tmp_path}"
    )
    assert found["command"] == command and command in page
    assert found["made"].endswith("UTC") and found["made"] in page and f"weft {found['weft']}" in page
    [case] = found["cases"]
    assert (case["model"], case["mask"]) == ("960x6x16", MODEL[2])
    assert "<h1>960x6x16: ring</h1>" in page and f"mask {MODEL[2]}" in page
    assert case["cause"]["verdict"] in page


def test_two_of_one_name_are_told_apart(tmp_path):
    plan, machine = schedule("ring", cluster=cluster("4xh100")), cluster("4xh100")
    traced(tmp_path / "run", simulate(plan, machine))
    (tmp_path / "plan.json").write_text(dumps(plan))
    assert call(tmp_path / "run", tmp_path / "plan.json", "--topology", "4xh100", "-o", tmp_path / "out") == 0
    found = numbers(tmp_path / "out")
    assert [case["name"] for case in found["cases"]] == ["ring, measured", "ring, simulated"]
    # What is simulated on a cluster says nothing of where the other one ran.
    assert [case["topology"] for case in found["cases"]] == ["", "4xh100"]
    assert found["missing"][0].startswith("ring, measured: masks")
    assert call(tmp_path / "run", tmp_path / "run", "-o", tmp_path / "out") == 0
    assert [case["name"] for case in numbers(tmp_path / "out")["cases"]] == ["ring, first", "ring, second"]


def test_an_empty_mask_is_drawn_too(tmp_path):
    assert call("960x6x16", "--mask", "random:density=0", "--topology", "4xh100", "-o", tmp_path) == 0
    found = numbers(tmp_path)
    assert {"timeline", "loads"} <= set(found["figures"]) and "scaling" not in found["figures"]
    assert found["cases"][0]["loads"]["imbalance"] == 1.0


def test_json_is_what_the_file_says(tmp_path, capsys):
    (tmp_path / "one.jsonl").write_text(two_ranks().to_jsonl())
    assert call(tmp_path / "one.jsonl", "--json", "-o", tmp_path / "out") == 0
    assert json.loads(capsys.readouterr().out) == numbers(tmp_path / "out")


def test_mistakes_get_a_sentence_and_exit_2(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text('"hello"')
    (tmp_path / "broken.jsonl").write_text("{\n")
    saved = tmp_path / "plan.json"
    saved.write_text(dumps(schedule("ring", cluster=cluster("4xh100"))))
    for words, says in (
        ((tmp_path / "empty",), "holds 0 timelines"),
        ((tmp_path / "text.json",), "holds no schedule"),
        ((tmp_path / "broken.jsonl",), "not a timeline"),
        ((tmp_path / "none.json",), "cannot be read"),
        (
            ("wan2.1-14",),
            "'wan2.1-14' is not a file or folder. There is no model 'wan2.1-14'. Did you mean",
        ),
        (("wan2.1-14b", "--size", "big"), "weft: 'big' is not width x height"),
        ((saved, "--topology", "8xh100"), "for 4 ranks, 8xh100 has 8"),
        (tuple("abcdefghi"), "At most 8 can be compared, got 9"),
        ((saved, "-o", tmp_path / "text.json"), "cannot be written"),
    ):
        assert call(*words) == 2
        assert says in " ".join(capsys.readouterr().err.split())


def test_without_matplotlib_and_torch_there_are_still_svg_and_page(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None;"
        "import importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'matplotlib' else find(name, *a);"
        "from weft.cli.main import main; main(sys.argv[1:])"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, "report", *MODEL, "-o", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert install_command("report") in done.stdout
    assert list((tmp_path / "figures").glob("*.svg")) and not list((tmp_path / "figures").glob("*.png"))
