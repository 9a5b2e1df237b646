"""`weft plan`: rank the plans for an attention of a model on a cluster, and explain the choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.options import Block, Cluster, Dtype, Frames, Json, Mask, Name, Size
from weft.cli.tables import table
from weft.cli.workload import Workload, assumed, assumed_lines, read_topology
from weft.core import units
from weft.core.files import check_writable, writing

if TYPE_CHECKING:
    from rich.status import Status
    from rich.table import Table

    from weft.core.topology import Topology
    from weft.plan.choose import Candidate, Plan
    from weft.simulate.models import ModelSizes

COSTS = ("intra_bytes", "inter_bytes", "imbalance", "bound", "memory")
"""Fields of a plan in the JSON output."""


def run(
    model: Name,
    *,
    topology: Cluster = "8xh100",
    mask: Mask = "dense",
    size: Size = "",
    frames: Frames = 0,
    block: Block = 64,
    dtype: Dtype = "bfloat16",
    save: Annotated[Path | None, typer.Option(help="Write the first plan here, for Schedule.load.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also list what was left out unbuilt.")] = False,
    as_json: Json = False,
) -> None:
    """Rank the plans for one attention of a model on a cluster by predicted time.

    Try: weft plan wan2.1-14b --topology 8xh100 --mask svg:density=0.25
    """
    work = Workload.read(model, size=size, frames=frames, mask=mask, block=block, dtype=dtype)
    cluster = read_topology(topology)
    problem = work.problem(cluster.ranks)
    if save:
        check_writable(save, hint="Give another --save.")
    # A large mask takes seconds: echo the input first.
    if not as_json:
        typer.echo(f"{work} · {_links(cluster)}")
    with _busy(f"drawing {mask} …"):
        active = work.mask
    if not as_json:
        typer.echo(f"{mask} · {active.density:.0%} active")
    with _busy("timing candidates …"):
        from weft.plan.choose import choose

        plan = choose(problem, active, cluster)
    if save:
        _save(plan, save)
    if as_json:
        typer.echo(json.dumps({**_plain(plan), "assumed": assumed(cluster, active)}, indent=2))
    else:
        _show(plan, work.model, cluster, show_all=show_all)


def _busy(words: str) -> Status:
    from rich.console import Console

    return Console(stderr=True).status(words)


def _links(cluster: Topology) -> str:
    links = f"{cluster.intra.bandwidth / 1e9:,.3g} GB/s"
    if cluster.machines > 1:
        links += f" inside, {cluster.inter.bandwidth / 1e9:,.3g} between machines"
    return f"{cluster.name} ({links})"


def _show(plan: Plan, model: ModelSizes, cluster: Topology, *, show_all: bool) -> None:
    from rich.console import Console

    from weft.report.terminal import load_lines, text_gantt
    from weft.schedule.measure import measure
    from weft.simulate.events import simulate

    console, work = Console(), measure(plan.schedule).work
    if not any(work):
        typer.echo("Nothing is active: no rank has anything to do, and every plan takes no time.")
        return
    typer.echo(assumed_lines(cluster, plan.schedule.attention[1]))
    # In a narrow terminal lines wrap, so that no number is cut.
    Console(width=max(console.width, 100)).print(_table(plan))
    if show_all:
        for name, seconds in plan.left_out:
            console.print(
                f"  {name:<22} about {units.time(seconds)}: not built, {len(plan.ranked)} have less",
                style="dim",
            )
    console.print(f"Why: {plan.why()}", highlight=False)
    between = ", inside its machine · between: by a rank, to other machines" if _leaves(plan) else ""
    console.print(
        "attention: one layer · imbal./min: the largest load over the mean, and the least possible · "
        f"sent: by a rank{between}",
        style="dim",
        highlight=False,
    )
    best = plan.ranked[0]
    bars = load_lines(work, best.bound)
    rows = text_gantt(simulate(plan.schedule, cluster))
    typer.echo(
        "\n".join([f"\n{best.name}, work of each rank over the mean:", *bars, "", "simulated:", *rows, ""])
    )
    if model.layers > 1:
        total = best.seconds * model.layers * model.steps
        console.print(
            f"Attention of {model.layers} layers × {model.steps} steps: {units.time(total)} "
            "(linear layers, cross-attention and VAE are not counted).",
            highlight=False,
        )


def _table(plan: Plan) -> Table:
    between = _leaves(plan)
    numbers = ("attention", "", "exposed", "imbal./min", "sent", *(["between"] if between else []), "memory")
    rows = table(("#", "plan", *numbers), left=("plan",))
    best, ranks = plan.ranked[0].seconds, plan.schedule.problem.ranks
    for place, option in enumerate(plan.ranked, start=1):
        cells = _cells(place, option, best, ranks, between=between)
        rows.add_row(*cells, style="bold" if place == 1 else "")
    return rows


def _leaves(plan: Plan) -> bool:
    return any(option.inter_bytes for option in plan.ranked)


def _cells(place: int, option: Candidate, best: float, ranks: int, *, between: bool) -> list[str]:
    return [
        str(place),
        option.name,
        units.time(option.seconds),
        f"{option.seconds / best if best else 1.0:.2f}×",
        f"{option.timing.exposed:.1%}",
        f"{option.imbalance:.3f}/{option.bound:.3f}",
        units.size(option.intra_bytes / ranks),
        *([units.size(option.inter_bytes / ranks)] if between else []),
        units.size(option.memory),
    ]


def _plain(plan: Plan) -> dict[str, Any]:
    rows = [
        {
            "plan": option.name,
            "seconds": option.seconds,
            "exposed": option.timing.exposed,
            **{name: getattr(option, name) for name in COSTS},
        }
        for option in plan.ranked
    ]
    return {"plans": rows, "why": plan.why(), "left_out": dict(plan.left_out)}


def _save(plan: Plan, path: Path) -> None:
    from weft.core.codec import dumps

    with writing(path, hint="Give another --save."):
        path.write_text(dumps(plan.schedule))
