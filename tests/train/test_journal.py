"""The journal: floats to the bit, valid JSON, nothing lost by a kill, a resume or a full disk."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from contextlib import closing
from io import StringIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from weft.core.errors import InputError
from weft.core.install import install_command
from weft.train import progress_line
from weft.train.journal import Journal, encode
from weft.train.progress_line import ProgressLine


def records(folder) -> list[dict]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [
        json.loads(line, parse_constant=refuse) for line in (folder / "log.jsonl").read_bytes().splitlines()
    ]


def step(n: int, **values) -> dict:
    return {"kind": "step", "step": n, "loss": 0.5, "seconds": 0.5, "samples": 8, "tokens": 2048} | values


@given(st.floats())
def test_a_float_comes_back_to_the_bit(loss):
    back = float(json.loads(encode({"loss": loss}), parse_constant=lambda _: 1 / 0)["loss"])
    assert back == loss or math.isnan(back) and math.isnan(loss)
    assert math.copysign(1, back) == math.copysign(1, loss) or math.isnan(loss)


def test_values_of_all_kinds_are_plain_and_there_at_once(tmp_path):
    with closing(Journal(tmp_path / "new", total=7)) as journal:
        journal.write("run", 0, recipe={"size": (2, 4), "at": str(tmp_path)}, ranks=2)
        journal.write("sparsity", 3, layer=1, density=[float(np.float32(0.1)), math.nan], coverage=0.9)
        run, sparsity = records(tmp_path / "new")
    assert run["recipe"] == {"size": [2, 4], "at": str(tmp_path)} and run["total"] == 7
    assert sparsity["density"] == [float(np.float32(0.1)), "NaN"] and sparsity["coverage"] == 0.9


@pytest.mark.parametrize("cut", [b'{"kind": "step", "st', b"\x00\x00\x00", b"7"])
def test_a_cut_last_line_is_removed_and_the_next_is_whole(tmp_path, cut):
    for n in (1, 2):
        with closing(Journal(tmp_path, total=9)) as journal:
            journal.write("step", n)
        path = tmp_path / "log.jsonl"
        path.write_bytes(path.read_bytes() + cut)
    with closing(Journal(tmp_path, total=9)) as journal:
        journal.write("step", 3)
    assert [one["step"] for one in records(tmp_path)] == [1, 2, 3]


def test_a_whole_record_that_lacks_only_its_end_is_kept(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(encode(step(1)).rstrip())
    with closing(Journal(tmp_path, total=9)) as journal:
        journal.write("step", 2)
    assert [one["step"] for one in records(tmp_path)] == [1, 2]


def test_rewind_moves_what_comes_after_and_loses_nothing(tmp_path):
    with closing(Journal(tmp_path, total=9)) as journal:
        for n in range(6):
            journal.write("step", n, loss=n / 3)
        journal.write("note", 2, text="late, but of an early step")
        before = records(tmp_path)
        assert journal.rewind(3) == 2
        journal.write("step", 4, loss=7.0)
        assert journal.rewind(3) == 1
        assert journal.rewind(3) == 0
        journal.write("end", 4)
    assert [one["step"] for one in records(tmp_path)] == [0, 1, 2, 3, 2, 4]
    moved = [json.loads(line) for line in (tmp_path / "log.jsonl.1").read_bytes().splitlines()]
    assert sorted(moved + records(tmp_path)[:-1], key=str) == sorted(before, key=str)
    assert {path.name for path in tmp_path.iterdir()} >= {"log.jsonl.1", "log.jsonl.2"}
    assert not (tmp_path / "log.jsonl.3").exists()


@pytest.mark.filterwarnings("ignore:.*fork")  # Python 3.12 warns of torch's threads
def test_a_fork_and_a_kill_neither_lose_nor_double_a_line(tmp_path):
    journal = Journal(tmp_path, total=9)
    journal.write("step", 1)
    if not (child := os.fork()):
        journal.write("step", 2)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    journal.write("step", 3)
    journal.close()
    assert [one["step"] for one in records(tmp_path)] == [1, 2, 3]


def test_a_full_disk_is_told_and_leaves_whole_lines(tmp_path):
    journal = Journal(tmp_path, total=9)
    journal.write("step", 1)
    size = (tmp_path / "log.jsonl").stat().st_size
    kept, before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
        with pytest.raises(InputError, match=r"log\.jsonl cannot be written: File too large"):
            journal.write("note", 2, text="x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, kept)
    assert (tmp_path / "log.jsonl").stat().st_size == size
    journal.write("step", 3)
    journal.close()
    assert [one["step"] for one in records(tmp_path)] == [1, 3]


def test_the_line_says_where_the_run_stands(monkeypatch):
    clock = iter([100.0, 100.0, 100.0, 103.0, 103.0, 103.0])
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: next(clock))
    shown = ProgressLine(200, Console(file=StringIO(), width=200))
    shown.update(step(9))
    assert shown.line() == "step 9/200 · loss 0.5000 · 16.0 samples/s · 4,096 tokens/s · 1:36 left"
    for layer, (mode, density) in enumerate(
        [("dense", None), ("sparse", [0.25, 0.15]), ("sparse", [0.2, 0.24])]
    ):
        shown.update({"kind": "sparsity", "step": 10, "layer": layer, "mode": mode, "density": density})
    shown.update({"kind": "validation", "step": 10, "loss": math.nan})
    shown.update(step(10, loss=math.inf))
    assert shown.line().startswith("step 10/200 · loss inf (validation nan) · ")
    # Three seconds by the clock for the last step, whatever the step itself took.
    assert shown.line().endswith("9:30 left · 2 of 3 blocks sparse, density 0.21")


def test_without_a_terminal_lines_are_rare_and_the_last_is_shown(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    console = Console(file=StringIO(), width=40, soft_wrap=True)
    shown = ProgressLine(100, console)
    for n in range(1, 101):
        now[0] += 1
        shown.update(step(n))
    shown.update({"kind": "note", "step": 100, "text": "two files were skipped"})
    shown.update({"kind": "end", "step": 100})
    lines = console.file.getvalue().splitlines()
    words = [line.split(" · ")[0] for line in lines]
    assert words == [*(f"step {n}/100" for n in (1, 31, 61, 91)), "two files were skipped", "step 100/100"]
    assert "\x1b" not in "".join(lines) and lines[0].endswith("0:50 left")


def test_on_a_terminal_there_is_one_line_and_the_cursor_stays(monkeypatch):
    monkeypatch.setattr(progress_line, "TERMINAL_SECONDS", 0.0)
    console = Console(file=StringIO(), force_terminal=True, width=60)
    shown = ProgressLine(3, console)
    for n in (1, 2, 3):
        shown.update(step(n))
    assert console.file.getvalue().count("\n") == 0
    shown.update({"kind": "end", "step": 3})
    text = console.file.getvalue()
    assert "step 3/3" in text and "…" not in text and text.count("\n") == 1
    assert text.index("\x1b[?25h") < text.index("step 1/3")


def test_what_has_no_room_is_left_out_whole():
    shown = ProgressLine(200, Console(file=StringIO(), width=200))
    shown.update(step(9))
    whole = shown.line()
    for columns in range(20, len(whole) + 1):
        line = shown.short_line(columns)
        assert set(line.split(" · ")) <= set(whole.split(" · ")) and line.startswith("step 9/200 · ")
        assert len(line) <= max(columns, len("step 9/200 · 1:36 left"))
    assert shown.short_line(len(whole)) == whole


def test_without_tensorboard_it_says_so_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with closing(Journal(tmp_path, total=9, live=True)) as journal:
        for n in range(3):
            journal.write("step", n, loss=0.5)
    assert capsys.readouterr().err.count(f"without TensorBoard ({install_command('train')})") == 1
    assert len(records(tmp_path)) == 3 and not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("writers", [0, 9, 99])
def test_tensorboard_has_the_scalars_once(tmp_path, writers, monkeypatch):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    event_file_writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    counter = event_file_writer.AtomicCounter(writers)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)  # part of the names of files
    with closing(Journal(tmp_path, total=9)) as journal:
        journal.write("run", 0, ranks=2)
        for n in range(1, 6):
            journal.write("step", n, loss=n / 3)
        journal.rewind(3)
        journal.write("step", 4, loss=9.0)
        journal.write("sparsity", 4, layer=2, density=[0.25, 0.75], mode="sparse")
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"step/loss", "sparsity/2/density"}
    assert [(e.step, e.value) for e in found.Scalars("step/loss")][2:] == [(3, 1.0), (4, 9.0)]
    assert found.Scalars("sparsity/2/density")[0].value == 0.5
