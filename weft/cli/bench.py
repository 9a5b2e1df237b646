"""`weft bench serve URL`: measure a server under load, and print and draw the result."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import output
from weft.cli.packages import need
from weft.core import units
from weft.core.errors import InputError
from weft.core.files import writing

if TYPE_CHECKING:
    from weft.serve.load_test import LoadTestResult

COLORS = {"image": "c4", "video": "c5"}


def run(
    target: Annotated[str, typer.Argument(metavar="serve", help="What to measure: a server.")],
    url: Annotated[str, typer.Argument(help="Its URL, such as http://127.0.0.1:8000.")],
    *,
    rate: Annotated[float, typer.Option(help="Mean requests per second.")] = 1.0,
    duration: Annotated[float, typer.Option(help="Seconds of arrivals.")] = 60.0,
    mix: Annotated[str, typer.Option(help="Kinds of requests and their shares.")] = "image:0.8,video:0.2",
    trace: Annotated[
        Path | None,
        typer.Option(help='Replay a file with a line {"at": s, "kind": …} for each request instead.'),
    ] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT. [default: the model's]")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps. [default: the model's]")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of videos. [default: the model's]")] = None,
    slo: Annotated[
        float, typer.Option(help="Requests are in time within this multiple of their time alone.")
    ] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals and of the requests.")] = 0,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the server's key.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latencies and depth to this .png.")] = None,
) -> None:
    """Measure a server under load: requests arrive at random times, whether or not earlier ones are answered.

    weft bench serve http://127.0.0.1:8000 --rate 2 --plot load.png

    First each kind is measured alone, on a server that should be idle, then the load. All results are deleted
    at the end.
    """
    if target != "serve":
        raise InputError(f"Unknown benchmark {target!r}.", hint="Use: weft bench serve URL")
    need("httpx", *(["matplotlib"] if plot else []))
    if slo <= 0:
        raise InputError(f"--slo must be > 0, got {slo:g}.", hint="For example 3.")
    for path in (as_json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"The folder {path.absolute().parent} does not exist.", hint="Create it first.")
    from weft.serve.api.auth import read_key
    from weft.serve.load_test import RequestTemplate, poisson_arrivals, read_trace, run_load_test

    arrivals = read_trace(trace) if trace else poisson_arrivals(rate, duration, _mix(mix), seed)
    if not arrivals:
        raise InputError(f"No request arrives in {duration:g} s.", hint="Raise --rate or --duration.")
    template = RequestTemplate(size=size, steps=steps, frames=frames)
    key = read_key(api_key_file) if api_key_file else None
    with output.progress("connecting …") as status:
        result = asyncio.run(
            run_load_test(url, arrivals, slo=slo, template=template, key=key, on_progress=status.update)
        )
    _print(result)
    if as_json:
        with writing(as_json, hint="Pass another file."):
            as_json.write_text(json.dumps({"url": url, **result.to_json()}, indent=2) + "\n")
    if plot:
        with writing(plot, hint="Pass another file."):
            _draw(result, plot)


def _mix(text: str) -> dict[str, float]:
    shares = [share.partition(":") for share in text.split(",")]
    try:
        return {kind.strip(): float(share or 1) for kind, _, share in shares}
    except ValueError as error:
        raise InputError(f"mix={text!r} must be kind:share,….", hint="Write image:0.8,video:0.2.") from error


def _print(result: LoadTestResult) -> None:
    kinds = (*result.alone, *([None] if len(result.alone) > 1 else []))
    output.table([_cells(result, kind) for kind in kinds])
    errors = ", ".join(f"{count} {code}" for code, count in result.errors.items())
    output.note(
        f"{result.throughput:.2f} done per second; in time is within {result.slo:g} × the time alone"
        + (f"; failed: {errors}" if errors else "")
    )


def _cells(result: LoadTestResult, kind: str | None) -> output.Row:
    samples = result.of(kind)
    latencies = {
        "alone": result.alone.get(kind or ""),
        **{f"p{q}": result.percentile(kind, q) for q in (50, 95, 99)},
        **{f"queue p{q}": result.percentile(kind, q, "queue") for q in (50, 95)},
    }
    return {
        "requests": kind or "all",
        "sent": str(len(samples)),
        "done": str(sum(sample.code == "ok" for sample in samples)),
        **{name: "" if seconds is None else units.time(seconds) for name, seconds in latencies.items()},
        "in time": f"{result.attained(kind):.1%}",
    }


def _draw(result: LoadTestResult, path: Path) -> None:
    """Draw the distribution of latencies by kind, and the number of open requests over time."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from weft.report.palette import LIGHT

    figure = Figure(figsize=(10, 4), dpi=200, facecolor=LIGHT["paper"], layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for kind, alone in result.alone.items():
        color, samples = LIGHT[COLORS[kind]], result.of(kind)
        seconds = sorted(sample.seconds for sample in samples if sample.code == "ok")
        left.step(
            [0, *seconds], np.arange(len(seconds) + 1) / max(1, len(samples)), where="post", color=color,
            lw=2, label=f"{kind}: {result.attained(kind):.0%} in time",
        )  # fmt: skip
        left.axvline(result.slo * alone, color=color, lw=1, ls=(0, (4, 3)))
        times, counts = zip(*result.depth(kind), strict=True)
        right.step(times, counts, where="post", color=color, lw=1.5, label=f"{kind}s")
        right.fill_between(times, counts, step="post", color=color, alpha=0.15, lw=0)
    left.set(xlabel="latency, seconds", ylabel="share of requests", ylim=(0, 1.02))
    left.set_xlim(left=0)
    right.set(xlabel="seconds", ylabel="open requests", ylim=(0, None), xlim=(0, None))
    right.yaxis.get_major_locator().set_params(integer=True)
    for axes, title in ((left, f"Latency (dashed: {result.slo:g} × alone)"), (right, "Open requests")):
        axes.set_title(title, loc="left", color=LIGHT["ink"], fontsize=11, weight="bold")
        axes.grid(axis="y", color=LIGHT["rule"], lw=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(LIGHT["rule"])
        axes.tick_params(colors=LIGHT["muted"], length=0)
        axes.xaxis.label.set_color(LIGHT["muted"])
        axes.yaxis.label.set_color(LIGHT["muted"])
        axes.legend(frameon=False, labelcolor=LIGHT["ink"], loc="best")
    figure.savefig(path, metadata={"Software": None})
