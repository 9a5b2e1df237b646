"""Logs and timelines that anything may have happened to: drawn as far as they go, or refused."""

from __future__ import annotations

import io
import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.core.errors import InputError
from weft.core.timeline import Span, Timeline
from weft.masks.grid import TokenGrid
from weft.masks.trace import trace_mask
from weft.report import trained, training
from weft.report.runs import report_runs
from weft.report.sources import measured
from weft.report.write import write, write_report

HOSTILE: list[Any] = [
    None, True, -1, 2**40, 10**30, 1e308, float("nan"), float("inf"), "", "a", "NaN", [], {}, [[]], [None],
    ["a"],
    {"a": 1}, 1.5, 0,
]  # fmt: skip
SPANS = (Span(0, "compute", "attend", "a", 0.0, 1.0), Span(1, "comm", "send", "b", 0.5, 2.0, 1, 0, 64))
TIMELINE = Timeline("a", 2, SPANS, measured=True, memory=(1, 2), clocks=((0.0, 0.1), (0.2, 0.1)))


def use(timeline: Timeline) -> None:
    """What a report asks for."""
    for name in ("seconds", "computing", "waiting", "idle", "overlap", "imbalance", "slowest", "traffic"):
        getattr(timeline, name)


def test_a_timeline_with_one_value_changed_is_valid_or_refused() -> None:
    lines = [json.loads(line) for line in TIMELINE.to_jsonl().splitlines()]
    assert Timeline.from_jsonl(TIMELINE.to_jsonl()) == TIMELINE
    refused = 0
    for number, line in enumerate(lines):
        for name in (*line, "other"):
            for value in HOSTILE:
                changed = [*lines[:number], line | {name: value}, *lines[number + 1 :]]
                try:
                    use(Timeline.from_jsonl("\n".join(json.dumps(each) for each in changed)))
                except InputError as error:
                    assert "This is not a timeline" in str(error)
                    refused += 1
    assert refused > 300


@pytest.mark.parametrize("end", [5e-324, 1e12])
def test_a_timeline_of_extreme_times_is_drawn(end: float, tmp_path: Path) -> None:
    extreme = replace(TIMELINE, spans=(SPANS[0]._replace(end=end), SPANS[1]))
    read = Timeline.from_jsonl(extreme.to_jsonl())
    assert write_report([measured(read)], tmp_path).is_file()


@pytest.mark.parametrize("changes", [{"memory": [1, 2, 3]}, {"end": 1e308}, {"start": -1e308}])
def test_a_timeline_that_could_not_be_drawn_is_refused(changes: dict[str, Any]) -> None:
    head, first, last = map(json.loads, TIMELINE.to_jsonl().splitlines())
    for table in (head, first):
        table |= {name: value for name, value in changes.items() if name in table}
    with pytest.raises(InputError, match="This is not a timeline"):
        Timeline.from_jsonl("\n".join(map(json.dumps, (head, first, last))))


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, '{"name": "a"}', "{}\n{}", '{"name": "a", "ranks": 0}\n{}', "\0"]
)
def test_a_text_that_is_no_timeline_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="This is not a timeline"):
        Timeline.from_jsonl(text)


def test_a_log_with_hostile_values_is_read(tmp_path: Path) -> None:
    rng = random.Random(22)
    records = [
        {"kind": "run", "step": 0, "recipe": {"data": {"set": "a"}}, "ranks": 2, "parameters": 10,
        "total": 5},
        *({"kind": "step", "step": n, "loss": 1 / n, "seconds": 1.0, "samples": 2,
        "tokens": 8} for n in (1, 2, 3)),
        {"kind": "sparsity", "step": 2, "layer": 0, "mode": "sparse", "density": [0.5], "coverage": 0.9},
        {"kind": "validation", "step": 3, "loss": 0.5},
        {"kind": "end", "step": 3},
    ]  # fmt: skip
    for _ in range(600):
        changed = [dict(record) for record in records]
        for _ in range(3):
            record = rng.choice(changed)
            record[rng.choice(list(record))] = rng.choice(HOSTILE)
        lines = [json.dumps(record) for record in changed]
        lines.insert(rng.randrange(len(lines)), rng.choice(["[" * 5000, "{", "3", "\x00", '"a"', "[]"]))
        (tmp_path / "log.jsonl").write_text("\n".join(lines))
        try:
            run = training.read(tmp_path)
        except InputError as error:
            assert "has no step yet" in str(error)
            continue
        assert trained.about(run) and trained.verdict(run) and trained.rows(run)
        assert isinstance(run.total, int)


@pytest.mark.parametrize("changes", [{"loss": 1e308}, {"loss": 5e-324}, {"tokens": 1e308, "seconds": 5e-324}])
def test_a_log_of_extreme_numbers_is_drawn(changes: dict[str, float], tmp_path: Path) -> None:
    steps = [
        {"kind": "step", "step": n, "loss": 1 / n, "seconds": 1.0, "samples": 2, "tokens": 8} for n in (1, 2)
    ]
    lines = [json.dumps(record) for record in (steps[0], steps[1] | changes)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    assert write(report_runs([training.read(tmp_path)]), tmp_path / "out").is_file()


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def bomb(shape: str, size: int) -> bytes:
    """An .npz whose array says that it is larger than the file."""
    header = f"{{'descr': '|b1', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(118) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * size
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("tiles.npy", data)
    return stream.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"PK\x03\x04", b"\x93NUMPY", npz(tiles=np.array([object()], dtype=object)), npz(),
        bomb("(1000000000000, 1000, 1000)", 10), bomb("(-1, 2, 3)", 10), bomb("(2, 3", 10), bomb("(" * 50,
        10),
        bomb("(10**30,)", 10), bomb("(1, 1, 1)", 0), npz(tiles=np.zeros((2, 2))),
        npz(counts=np.array([[[-1]]])),
    ],
)  # fmt: skip
def test_a_hostile_trace_of_masks_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(InputError):
        trace_mask(1, TokenGrid(1, 2, 2), block=2, file=str(tmp_path / "a.npz"))


def test_a_trace_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.masks.trace.MAX_BYTES", 1 << 20)
    (tmp_path / "a.npz").write_bytes(npz(tiles=np.zeros((1, 2000, 2000), bool)))
    assert (tmp_path / "a.npz").stat().st_size < 1 << 14
    with pytest.raises(InputError, match="unpacks to 4,000,"):
        trace_mask(1, TokenGrid(1, 2, 2), block=2, file=str(tmp_path / "a.npz"))
