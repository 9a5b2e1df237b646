"""`weft simulate`: simulate plans on clusters of several sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.numbers import counts
from weft.cli.options import Block, Cluster, Dtype, Frames, Json, Mask, Name, Size
from weft.cli.tables import table
from weft.cli.workload import Workload, assumed, assumed_lines, read_topology
from weft.core.files import writing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weft.report.sweep import SweepPoint, SweepResult
    from weft.simulate.models import ModelSizes

MOST_PLANS = 5
"""Maximum rows of the table per size; --json has all."""


def run(
    model: Name,
    *,
    topology: Cluster = "4x8xh100",
    devices: Annotated[
        str, typer.Option(help="Sizes such as 8,16,32, in machines of the topology; its own if left out.")
    ] = "",
    gpus: Annotated[str, typer.Option(hidden=True)] = "",
    plan: Annotated[
        str, typer.Option(help="auto takes the planner's choice; all; or names such as ulysses,ring.")
    ] = "auto",
    mask: Mask = "dense",
    size: Size = "",
    frames: Frames = 0,
    block: Block = 64,
    dtype: Dtype = "bfloat16",
    report: Annotated[
        Path | None, typer.Option(help="Write a report on the fastest of the largest size here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate one attention of a model by several plans on clusters of several sizes.

    Try: weft simulate wan2.1-14b --topology 4x8xh100 --devices 8,16,32 --mask svg:density=0.25
    """
    work = Workload.read(model, size=size, frames=frames, mask=mask, block=block, dtype=dtype)
    cluster = read_topology(topology)
    devices = devices or gpus
    asked = counts(devices, "devices") if devices else []
    if not as_json:
        typer.echo(f"{work} · machines of {cluster.name}")
    from weft.report.sweep import resized, sweep, wanted

    clusters = [resized(cluster, n) for n in asked] or [cluster]
    problems = [work.problem(c.ranks) for c in clusters]
    active, names = work.mask, tuple(name.strip() for name in plan.split(","))
    total = sum(len(wanted(p, active, c, names)) for p, c in zip(problems, clusters, strict=True))
    if report:  # fail before the simulation, not after it
        with writing(report, hint="Give another --report."):
            report.mkdir(parents=True, exist_ok=True)
    with _progress(total) as step:
        results = list(sweep(work.problem, active, clusters, names, on_plan=step))
    rows = _rows(results, work.model, work.grid)
    if report:
        _report(results, report)
    if as_json:
        about = {"model": model, "mask": mask, "density": active.density, "topology": cluster.name}
        about |= {"assumed": assumed(cluster, active)}
        typer.echo(json.dumps({**about, "layers": work.model.layers, "rows": rows}, indent=2))
    else:
        typer.echo(f"{mask} · {active.density:.0%} active\n{assumed_lines(cluster, active)}")
        _show(rows, results, work.model)
        if report:
            typer.echo(f"\n{report / 'index.html'}")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr that names the current plan."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        begun = False

        def step(what: str) -> None:
            nonlocal begun
            progress.update(task, description=what, advance=1 if begun else 0)
            begun = True

        yield step


def _rows(
    results: Sequence[SweepResult], model: ModelSizes, grid: tuple[int, int, int]
) -> list[dict[str, Any]]:
    """Return rows by size, fastest first; speedup and efficiency refer to the smallest size."""
    from weft.simulate.model_step import step
    from weft.simulate.models import MODELS

    points = [one.point for one in results]
    clusters = {one.cluster.ranks: one.cluster for one in results}
    known = model.name in MODELS  # a bare shape has no linear layers
    least = min(point.gpus for point in points)
    base = min(point.seconds for point in points if point.gpus == least)

    def speedup(point: SweepPoint) -> float:
        return base / point.seconds if point.seconds else 1.0  # an empty mask

    return [
        {
            **asdict(point),
            "step_seconds": step(model, grid, point.seconds, clusters[point.gpus]).seconds if known else None,
            "speedup": speedup(point),
            "efficiency": speedup(point) * least / point.gpus,
        }
        for point in sorted(points, key=lambda p: (p.gpus, p.seconds))
    ]


def _show(rows: list[dict[str, Any]], results: Sequence[SweepResult], model: ModelSizes) -> None:
    from rich.console import Console

    from weft.core import units
    from weft.report.terminal import text_gantt

    console = Console(highlight=False, markup=False, soft_wrap=True)
    columns = ("devices", "plan", "attention", "step", "speed", "eff.", "exposed", "imbal. in time", "sent")
    fastest = table(columns, left=("plan",), padding=(0, 1, 0, 0))  # 80 columns with the longest name
    shown: dict[int, int] = {}
    for row in rows:
        place = shown[row["gpus"]] = shown.get(row["gpus"], 0) + 1
        if place <= MOST_PLANS:
            fastest.add_row(*_cells(row), style="bold" if place == 1 else "")
    console.print(fastest)
    hidden = sum(max(0, count - MOST_PLANS) for count in shown.values())
    more = f" · {hidden} slower plans are left out: --json has them" if hidden else ""
    console.print(
        f"step: a pass through {model.layers} layers, no VAE · speed, eff.: against the first · "
        f"sent: by a GPU{more}",
        style="dim",
    )
    best = _best(results)
    console.print(f"\n{best.schedule.name} on {best.cluster.name}, simulated")
    for line in text_gantt(best.timeline):
        console.print(line)
    console.print(f"{units.time(best.timeline.seconds)}, {best.point.exposed:.1%} of it waiting for data")


def _cells(row: dict[str, Any]) -> list[str]:
    from weft.core import units

    return [
        str(row["gpus"]),
        row["plan"],
        units.time(row["seconds"]),
        units.time(row["step_seconds"]) if row["step_seconds"] else "–",
        f"{row['speedup']:.2f}×",
        f"{row['efficiency']:.0%}",
        f"{row['exposed']:.1%}",
        f"{row['imbalance']:.3f}",
        units.size((row["intra_bytes"] + row["inter_bytes"]) / row["gpus"]),
    ]


def _best(results: Sequence[SweepResult]) -> SweepResult:
    """Return the fastest plan of the largest size."""
    return min(results, key=lambda one: (-one.point.gpus, one.point.seconds))


def _report(results: Sequence[SweepResult], folder: Path) -> None:
    from weft.report.case import Case
    from weft.report.write import write_report

    best = _best(results)
    points = tuple(one.point for one in results)
    here = tuple(sorted((p for p in points if p.gpus == best.point.gpus), key=lambda p: p.seconds))
    write_report([Case(best.schedule.name, best.timeline, best.schedule, best.cluster, here, points)], folder)
