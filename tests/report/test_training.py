"""`weft report` of training runs: finished, under way, dense, broken, cut off; one, or several together."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.test_report import call, numbers
from weft.core.errors import InputError
from weft.report import write
from weft.report.draw import Dot, Figure, Label, Pixels, Polyline, Rect
from weft.report.frame import TOP
from weft.report.learning import draw_runs, loss_figure, running
from weft.report.png import render
from weft.report.trained import about, layer_rows, rows, summary, verdict
from weft.report.training import read

STEPS = 120


def step(n: int, **values: Any) -> dict[str, Any]:
    # The first two thirds are dense, at half the speed.
    known = {"loss": 2.0 / n, "seconds": 0.5 if n <= 80 else 0.25, "samples": 8, "tokens": 800}
    return {"kind": "step", "step": n} | known | values


def layer(n: int, number: int, *, sparse: bool, **values: Any) -> dict[str, Any]:
    known = {"sparsity": [0.5, 0.9], "density": [0.2, 0.3], "coverage": 0.9, "recall": None, "keys": 0.87}
    return (
        {"kind": "sparsity", "step": n, "layer": number, "mode": "sparse" if sparse else "dense"}
        | known
        | values
    )


def dense(done: int = STEPS) -> list[dict[str, Any]]:
    run = {"kind": "run", "step": 0, "total": STEPS, "ranks": 2, "parameters": 1_000_000, "torch": "2.13.0"}
    return [run, *(step(n) for n in range(1, done + 1))]


def sparse() -> list[dict[str, Any]]:
    """Layers 0 and 2 of three turn sparse at 80; the log has them in another order."""
    found = dense()
    found += [layer(40, n, sparse=False, coverage="NaN", density=[1.0, 1.0]) for n in (2, 0, 10)]
    found += [layer(80, n, sparse=n < 10, coverage=0.8 + n / 20) for n in (2, 0, 10)]
    found += [{"kind": "validation", "step": n, "loss": 2.5 / n} for n in (60, 120)]
    return [*found, {"kind": "end", "step": STEPS}]


def log(folder: Path, records: list[dict[str, Any]], rest: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records) + rest)
    return folder


def test_what_is_read_is_what_was_written(tmp_path):
    run = read(log(tmp_path / "run", sparse()))
    assert (run.name, run.last, run.total, run.finished, run.unreadable) == ("run", 120, 120, True, 0)
    assert run.values["loss"].tolist() == [2.0 / n for n in range(1, 121)]
    assert list(run.layers) == ["0", "2", "10"] and run.changes == [(80, 2)]
    steps, computed = run.over_time("share")
    assert steps.tolist() == [40, 80] and computed.tolist() == [[1, 0.25], [1, 0.25], [1, 1]]
    known = summary(run)
    assert known["density"] == 0.5 and known["sparse_layers"] == 2
    assert known["lowest_coverage"] == 0.8 and known["coverage"] == pytest.approx(1.0)
    assert (known["best"], known["best_step"]) == (2.5 / 120, 120)
    assert known["samples_per_second"] == 32 and known["step_seconds"] == 0.25
    assert verdict(run).endswith("2.00× as fast.")
    layers = [dict(zip(layer_rows(run)[0], row, strict=True)) for row in layer_rows(run)[1]]
    assert [(one["coverage"], one["recall"], one["predictor"]) for one in layers[:2]] == [
        ("0.800", "–", "0.870"),
        ("0.900", "–", "0.870"),
    ]


def test_a_block_that_turns_back_is_marked_again(tmp_path):
    turned = [layer(100, 2, sparse=False), layer(110, 2, sparse=True), layer(110, 0, sparse=False)]
    assert read(log(tmp_path, [*sparse(), *turned])).changes == [(80, 2), (100, 1)]


def test_a_run_is_dense_only_as_far_as_all_its_layers_are_known_to_be(tmp_path):
    """A layer that turns sparse at 41 is read only at 80; another one, still dense, is read meanwhile."""
    records = [*(step(n, seconds=0.5 if n <= 40 else 0.25) for n in range(1, STEPS + 1))]
    records += [layer(40, 0, sparse=False), layer(80, 0, sparse=True)]
    records += [layer(n, 1, sparse=False) for n in (40, 60, 80, 100)]
    assert verdict(read(log(tmp_path / "a", records))).endswith("2.00× as fast.")
    always = [*dense(), layer(80, 0, sparse=True)]
    assert verdict(read(log(tmp_path / "b", always))) == "1 of 1 layers are sparse.", "when was it dense?"


def test_a_run_that_began_anew_was_not_resumed(tmp_path):
    run = read(log(tmp_path, [{"kind": "run", "step": 0}, *dense(5)]))
    assert run.resumed == () and "resumed" not in about(run)


def test_coverage_of_dense_layers_is_not_called_selected(tmp_path):
    told = [layer(40, n, sparse=False) for n in (0, 1)]
    assert "is selected" not in str(rows(read(log(tmp_path / "a", [*dense(), *told]))))
    assert "is selected" in str(rows(read(log(tmp_path / "b", sparse()))))


def test_of_steps_made_twice_the_later_counts(tmp_path):
    resumed = [{"kind": "run", "step": 60, "total": 150}, *(step(n, loss=7.0) for n in range(61, 70))]
    run = read(log(tmp_path, [*dense(65), *resumed]))
    assert run.last == 69 and run.resumed == (60,) and run.total == 150
    assert run.values["loss"][58:62].tolist() == [2.0 / 59, 2.0 / 60, 7.0, 7.0]


@pytest.mark.parametrize("done", [1, 2, 7])
def test_a_young_dense_run_with_a_cut_line_is_drawn_and_says_what_is_missing(tmp_path, done):
    run = read(log(tmp_path / "a", dense(done), rest='{"kind": "step", "st'))
    assert run.unreadable == 1 and not run.finished
    figures, missing = draw_runs([run])
    assert [figure.name for figure in figures] == ["loss", "speed", "seconds"]
    assert [re.split(r" \(", text)[0] for text in missing] == ["validation", "sparsity"]
    assert rows(run)["steps"] == (f"{done} of 120", "the log ends here: under way, or broken off")


def test_a_loss_that_is_no_number_is_seen_and_draws_no_line(tmp_path):
    records = [
        step(n, loss="NaN" if n > 100 else "Infinity" if n == 50 else 0.5) for n in range(1, STEPS + 1)
    ]
    run = read(log(tmp_path, records))
    assert "not a number from step 50" in verdict(run)
    figure = loss_figure([run])
    lines = [shape for shape in figure.shapes if isinstance(shape, Polyline) and shape.kind == "loss"]
    assert len(lines) == 2
    assert all(math.isfinite(y) for line in lines for _, y in line.points)
    marks = [shape.x for shape in figure.shapes if isinstance(shape, Rect) and shape.kind == "broken"]
    assert marks and min(marks) < 450 < max(marks)


def test_the_curve_is_the_mean_of_what_lies_around(tmp_path):
    run = read(log(tmp_path, [step(n, loss=float(n)) for n in range(1, STEPS + 1)]))
    assert run.window == 6
    steps, values = running(run, run.values["loss"], lambda table, axis: table.sum(axis) * 0 + table.shape[0])
    assert steps.tolist() == run.step.tolist() and values[10] == 6
    _, means = running(run, run.values["loss"], np.nanmean)
    assert means[10] == np.mean(run.values["loss"][7:13])
    assert means[0] == np.mean(run.values["loss"][:3]) and means[-1] == np.mean(run.values["loss"][-4:])


def test_figures_show_the_numbers_at_their_places(tmp_path):
    figures, missing = draw_runs([read(log(tmp_path, sparse()))])
    assert missing == []
    by_name = {figure.name: figure.shapes for figure in figures}
    assert set(by_name) == {"loss", "sparsity", "heads", "coverage", "speed", "seconds"}
    [one] = [s for s in by_name["loss"] if isinstance(s, Polyline) and s.kind == "stage"]
    dots = [s for s in by_name["loss"] if isinstance(s, Dot) and s.kind == "validation"]
    assert one.points[0][0] == pytest.approx(dots[0].x + (dots[1].x - dots[0].x) / 3)
    assert any(isinstance(s, Label) and s.text == "2/3 sparse" for s in by_name["loss"])
    picture = next(s for s in by_name["sparsity"] if isinstance(s, Pixels) and s.kind == "sparsity")
    assert (
        picture.pixels.shape[0] == 3
        and not picture.pixels[:, 60, 3].any()
        and picture.pixels[:, 200, 3].all()
    )
    used = [s for s in by_name["sparsity"] if isinstance(s, Polyline) and s.kind == "sparse"]
    assert len(used) == 2 and used[0].points[0][0] == pytest.approx(62 + 720 * 79 / 119, abs=3)
    heads = [s for s in by_name["heads"] if isinstance(s, Dot)]
    assert len(heads) == 6 and "layer 10, head 1: 0.900" in heads[-1].tip
    speed = next(s for s in by_name["speed"] if isinstance(s, Polyline) and s.kind == "speed")
    assert 200 - speed.points[-1][1] == pytest.approx(2 * (200 - speed.points[0][1]))
    assert speed.points[-1][1] > TOP


def test_a_log_of_any_name_that_has_not_all_steps_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(write, "has_png", lambda: False)
    begun = {"kind": "run", "step": 0, "time": 1000.0, "total": 600}
    first = [begun, *(step(n, time=1000.0 + n) for n in range(60, 301, 60))]
    # Stopped for an hour, and resumed.
    again = [{**begun, "step": 300, "time": 4900.0}, *(step(n, time=4600.0 + n) for n in range(360, 601, 60))]
    path = tmp_path / "shapes.log.jsonl"
    path.write_text("\n".join(map(json.dumps, first + again)))
    assert call(path, "-o", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("shapes ·") and re.search(r"10:00 +of the run", shown)
    run = read(path)
    assert (run.wall, run.every, run.resumed) == (600.0, 60, (300,))
    page = (tmp_path / "out" / "index.html").read_text()
    assert "every 60th step" in page and "every step" not in page


@pytest.mark.parametrize("records", [[], [{"kind": "run", "step": 0}]])
def test_a_log_without_a_step_is_refused(tmp_path, records):
    with pytest.raises(InputError, match="no step yet"):
        read(log(tmp_path, records))


def test_the_command_writes_the_page_and_tells_the_rest(tmp_path, capsys, monkeypatch):
    for package in ("torch", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(write, "has_png", lambda: False)
    run = log(tmp_path / "<b>run", sparse())
    assert call(run, "-o", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[:-1])) <= 80
    assert "2 of 3" in shown and "0.500 to 0.900" in shown and "2.00× as fast" in shown
    html = (tmp_path / "out" / "index.html").read_text()
    assert "&lt;b&gt;run" in html and "<b>run" not in html and "$" not in html
    assert numbers(tmp_path / "out")["runs"][0]["density"] == 0.5
    assert {p.stem for p in (tmp_path / "out" / "figures").iterdir()} == set(
        numbers(tmp_path / "out")["figures"]
    )


def test_a_faint_line_is_faint_as_png_too(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    for strength in (1.0, 0.25):
        line = Polyline(((0, 5), (10, 5)), "ink", 9.0, strength=strength)
        render(Figure("line", "", 10, 10, (line,)), str(tmp_path / f"{strength}.png"))
    full, faint = (image.imread(tmp_path / f"{strength}.png")[10, 10, 0] for strength in (1.0, 0.25))
    assert full < 0.2 and 0.6 < faint < 0.9


def test_several_runs_share_their_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(write, "has_png", lambda: False)
    records = [*dense(), {"kind": "validation", "step": 60, "loss": 2.4 / 60}]
    runs = [
        log(tmp_path / "a" / "run", sparse()),
        log(tmp_path / "b" / "run", records),
        log(tmp_path / "c", dense()),
    ]
    assert call(*runs, "-o", tmp_path / "out", "--json") == 0
    known = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in known["runs"]] == [str(path) for path in runs]
    assert set(known["figures"]) == {"loss", "apart", "computed", "speed", "seconds", "sparsity-0"}


def test_who_asks_for_too_many_is_told_how_many_there_may_be(tmp_path, capsys):
    run = log(tmp_path / "run", dense(3))
    assert call(*[run] * 9, "-o", tmp_path / "out") == 2
    assert "At most 8" in capsys.readouterr().err


def test_a_run_is_not_compared_with_a_plan(tmp_path, capsys):
    assert call(log(tmp_path / "run", dense()), "wan2.1-14b", "-o", tmp_path / "out") == 2
    assert "wan2.1-14b is not a training run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
