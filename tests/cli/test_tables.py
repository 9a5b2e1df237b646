"""Every table at 80 columns and in a pipe: snapshots in `snapshots/`, and no value cut.

WEFT_UPDATE_SNAPSHOTS=1 writes the snapshots anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from weft.cli import bench, calibrate, demo, doctor, doctor_gpu, output, testbed, verify
from weft.cli.main import main
from weft.core.topology import Link, Topology
from weft.run.measure.compare import Trial, TrialResult
from weft.serve.load_test import LoadTestResult, RequestSample
from weft.simulate.clusters import cluster

SNAPSHOTS = Path(__file__).parent / "snapshots"
SHAPE = ("8192x24x128", "--mask", "random:density=0.3,cv=0.8")
PLANS = ("ring", "auto", "usp:2x4+balanced", "torus:2x4c3d3+balanced")


def command(*words: str) -> Callable[[], None]:
    def call() -> None:
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code

    return call


def trials() -> list[tuple[Trial, TrialResult]]:
    sizes = {"tokens": 509, "heads": 6, "kv_heads": 6, "head_dim": 32}
    errors = {"output_error": 3.96e-7, "gradient_error": 5.72e-7, "tolerance": 5e-6, "proved_steps": 7822}
    plans = {"auto": "gather:4x2+balanced"}
    return [
        (
            Trial(**sizes, asked=name, density=density, prefix=prefix),
            TrialResult(plan=plans.get(name, name), seconds=0.0123, bytes_sent=1_234_567, **errors),
        )
        for name in PLANS
        for density, prefix in ((None, 0), (0.3, 0), (None, 7))
    ]


def show_verify() -> None:
    rows = [{"ranks": 8, **vars(trial), **vars(result), "holds": result.holds} for trial, result in trials()]
    verify._report(rows, "8 ranks (float32, cpu) against one in float64", verify._cells, as_json=False)


def show_verify_model() -> None:
    row = {"ranks": 8, "part": "transformer_2", "plans": list(PLANS[2:]), "attention": "joint"}
    row |= {"error": 1.2e-5, "tolerance": 2e-5, "sent": 123_456_789, "holds": True}
    verify._report([row], "WanTransformer3DModel: 8 ranks against one", verify._model_cells, as_json=False)


def show_demo() -> None:
    demo._show([(8, "text + video", result) for _, result in trials()], {"text + video": 0.0456})


def show_bench() -> None:
    samples = [
        RequestSample(kind=kind, at=at, seconds=123.4 + at, queue=0.0042, code="ok" if at else "queue_full")
        for at in range(3)
        for kind in ("image", "video")
    ]
    bench._print(LoadTestResult(samples=samples, alone={"image": 1.0, "video": 44.0}, slo=3.0))


def show_testbed() -> None:
    machines = [SimpleNamespace(name=f"weft-1234-m{i}", address=f"10.77.0.{i}") for i in (1, 12)]
    traffic = iter([[SimpleNamespace(sent=0)] * 2, [SimpleNamespace(sent=1_234_567_890)] * 2])
    pool = SimpleNamespace(run=lambda *_: [0.0123])
    bed: Any = SimpleNamespace(machines=machines, rate="400mbit", traffic=lambda: next(traffic))
    bed.pool = lambda _: nullcontext(pool)
    testbed._show(bed, 1)


def show_doctor() -> None:
    finding = doctor.Finding
    note = "block-sparse attention is gathered for torch's SDPA instead: no C compiler"
    gpu = "NVIDIA H100 80GB HBM3, 80 GiB, sm 9.0"
    doctor._show(
        [
            finding("torch", "ok", "2.13.0+cpu, 2 threads"),
            finding("CPU kernel", "limited", note=note),
            finding("cores", "ok", "2 of 2"),
            finding("GPU 0", "ok", gpu, "reaches 7 peers directly"),
            finding("prometheus_client", "missing", "", "for metrics", "pip install 'weft[serve]'"),
        ]
    )


def show_doctor_gpu() -> None:
    check = {"name": "bfloat16 · D256 · ragged · backward", "status": "wrong", "numbers": {"error": 5.3e-7}}
    suite = {"name": "kernel-cudnn_sparse", "seconds": 123.4, "checks": [check], "message": ""}
    cause = "rank 1: RuntimeError: cuDNN has no engine for this graph in 'bfloat16 · D256' after 4 attempts"
    for status in ("ok", "wrong"):
        typer.echo(doctor_gpu._line({**suite, "status": status}))
    typer.echo(doctor_gpu._line({**suite, "status": "failed", "message": cause}))


def show_calibrate() -> None:
    slow = Link(latency=1e-5, bandwidth=2e9)
    on_cpus = replace(
        Topology.local(4), cores=4, flops=2.433e11, intra=Link(latency=1.6e-5, bandwidth=0.99999e12)
    )
    for box in (on_cpus, replace(cluster("2x2xh100"), links=((0, 1, slow), (1, 0, slow)))):
        typer.echo(calibrate._words(box, Path("topology.toml")))


CASES: dict[str, Callable[[], None]] = {
    "plan": command("plan", *SHAPE, "--topology", "8xh100", "--all"),
    "plan-machines": command("plan", *SHAPE, "--topology", "2x4xh100"),
    "simulate": command("simulate", *SHAPE, "--topology", "2x4xh100", "--plan", "all", "--devices", "4,8"),
    "mask": command("mask", "sta:window=3x3x3,dense=0.1", "--grid", "8x16x16", "--heads", "8"),
    "verify": show_verify,
    "verify-model": show_verify_model,
    "demo": show_demo,
    "bench": show_bench,
    "testbed": show_testbed,
    "doctor": show_doctor,
    "doctor-gpu": show_doctor_gpu,
    "calibrate": show_calibrate,
    "models": command("models"),
}


@pytest.mark.parametrize("name", CASES)
def test_table_is_whole_at_80_columns_and_in_a_pipe(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells: set[str] = set()
    table = output.table

    def record(rows: Any, **options: Any) -> None:
        cells.update(cell for row in rows for cell in row.values())
        table(rows, **options)

    monkeypatch.setattr(output, "table", record)
    monkeypatch.setattr(doctor, "__version__", "1.2.3")
    CASES[name]()
    pipe = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    CASES[name]()
    narrow = capsys.readouterr().out

    assert max(map(len, narrow.splitlines())) <= 80
    for text in (pipe, narrow):
        assert "\x1b" not in text and not re.search(r"\d…|…\d", text)
        assert all(value in text for value in cells if output.NUMBER.fullmatch(value) or " " not in value)
    assert all(cell in pipe and "…" not in cell for cell in cells), "a pipe has every cell on one line"
    assert set(pipe.split()) == set(narrow.split())
    if name != "models":  # which has the models of the installed adapters
        compare(name, {"pipe": pipe, "80": narrow})


def compare(name: str, texts: dict[str, str]) -> None:
    for kind, text in texts.items():
        path = SNAPSHOTS / f"{name}.{kind}.txt"
        if os.environ.get("WEFT_UPDATE_SNAPSHOTS"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs"


@pytest.mark.parametrize("columns", [20, 40, 60, 79])
def test_no_width_cuts_a_value(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"#": str(i), "plan": plan, "time": "1.23 ms", "error": "5.7e-07"} for i, plan in enumerate(PLANS)
    ]
    rows = [row | {"note": "the first words of a note of 12 ms and more"} for row in rows]
    monkeypatch.setenv("COLUMNS", str(columns))
    output.table(rows)
    text = capsys.readouterr().out
    for row in rows:
        assert all(value in text for name, value in row.items() if name != "note")
    assert re.sub(r"\s+", " ", text).count("12 ms") == len(rows), "a unit stays with its number"
