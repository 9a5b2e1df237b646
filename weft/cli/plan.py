"""`weft plan`: the ways to run a model's attention on a cluster, ranked, and why the first is first."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.core.errors import InputError

if TYPE_CHECKING:
    from rich.status import Status
    from rich.table import Table

    from weft.core.mask import BlockMask
    from weft.core.problem import Problem
    from weft.core.topology import Topology
    from weft.plan.choose import Option, Plan
    from weft.simulate.models import Model


def run(
    model: Annotated[
        str, typer.Argument(help="A model (wan2.1-14b …), or a shape TOKENSxHEADSxDIM; tokens may be TxHxW.")
    ],
    *,
    topology: Annotated[str, typer.Option(help="8xh100, 4x8xa100, or a TOML of weft calibrate.")] = "8xh100",
    mask: Annotated[
        str, typer.Option(help="dense, svg:density=0.25, sta:…, random:…; see weft mask.")
    ] = "dense",
    size: Annotated[str, typer.Option(help="Pixels, such as 1280x720; the model's own if left out.")] = "",
    frames: Annotated[int, typer.Option(help="Frames of the video; the model's own if 0.")] = 0,
    block: Annotated[int, typer.Option(help="Tokens in a block of the mask.")] = 64,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "bfloat16",
    save: Annotated[Path | None, typer.Option(help="Write the first plan here, for weft.attention.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also list what was left out unbuilt.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Rank the ways to run one attention of a model on a cluster, by predicted time."""
    sizes, cluster = shape(model, size, frames), read_topology(topology)
    with _busy("drawing the mask …"):
        active = make_mask(mask, sizes, block)
    problem = make_problem(sizes, cluster.ranks, dtype)
    if not as_json:
        typer.echo(_headline(sizes, problem, active, cluster))
    plan = _choose(problem, active, cluster)
    if save:
        _save(plan, save)
    typer.echo(json.dumps(_plain(plan), indent=2)) if as_json else _show(
        plan, sizes, cluster, show_all=show_all
    )


def _choose(problem: Problem, mask: BlockMask, cluster: Topology) -> Plan:
    from weft.plan.choose import choose

    with _busy("timing candidates …"):
        return choose(problem, mask, cluster)


def _busy(words: str) -> Status:
    from rich.console import Console

    return Console(stderr=True).status(words)


def shape(name: str, size: str, frames: int) -> tuple[Model, tuple[int, int, int]]:
    """A model and the (t, h, w) of its tokens; a bare shape is a model of one layer."""
    from weft.simulate.models import Model
    from weft.simulate.models import model as find

    if re.fullmatch(r"\d+(x\d+x\d+)?x\d+x\d+", name):
        *tokens, heads, dim = map(int, name.split("x"))
        if not min(*tokens, heads, dim):
            raise InputError(f"{name} is empty.", hint="Write TOKENSxHEADSxDIM, such as 32768x24x128.")
        if size or frames:
            raise InputError(f"{name} has its tokens already.", hint="Leave out --size and --frames.")
        t, h, w = [1, 1, *tokens][-3:]
        return Model(name=name, layers=1, heads=heads, head_dim=dim, steps=1), (t, h, w)
    found = find(name)
    match = re.fullmatch(r"(\d+)x(\d+)", size) if size else None
    if size and not match:
        raise InputError(f"--size {size!r} is no size.", hint="Write WIDTHxHEIGHT, such as 1280x720.")
    width, height = (int(match[1]), int(match[2])) if match else (0, 0)
    return found, found.grid(width, height, frames)


def read_topology(text: str) -> Topology:
    from weft.core.topology import Topology
    from weft.simulate.clusters import cluster

    return Topology.from_toml(text) if text.endswith(".toml") or Path(text).is_file() else cluster(text)


def make_mask(spec: str, sizes: tuple[Model, tuple[int, int, int]], block: int) -> BlockMask:
    from weft.masks.grid import TokenGrid
    from weft.masks.spec import mask_from_spec

    model, (t, h, w) = sizes
    return mask_from_spec(spec, heads=model.heads, grid=TokenGrid(t, h, w, prefix=model.text), block=block)


def make_problem(sizes: tuple[Model, tuple[int, int, int]], ranks: int, dtype: str) -> Problem:
    from weft.core.layout import Layout
    from weft.core.problem import Problem

    model, (t, h, w) = sizes
    layout = Layout.even(t * h * w + model.text, ranks, prefix=model.text)
    heads, dim = model.heads, model.head_dim
    return Problem(batch=1, heads=heads, kv_heads=heads, head_dim=dim, q=layout, kv=layout, dtype=dtype)


def _headline(
    sizes: tuple[Model, tuple[int, int, int]], problem: Problem, mask: BlockMask, cluster: Topology
) -> str:
    model = sizes[0]
    text = f" + {model.text} text" if model.text else ""
    links = f"{cluster.intra.bandwidth / 1e9:,.3g} GB/s"
    if cluster.machines > 1:
        links += f" inside, {cluster.inter.bandwidth / 1e9:,.3g} between machines"
    tokens = f"{problem.q.size - model.text:,} tokens{text}"
    heads = f"{model.heads} heads × {model.head_dim}"
    return f"{model.name} · {tokens} · {heads} · {mask.density:.0%} active · {cluster.name} ({links})"


def _show(
    plan: Plan, sizes: tuple[Model, tuple[int, int, int]], cluster: Topology, *, show_all: bool
) -> None:
    from rich.console import Console

    from weft.report.terminal import load_lines, text_gantt
    from weft.schedule.measure import measure
    from weft.simulate.events import simulate

    console = Console()
    # In a narrow terminal its lines wrap, and every figure is still there to read.
    Console(width=max(console.width, 100)).print(_table(plan))
    if show_all:
        for name, seconds in plan.left_out:
            console.print(
                f"  {name:<22} about {_time(seconds)}: not built: {len(plan.ranked)} have lower estimates",
                style="dim",
            )
    console.print(f"Why: {plan.why()}", highlight=False)
    console.print(
        "attention: one layer · imbal./min: slowest rank over the mean, and the least possible · "
        "sent: by a rank",
        style="dim",
        highlight=False,
    )
    model, best = sizes[0], plan.ranked[0]
    bars = load_lines(measure(plan.schedule).work, best.bound)
    rows = text_gantt(simulate(plan.schedule, cluster))
    typer.echo(
        "\n".join([f"\n{best.name}, work of each rank over the mean:", *bars, "", "simulated:", *rows, ""])
    )
    if model.layers > 1:
        total = best.seconds * model.layers * model.steps
        console.print(
            f"Attention of {model.layers} layers × {model.steps} steps: {_time(total)} "
            "(linear layers, cross-attention and VAE are not counted).",
            highlight=False,
        )


def _table(plan: Plan) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("#", justify="right")
    table.add_column("plan", no_wrap=True)
    between = any(option.inter_bytes for option in plan.ranked)
    names = ["attention", "", "exposed", "imbal./min", "sent"]
    for name in (*names, *(["between"] if between else []), "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    best, ranks = plan.ranked[0].seconds, plan.schedule.problem.ranks
    for place, option in enumerate(plan.ranked, start=1):
        table.add_row(
            *_cells(place, option, best, ranks, between=between), style="bold" if place == 1 else ""
        )
    return table


def _cells(place: int, option: Option, best: float, ranks: int, *, between: bool) -> list[str]:
    return [
        str(place),
        option.name,
        _time(option.seconds),
        f"{option.seconds / best if best else 1.0:.2f}×",
        f"{option.timing.exposed:.1%}",
        f"{option.imbalance:.3f}/{option.bound:.3f}",
        _bytes(option.intra_bytes / ranks),
        *([_bytes(option.inter_bytes / ranks)] if between else []),
        _bytes(option.memory),
    ]


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:,.2f} {unit}"
    return f"{seconds * 1e6:,.0f} µs"


def _bytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"


def _plain(plan: Plan) -> dict[str, Any]:
    rows = [
        {
            "plan": option.name,
            "seconds": option.seconds,
            "exposed": option.timing.exposed,
            **{name: value for name, value in asdict(option).items() if name not in ("recipe", "timing")},
        }
        for option in plan.ranked
    ]
    return {"plans": rows, "why": plan.why(), "left_out": dict(plan.left_out)}


def _save(plan: Plan, path: Path) -> None:
    from weft.core.codec import dumps

    try:
        path.write_text(dumps(plan.schedule))
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}.", hint="Give another --save."
        ) from None
