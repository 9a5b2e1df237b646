"""`weft bench serve URL`: requests that do not wait for each other, and how the server held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.packages import need
from weft.cli.tables import table
from weft.core import units
from weft.core.errors import InputError
from weft.core.files import writing

if TYPE_CHECKING:
    from weft.serve.load import Measured

COLOURS = {"image": "c4", "video": "c5"}


def run(
    what: Annotated[str, typer.Argument(metavar="serve", help="What to measure: a server.")],
    url: Annotated[str, typer.Argument(help="Where it is, such as http://127.0.0.1:8000.")],
    *,
    rate: Annotated[float, typer.Option(help="Requests a second, on average.")] = 1.0,
    duration: Annotated[float, typer.Option(help="Seconds in which they arrive.")] = 60.0,
    mix: Annotated[str, typer.Option(help="What arrives, by share.")] = "image:0.8,video:0.2",
    trace: Annotated[
        Path | None, typer.Option(help='Instead of these, a file with a line {"at": s, "kind": …} each.')
    ] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT; the model's if not given.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps; the model's if not given.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of videos; the model's if not given.")] = None,
    slo: Annotated[float, typer.Option(help="In time is what takes at most so often its time alone.")] = 3.0,
    seed: Annotated[int, typer.Option(help="The same seed brings the same requests.")] = 0,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the server's key.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latencies and depth to this .png.")] = None,
) -> None:
    """Measure a server under load: requests come at random times, whether or not earlier ones are answered.

    weft bench serve http://127.0.0.1:8000 --rate 2 --duration 60 --mix image:0.8,video:0.2 --plot load.png

    First each kind alone, on a server that should have nothing else to do; then the load. What was made is
    deleted at the end.
    """
    if what != "serve":
        raise InputError(f"There is no benchmark {what!r}.", hint="weft bench serve URL")
    need("httpx", *(["matplotlib"] if plot else []))
    if slo <= 0:
        raise InputError(f"--slo {slo:g} leaves no time.", hint="Give more than 0, such as 3.")
    for path in (as_json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"There is no folder {path.absolute().parent}.", hint="Make it first.")
    from rich.console import Console

    from weft.serve.auth import read_key
    from weft.serve.load import Asks, arrivals, measure, read_trace

    work = read_trace(trace) if trace else arrivals(rate, duration, _mix(mix), seed)
    if not work:
        raise InputError(f"No request comes in {duration:g} s.", hint="Give a higher --rate or --duration.")
    asks, key = Asks(size=size, steps=steps, frames=frames), read_key(api_key_file) if api_key_file else None
    with Console(stderr=True).status("…") as status:
        found = asyncio.run(measure(url, work, slo=slo, asks=asks, key=key, tell=status.update))
    _show(found)
    if as_json:
        with writing(as_json, hint="Give another file."):
            as_json.write_text(json.dumps({"url": url, **found.to_json()}, indent=2) + "\n")
    if plot:
        with writing(plot, hint="Give another file."):
            draw(found, plot)


def _mix(text: str) -> dict[str, float]:
    parts = [part.partition(":") for part in text.split(",")]
    try:
        return {kind.strip(): float(share or 1) for kind, _, share in parts}
    except ValueError as error:
        raise InputError(f"mix={text!r} is not kind:share,…", hint="Write image:0.8,video:0.2.") from error


def _show(found: Measured) -> None:
    from rich.console import Console

    names = ("sent", "made", "alone", "p50", "p95", "p99", "queue p50", "queue p95", "in time")
    shown = table(("", *names), left=("",), padding=(0, 2, 0, 0))
    for kind in (*found.alone, *([None] if len(found.alone) > 1 else [])):
        some = found.of(kind)
        times = [found.percentile(kind, q) for q in (50, 95, 99)]
        times += [found.percentile(kind, q, "queue") for q in (50, 95)]
        cells = [found.alone.get(kind or ""), *times]
        made = sum(sample.code == "ok" for sample in some)
        told = ("" if cell is None else units.time(cell) for cell in cells)
        shown.add_row(kind or "all", str(len(some)), str(made), *told, f"{found.attained(kind):.1%}")
    console = Console(highlight=False)
    console.print(shown)
    errors = ", ".join(f"{count} {code}" for code, count in found.errors.items())
    console.print(
        f"{found.throughput:.2f} made a second; in time is at most {found.slo:g} times alone"
        + (f"; not made: {errors}" if errors else ""),
        style="dim",
    )


def draw(found: Measured, path: Path) -> None:
    """What share was made how fast, by kind, and how many were under way."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from weft.report.palette import LIGHT

    sheet = Figure(figsize=(10, 4), dpi=200, facecolor=LIGHT["paper"], layout="constrained")
    FigureCanvasAgg(sheet)
    left, right = sheet.subplots(1, 2)
    done = {kind: [s.seconds for s in found.of(kind) if s.code == "ok"] for kind in found.alone}
    for kind, seconds in done.items():
        colour, many = LIGHT[COLOURS[kind]], max(1, len(found.of(kind)))
        left.step(
            [0, *sorted(seconds)], np.arange(len(seconds) + 1) / many, where="post", color=colour, lw=2,
            label=f"{kind}: {found.attained(kind):.0%} in time",
        )  # fmt: skip
        left.axvline(found.slo * found.alone[kind], color=colour, lw=1, ls=(0, (4, 3)))
    left.set(xlabel="seconds until it was made", ylabel="share of what was asked for", ylim=(0, 1.02))
    left.set_xlim(left=0)
    for kind in done:
        times, counts = zip(*found.depth(kind), strict=True)
        right.step(times, counts, where="post", color=LIGHT[COLOURS[kind]], lw=1.5, label=f"{kind}s")
        right.fill_between(times, counts, step="post", color=LIGHT[COLOURS[kind]], alpha=0.15, lw=0)
    right.set(xlabel="seconds", ylabel="come and not yet made", ylim=(0, None), xlim=(0, None))
    right.yaxis.get_major_locator().set_params(integer=True)
    for axes, title in ((left, f"Latency (dashed: {found.slo:g} times alone)"), (right, "Under way")):
        _dress(axes, title, LIGHT)
    sheet.savefig(path, metadata={"Software": None})


def _dress(axes: Any, title: str, colours: Mapping[str, str]) -> None:
    axes.set_title(title, loc="left", color=colours["ink"], fontsize=11, weight="bold")
    axes.grid(axis="y", color=colours["rule"], lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(colours["rule"])
    axes.tick_params(colors=colours["muted"], length=0)
    axes.xaxis.label.set_color(colours["muted"])
    axes.yaxis.label.set_color(colours["muted"])
    axes.legend(frameon=False, labelcolor=colours["ink"], loc="best")
