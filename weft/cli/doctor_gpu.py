"""`weft doctor --gpu`: all parts over all GPUs, a line for each as it ends, and the files to send."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer

from weft.cli import output
from weft.cli.options import Json
from weft.core.errors import InputError, nearest_of
from weft.doctor.suite import BAD, CheckSuite
from weft.doctor.suites import NOT_COVERED, SUITES

COLORS = {"ok": "green", "skipped": "yellow"}
DEVICES = ("cuda", "cpu")
REHEARSAL_RANKS = 2
RESERVED_SECONDS = 20.0
"""Of the minutes, for starting, for a last child that must be killed, and for the files."""
GRACE_SECONDS = 20.0
"""Time from Ctrl-C to SIGKILL, in which rank 0 writes the results so far."""
WIDTH = 80
NUMBERS = {
    "gbytes_per_s": "up to {} GB/s",
    "tflops": "up to {} TFLOP/s",
    "error": "error {}",
    "output_error": "error {}",
}
"""The number of a passed part in its line: the largest of the first kind that its checks have."""


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Options of the examination of GPUs."""

    gpu: Annotated[bool, typer.Option("--gpu", help="Measure and check all GPUs, in ten minutes.")] = False
    device: Annotated[str, typer.Option(help="With --gpu: cuda; cpu to rehearse on CPUs.")] = "cuda"
    ranks: Annotated[int, typer.Option(help="With --gpu: how many; all GPUs, or 2 CPUs, if 0.")] = 0
    minutes: Annotated[float, typer.Option(help="With --gpu: begin no part after them.")] = 10.0
    only: Annotated[str, typer.Option(help="With --gpu: some parts, such as nccl,links.")] = ""
    out: Annotated[Path, typer.Option(help="With --gpu: the folder to write.")] = Path("weft-doctor")
    as_json: Json = False


def examine_gpus(options: GpuOptions) -> int:
    """Examine on all ranks, started here unless a launcher has; return the exit code."""
    from torch.distributed import is_torchelastic_launched

    from weft.run.world import is_launched

    suites = _parts(options.only)
    if options.device not in DEVICES or options.minutes <= 0 or options.ranks < 0:
        raise InputError(
            f"Invalid --device {options.device}, --minutes {options.minutes:g} or --ranks {options.ranks}.",
            hint=f"--device is one of {', '.join(DEVICES)}; --minutes must be > 0, --ranks >= 0.",
        )
    if is_launched() or is_torchelastic_launched():
        return _supervise(options, suites)
    from weft.cli.ranks import launched

    stopped = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # rank 0 has written what there is
    return launched(_ranks(options), grace=GRACE_SECONDS, expected=(1, *stopped))


def _ranks(options: GpuOptions) -> int:
    import torch

    if options.device == "cpu":
        return options.ranks or REHEARSAL_RANKS
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        raise InputError(
            "torch sees no GPU here.",
            hint="Install a CUDA build of torch, or rehearse on CPUs: weft doctor --gpu --device cpu.",
        )
    if options.ranks > gpus:
        raise InputError(f"--ranks {options.ranks}: this machine has {gpus} GPUs.", hint=f"At most {gpus}.")
    return options.ranks or gpus


def _supervise(options: GpuOptions, suites: Sequence[CheckSuite]) -> int:
    """Supervise this rank; rank 0 shows the progress and writes the report."""
    from weft.doctor.examine import Examination, as_json, serve_rank, write
    from weft.run.world import machines, place

    rank, ranks = place()
    quiet = options.as_json or rank > 0
    with output.progress("starting", quiet=quiet) as status:

        def echo(text: str) -> None:
            if not quiet:
                status.print(text)

        echo(_plan(suites, ranks, options))
        report = serve_rank(
            Examination(
                suites=suites,
                device=options.device,
                seconds=60 * options.minutes - RESERVED_SECONDS,
                machines=machines(),
                on_begin=lambda suite: status.update(f"{suite.title}, at most {suite.seconds:.0f} s"),
                on_end=lambda suite: echo(_line(suite)),
            )
        )
    if report is None:
        return 0
    files = write(report, options.out)
    if options.as_json:
        typer.echo(as_json(report), nl=False)
    echo(_ending(report, files))
    return int(any(suite["status"] in BAD for suite in report["parts"]))


def _parts(only: str) -> list[CheckSuite]:
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {suite.name: suite for suite in SUITES}
    for name in names:
        if name not in known:
            raise InputError(f"--only {name}: there is no such part.", hint=nearest_of(name, known))
    return [suite for suite in SUITES if not names or suite.name in names]


def _plan(suites: Sequence[CheckSuite], ranks: int, options: GpuOptions) -> str:
    """Return what runs on a GPU for the first time, and how much time it may take."""
    claims = (*(claim for suite in suites for claim in suite.claims), *NOT_COVERED)
    where = "CPUs that stand in for GPUs" if options.device == "cpu" else "GPUs"
    number = output.counted(ranks, "rank")
    lines = [fill(f"  · {claim}", WIDTH, subsequent_indent="    ") for claim in claims]
    limits = f"{len(suites)} parts, at most {options.minutes:g} minutes, by {number} on {where}"
    return "\n".join([output.paint("Never ran on a GPU before:", bold=True), *lines, "", limits, ""])


def _line(suite: dict[str, Any]) -> str:
    """Return name, status, seconds and the main number, in lines of at most 80 columns."""
    status = suite["status"]
    first = f"{suite['name']:<20}{status:<9}{suite['seconds']:>6.1f} s  "
    text = fill(_summary(suite), WIDTH, initial_indent=first, subsequent_indent=" " * len(first))
    color = COLORS.get(status, "red")
    return text.replace(f"{status:<9}", output.paint(f"{status:<9}", fg=color, bold=status in BAD), 1)


def _summary(suite: dict[str, Any]) -> str:
    checks = suite["checks"]
    wrong = [check["name"] for check in checks if check["status"] == "wrong"]
    if suite["message"]:
        return str(suite["message"])
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"{wrong[0]}{more} of {len(checks)}"
    text = output.counted(len(checks), "check")
    for name, template in NUMBERS.items():
        if values := [each for check in checks if isinstance(each := check["numbers"].get(name), float)]:
            most = max(values)
            number = f"{most:.1e}" if "error" in name else f"{most:,.0f}" if most >= 100 else f"{most:.3g}"
            return f"{text}, {template.format(number)}"
    return text


def _ending(report: dict[str, Any], files: Sequence[Path]) -> str:
    from weft.doctor.html import verdict

    next_step = "To send it: open an issue “A report from a GPU machine” and attach doctor.json."
    if report["is_rehearsal"]:
        next_step = "A rehearsal: nothing ran on a GPU. On a machine with GPUs: weft doctor --gpu"
    paths = [f"  {path}" for path in files]
    return "\n".join(["", output.paint(fill(verdict(report), WIDTH), bold=True), *paths, next_step])


def write_page(path: Path) -> str:
    """Write the page of a report that was sent, beside it; return its name."""
    from weft.core.files import read_json, whole, writing
    from weft.doctor.html import page

    report = read_json(path)
    try:
        text = page(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} is no report of a doctor: {type(error).__name__} {error}.",
            hint="Give the doctor.json that weft doctor --gpu wrote.",
        ) from error
    target = path.with_suffix(".html")
    with writing(target, hint="Copy the file to a folder that can be written."), whole(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return str(target)
