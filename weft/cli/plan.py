"""`weft plan`: rank the plans for an attention of a model on a cluster, and explain the choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import output
from weft.cli.options import Block, Cluster, Dtype, Frames, Json, Mask, Name, Size
from weft.cli.workload import Workload, assumed, assumed_lines, bandwidth, read_topology
from weft.core import units
from weft.core.files import check_writable, writing

if TYPE_CHECKING:
    from weft.core.topology import Topology
    from weft.plan.choose import Candidate, Plan
    from weft.simulate.models import ModelSizes

    Reasons = Sequence[tuple[Candidate, str]]

MAX_BUILT_RANKS = 32
"""Kinds of plans that are far from the best are built to explain why, if that takes no seconds."""
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

    weft plan wan2.1-14b --topology 8xh100 --mask svg:density=0.25
    """
    work = Workload.read(model, size=size, frames=frames, mask=mask, block=block, dtype=dtype)
    cluster = read_topology(topology)
    problem = work.problem(cluster.ranks)
    if save:
        check_writable(save, hint="Give another --save.")
    with output.progress(f"drawing {mask} …"):
        active = work.mask
    if not as_json:
        typer.echo(output.fill(f"{work} · {_links(cluster)}\n{mask} · {active.density:.0%} active"))
    with output.progress("timing candidates …"):
        from weft.plan.choose import choose

        plan = choose(problem, active, cluster)
        reasons = plan.why_not(cluster if cluster.ranks <= MAX_BUILT_RANKS else None)
    if save:
        _save(plan, save)
    if as_json:
        shape = {"tokens": active.q_len, "heads": work.model.heads, "head_dim": work.model.head_dim}
        about = {"model": model, **shape, "layers": work.model.layers, "dtype": dtype, "mask": mask}
        about |= {"block": block, "density": active.density, "topology": cluster.name}
        typer.echo(
            json.dumps({**about, **_plain(plan, reasons), "assumed": assumed(cluster, active)}, indent=2)
        )
    else:
        _show(plan, reasons, work.model, cluster, show_all=show_all)


def _links(cluster: Topology) -> str:
    links = bandwidth(cluster.intra, cluster)
    if cluster.machines > 1:
        links += f" inside, {bandwidth(cluster.inter, cluster)} between machines"
    return f"{cluster.name} ({links})"


def _show(plan: Plan, reasons: Reasons, model: ModelSizes, cluster: Topology, *, show_all: bool) -> None:
    from weft.report.terminal import load_lines, text_gantt
    from weft.schedule.measure import measure
    from weft.simulate.events import simulate

    work = measure(plan.schedule).work
    if not any(work):
        typer.echo("Nothing is active: no rank has anything to do, and every plan takes no time.")
        return
    typer.echo(output.fill(assumed_lines(cluster, plan.schedule.attention[1])))
    output.table(_rows(plan), bold=[0])
    if show_all:
        for name, seconds in plan.left_out:
            output.note(f"  {name:<22} about {units.time(seconds)}: not built, {len(plan.ranked)} have less")
    between = ", inside its machine · between: by a rank, to other machines" if _leaves(plan) else ""
    output.note(
        "attention: one layer · imbal./min: the largest load over the mean, and the least possible · "
        f"sent: by a rank{between}"
    )
    typer.echo(output.fill(f"\nWhy: {plan.why()}"))
    output.table(
        [
            {"why not": option.name, "slower": _ratio(option, plan), "because, of its busiest rank": reason}
            for option, reason in reasons
        ]
    )
    best = plan.ranked[0]
    typer.echo(f"\n{best.name}, work of each rank over the mean:")
    typer.echo("\n".join(load_lines(work, best.bound)))
    typer.echo("\nsimulated:")
    typer.echo("\n".join(text_gantt(simulate(plan.schedule, cluster))))
    if model.layers > 1:
        total = units.time(best.seconds * model.layers * model.steps)
        scope = "linear layers, cross-attention and VAE are not counted"
        typer.echo(
            output.fill(f"\nAttention of {model.layers} layers × {model.steps} steps: {total} ({scope}).")
        )


def _rows(plan: Plan) -> list[output.Row]:
    ranks = plan.schedule.problem.ranks
    return [
        {
            "#": str(place),
            "plan": option.name,
            "attention": units.time(option.seconds),
            "slower": _ratio(option, plan),
            "exposed": f"{option.timing.exposed:.1%}",
            "imbal./min": f"{option.imbalance:.3f}/{option.bound:.3f}",
            "sent": units.size(option.intra_bytes / ranks),
            **({"between": units.size(option.inter_bytes / ranks)} if _leaves(plan) else {}),
            "memory": units.size(option.memory),
        }
        for place, option in enumerate(plan.ranked, start=1)
    ]


def _ratio(option: Candidate, plan: Plan) -> str:
    best = plan.ranked[0].seconds
    return f"{option.seconds / best if best else 1.0:.2f}×"


def _leaves(plan: Plan) -> bool:
    return any(option.inter_bytes for option in plan.ranked)


def _plain(plan: Plan, reasons: Reasons) -> dict[str, Any]:
    rows = [
        {
            "plan": option.name,
            "seconds": option.seconds,
            "exposed": option.timing.exposed,
            **{name: getattr(option, name) for name in COSTS},
        }
        for option in plan.ranked
    ]
    why_not = [
        {"plan": option.name, "seconds": option.seconds, "because": reason} for option, reason in reasons
    ]
    chosen = {"plan": plan.ranked[0].name, "why": plan.why(), "why_not": why_not}
    return {**chosen, "plans": rows, "left_out": dict(plan.left_out)}


def _save(plan: Plan, path: Path) -> None:
    from weft.core.codec import dumps

    with writing(path, hint="Give another --save."):
        path.write_text(dumps(plan.schedule))
