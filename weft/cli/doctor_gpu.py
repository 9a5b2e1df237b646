"""`weft doctor --gpu`: all parts over all GPUs, a line for each as it ends, and the files to send."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from weft.core.errors import InputError, nearest_of
from weft.doctor.part import Part
from weft.doctor.parts import PARTS, UNASKED

if TYPE_CHECKING:
    from rich.console import Console

BAD = ("wrong", "crashed", "hung", "failed")
COLORS = {"ok": "green", "skipped": "yellow"}
DEVICES = ("cuda", "cpu")
REHEARSAL_RANKS = 2
RESERVED_SECONDS = 20.0
"""Of the minutes, for starting, for a last child that must be killed, and for the files."""
GRACE_SECONDS = 20.0
"""From Ctrl-C to SIGKILL, for rank 0 to write what there is."""
WIDTH = 80
NUMBERS = {
    "gbytes_per_s": "up to {} GB/s",
    "tflops": "up to {} TFLOP/s",
    "error": "error {}",
    "output_error": "error {}",
}
"""What a line says of a part that holds: the largest of the first that its checks have."""

Gpu = Annotated[bool, typer.Option("--gpu", help="Measure and check all GPUs, in ten minutes.")]
Device = Annotated[str, typer.Option(help="With --gpu: cuda; cpu to rehearse on CPUs.")]
Ranks = Annotated[int, typer.Option(help="With --gpu: how many; all GPUs, or 2 CPUs, if 0.")]
Minutes = Annotated[float, typer.Option(help="With --gpu: begin no part after them.")]
Only = Annotated[str, typer.Option(help="With --gpu: some parts, such as nccl,links.")]
Out = Annotated[Path, typer.Option(help="With --gpu: the folder to write.")]
Read = Annotated[Path | None, typer.Option(help="Write the page of a doctor.json beside it.")]
Fault = Annotated[list[str] | None, typer.Option(hidden=True)]


class Options(NamedTuple):
    """What --gpu is given."""

    device: str
    ranks: int
    minutes: float
    out: Path
    only: str
    faults: Sequence[str]
    as_json: bool


def examine_gpus(options: Options) -> int:
    """Examine on all ranks, started here unless a launcher has; return the exit code."""
    from torch.distributed import is_torchelastic_launched

    from weft.run.world import is_launched

    parts, faults = _parts(options.only), _faults(options.faults)
    if options.device not in DEVICES or options.minutes <= 0 or options.ranks < 0:
        raise InputError(
            f"--device {options.device}, --minutes {options.minutes:g}, --ranks {options.ranks}.",
            hint=f"The device is one of {', '.join(DEVICES)}; minutes and ranks are more than 0.",
        )
    if not is_launched() and not is_torchelastic_launched():
        return _launched(options)
    return _keep(options, parts, faults)


def _launched(options: Options) -> int:
    """Run this command again on each rank."""
    from weft.cli.ranks import outcome_told
    from weft.run.launch import launch

    outcome = launch(["-m", "weft.cli.main", *sys.argv[1:]], _ranks(options), grace=GRACE_SECONDS)
    if outcome.traceback or outcome.code not in (0, 1, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        outcome_told(outcome)
    return outcome.code


def _ranks(options: Options) -> int:
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


def _keep(options: Options, parts: Sequence[Part], faults: dict[str, str]) -> int:
    """Be the keeper of this rank; rank 0 shows and writes."""
    from rich.console import Console

    from weft.doctor.examine import Examination, as_json, serve_rank, write
    from weft.run.world import machines, place

    rank, ranks = place()
    console = Console(highlight=False, soft_wrap=True, quiet=options.as_json or rank > 0)
    with console.status("starting") as status:
        _begin(console, parts, ranks, options)
        report = serve_rank(
            Examination(
                parts=parts,
                device=options.device,
                seconds=60 * options.minutes - RESERVED_SECONDS,
                faults=faults,
                machines=machines(),
            ),
            on_begin=lambda part: status.update(f"{part.title}, at most {part.seconds:.0f} s"),
            on_end=lambda part: console.print(_line(part)),
        )
    if report is None:
        return 0
    files = write(report, options.out)
    if options.as_json:
        typer.echo(as_json(report), nl=False)
    _end(console, report, files)
    return int(any(part["status"] in BAD for part in report["parts"]))


def _parts(only: str) -> list[Part]:
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {part.name: part for part in PARTS}
    for name in names:
        if name not in known:
            raise InputError(f"--only {name}: there is no such part.", hint=nearest_of(name, known))
    return [part for part in PARTS if not names or part.name in names]


def _faults(pairs: Sequence[str]) -> dict[str, str]:
    from weft.doctor.child import FAULTS

    faults = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    wrong = [pair for pair in pairs if pair.partition("=")[2].partition(":")[0] not in FAULTS]
    if wrong or not faults.keys() <= {part.name for part in PARTS}:
        raise InputError(f"--fault {' '.join(pairs)}.", hint=f"PART=FAULT, one of {', '.join(FAULTS)}.")
    return faults


def _begin(console: Console, parts: Sequence[Part], ranks: int, options: Options) -> None:
    console.print("Never ran on a GPU before:", style="bold")
    for claim in (*(claim for part in parts for claim in part.claims), *UNASKED):
        console.print(fill(f"  · {claim}", WIDTH, subsequent_indent="    "), markup=False)
    where = "CPUs that stand in for GPUs" if options.device == "cpu" else "GPUs"
    number = f"{ranks} rank{'s' * (ranks > 1)}"
    console.print(f"\n{len(parts)} parts, at most {options.minutes:g} minutes, by {number} on {where}\n")


def _line(part: dict[str, Any]) -> Any:
    """Return one line of at most 80 columns: name, status, seconds, and what tells most."""
    from rich.text import Text

    status = part["status"]
    line = Text(f"{part['name']:<20}", no_wrap=True)
    line.append(f"{status:<9}", style=COLORS.get(status, "bold red"))
    line.append(f"{part['seconds']:>6.1f} s  ")
    line.append(_told(part))
    line.truncate(WIDTH, overflow="ellipsis")
    return line


def _told(part: dict[str, Any]) -> str:
    checks = part["checks"]
    wrong = [check["name"] for check in checks if check["status"] == "wrong"]
    if part["message"]:
        return str(part["message"])
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"{wrong[0]}{more} of {len(checks)}"
    words = [f"{len(checks)} check{'s' * (len(checks) != 1)}"]
    for name, template in NUMBERS.items():
        values = [value for check in checks if isinstance(value := check["numbers"].get(name), float)]
        if values:
            most = max(values)
            number = f"{most:.1e}" if "error" in name else f"{most:,.0f}" if most >= 100 else f"{most:.3g}"
            words.append(template.format(number))
            break
    return ", ".join(words)


def _end(console: Console, report: dict[str, Any], files: Sequence[Path]) -> None:
    from weft.doctor.page import verdict

    console.print("", fill(verdict(report), WIDTH), sep="\n", style="bold", markup=False)
    for path in files:
        console.print(f"  {os.fspath(path)}", markup=False)
    if report["is_rehearsal"]:
        console.print("A rehearsal: nothing ran on a GPU. On a machine with GPUs: weft doctor --gpu")
    else:
        console.print("To send it: open an issue “A report from a GPU machine” and attach doctor.json.")


def write_page(path: Path) -> str:
    """Write the page of a report that was sent, beside it; return its name."""
    from weft.core.files import read_json, whole, writing
    from weft.doctor.page import page

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
