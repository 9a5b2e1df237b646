"""`weft simulate`: simulate plans on clusters of several sizes."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import output
from weft.cli.numbers import counts
from weft.cli.options import Block, Cluster, Dtype, Frames, Json, Mask, Name, Size
from weft.cli.workload import Workload, assumed, assumed_lines, read_topology
from weft.core.files import writing

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    weft simulate wan2.1-14b --devices 8,16,32 --mask svg:density=0.25
    """
    work = Workload.read(model, size=size, frames=frames, mask=mask, block=block, dtype=dtype)
    cluster = read_topology(topology)
    asked = counts(devices, "devices") if devices else []
    from weft.report.sweep import resized, sweep, wanted

    clusters = [resized(cluster, n) for n in asked] or [cluster]
    problems = [work.problem(c.ranks) for c in clusters]
    with output.progress(f"drawing {mask} …"):
        active, names = work.mask, tuple(name.strip() for name in plan.split(","))
    total = sum(len(wanted(p, active, c, names)) for p, c in zip(problems, clusters, strict=True))
    if report:  # fail before the simulation, not after it
        with writing(report, hint="Give another --report."):
            report.mkdir(parents=True, exist_ok=True)
    with output.progress("simulating …") as status:
        done = count(1)
        results = list(
            sweep(
                work.problem, active, clusters, names,
                on_plan=lambda name: status.update(f"plan {next(done)} of {total}: {name}"),
            )
        )  # fmt: skip
    rows = _rows(results, work.model, work.grid)
    if report:
        _report(results, report)
    if as_json:
        about = {"model": model, "mask": mask, "density": active.density, "topology": cluster.name}
        about |= {"assumed": assumed(cluster, active)}
        typer.echo(json.dumps({**about, "layers": work.model.layers, "rows": rows}, indent=2))
    else:
        about_mask = f"{mask} · {active.density:.0%} active\n{assumed_lines(cluster, active)}"
        typer.echo(output.fill(f"{work} · machines of {cluster.name}\n{about_mask}"))
        _show(rows, results, work.model)
        if report:
            typer.echo(f"\n{report / 'index.html'}")


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
    from weft.core import units
    from weft.report.terminal import text_gantt

    by_size = [
        [row for row in rows if row["gpus"] == size] for size in dict.fromkeys(r["gpus"] for r in rows)
    ]
    fastest = [row for some in by_size for row in some[:MOST_PLANS]]
    first = [number for number, row in enumerate(fastest) if any(row is some[0] for some in by_size)]
    output.table([_cells(row) for row in fastest], bold=first)
    hidden, layers = len(rows) - len(fastest), output.counted(model.layers, "layer")
    more = f" · {hidden} slower plans are left out: --json has them" if hidden else ""
    output.note(
        f"one layer: its attention · one step: a pass through {layers}, no VAE · "
        f"speed, eff.: against the first · sent: by a GPU{more}"
    )
    best = _best(results)
    typer.echo(f"\n{best.schedule.name} on {best.cluster.name}, simulated")
    typer.echo("\n".join(text_gantt(best.timeline)))
    typer.echo(f"{units.time(best.timeline.seconds)}, {best.point.exposed:.1%} of it waiting for data")


def _cells(row: dict[str, Any]) -> output.Row:
    from weft.core import units

    return {
        "devices": str(row["gpus"]),
        "plan": row["plan"],
        "one layer": units.time(row["seconds"]),
        "one step": units.time(row["step_seconds"]) if row["step_seconds"] else "–",
        "speed": f"{row['speedup']:.2f}×",
        "eff.": f"{row['efficiency']:.0%}",
        "exposed": f"{row['exposed']:.1%}",
        "imbal. in time": f"{row['imbalance']:.3f}",
        "sent": units.size((row["intra_bytes"] + row["inter_bytes"]) / row["gpus"]),
    }


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
