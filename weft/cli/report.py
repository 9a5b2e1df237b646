"""`weft report`: write a page, figures, a trace and numbers of a run, a schedule or a plan."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import output
from weft.cli.options import Block, Dtype, Frames, Mask, Size
from weft.cli.workload import Workload, read_topology
from weft.core.errors import InputError
from weft.core.files import read_bytes
from weft.core.install import install_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.core.schedule import Schedule
    from weft.core.timeline import Timeline
    from weft.core.topology import Topology
    from weft.report.case import Case
    from weft.report.page import Report


MOST = 8
"""Things that can be compared."""


def run(
    context: typer.Context,
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT",
            help="A training run's or a trace's folder, a schedule of weft plan --save, or a model; "
            "several are compared.",
        ),
    ],
    *,
    topology: Annotated[
        str, typer.Option(help="What a schedule or model is simulated on; 8xh100 if left out.")
    ] = "",
    plan: Annotated[
        str, typer.Option(help="auto, or strategies such as usp:4x2; several, as ulysses,auto, are compared.")
    ] = "auto",
    mask: Mask = "dense",
    size: Size = "",
    frames: Frames = 0,
    block: Block = 64,
    dtype: Dtype = "bfloat16",
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")] = Path("report"),
    as_json: Annotated[bool, typer.Option("--json", help="Print report.json too.")] = False,
) -> None:
    """Write a page with tables and figures, a Perfetto trace and all numbers as JSON.

    --plan to --dtype are for a model; a run, a trace and a schedule have their own. Of training runs, up to
    eight are compared.

    Try: weft report wan2.1-14b --topology 8xh100 --mask svg:density=0.25
    """
    from rich.console import Console

    from weft.report.training import is_log
    from weft.report.write import has_png, write

    ask = partial(Workload.read, size=size, frames=frames, mask=mask, block=block, dtype=dtype)
    trained = [is_log(Path(one)) for one in what]
    plans = [name.strip() for name in plan.split(",")]
    if max(len(what), len(plans)) > MOST:
        raise InputError(f"At most {MOST} can be compared, got {max(len(what), len(plans))}.")
    if any(trained) and not all(trained):
        odd = what[trained.index(False)]
        raise InputError(
            f"{odd} is not a training run and cannot be compared with one.", hint="Report it alone."
        )
    with Console(stderr=True).status("reading and simulating …") as status:
        report = _run_report(what) if all(trained) else _case_report(what, ask, topology, plans)
        status.update("drawing …")
        page = write(replace(report, command=_command(context)), out)
    if as_json:
        typer.echo(json.dumps(json.loads((out / "report.json").read_text()), indent=2))
        return
    _show(report)
    hint = "" if has_png() else f"  (SVG only; PNG too with: {install_command('report')})"
    typer.echo(f"\n{page}{hint}")


def _command(context: typer.Context) -> str:
    """Return the command line of this call: arguments, and options that are not their defaults."""
    words = ["weft", "report"]
    own = [parameter for parameter in context.command.params if parameter.name in context.params]
    for parameter in own:  # options of all verbs are not among them
        value = context.params[str(parameter.name)]
        if parameter.param_type_name == "argument":
            words += value
        elif value != parameter.default:
            words += [max(parameter.opts, key=len), *[str(value)] * (value is not True)]
    return shlex.join(words)


def _run_report(what: list[str]) -> Report:
    """Report on runs, named by their folders, or by their full paths if two names are equal."""
    from weft.report.runs import report_runs
    from weft.report.training import read

    runs = [read(Path(one)) for one in what]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=one) for run, one in zip(runs, what, strict=True)]
    return report_runs(runs)


def _case_report(what: list[str], ask: Callable[[str], Workload], topology: str, plans: list[str]) -> Report:
    from weft.report.cases import report_cases
    from weft.report.sources import distinct_names

    alone = len(what) == 1
    cases: list[Case] = []
    for one in what:
        if Path(one).exists() or one.endswith((".json", ".jsonl")):
            cases.append(_read_case(one, topology, alone=alone))
        else:
            work, cluster = _asked(one, ask), read_topology(topology or "8xh100")
            cases += [_plan_case(work, cluster, plan, alone=len(what) == len(plans) == 1) for plan in plans]
    if len(cases) > MOST:
        raise InputError(f"At most {MOST} can be compared, got {len(cases)}.")
    if len({case.model for case in cases}) > 1:
        cases = [replace(case, name=f"{case.model}, {case.name}") if case.model else case for case in cases]
    return report_cases(distinct_names(cases))


def _asked(name: str, ask: Callable[[str], Workload]) -> Workload:
    from weft.simulate.models import MODELS

    try:
        return ask(name)
    except InputError as error:
        if name in MODELS or name[:1].isdigit():
            raise
        raise InputError(f"{name!r} is not a file or folder. {error.message}", hint=error.hint) from None


def _read_case(name: str, topology: str, *, alone: bool) -> Case:
    """Return the case of a trace, with the schedule beside it, or of a simulated schedule."""
    from weft.core.schedule import Schedule
    from weft.plan.explanation import Explanation
    from weft.report.sources import measured, simulated

    path = Path(name)
    if path.is_dir() or path.suffix == ".jsonl":
        folder = path if path.is_dir() else path.parent
        saved, plans = folder / "schedule.json", folder / "plans.json"
        schedule = Schedule.load(saved) if saved.is_file() else None
        explained = Explanation.load(plans) if plans.is_file() else None
        timeline, cluster = _timeline(path), read_topology(topology) if topology else None
        # Compared with a model or a schedule, --topology is the cluster of that one.
        return measured(timeline, schedule, cluster if alone else None, explained)
    schedule = Schedule.load(path)
    return simulated(schedule, _cluster(topology, schedule))


def _timeline(path: Path) -> Timeline:
    from weft.core.timeline import Timeline
    from weft.run.measure.trace import MAX_BYTES, read_trace

    if path.is_dir() and any(path.glob("rank*.jsonl")):
        return read_trace(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if len(files) != 1:
        raise InputError(
            f"{path} holds {len(files)} timelines and no rank0.jsonl.",
            hint="Give the folder of one traced run or of a training run (log.jsonl), or one .jsonl.",
        )
    return Timeline.from_jsonl(read_bytes(files[0], limit=MAX_BYTES).decode("utf-8", "replace"))


def _cluster(topology: str, schedule: Schedule) -> Topology:
    """Return the topology of the option, or machines of 8 H100 for the ranks of the schedule."""
    ranks = schedule.problem.ranks
    whole = ranks > 8 and ranks % 8 == 0
    return read_topology(topology or (f"{ranks // 8}x8xh100" if whole else f"{ranks}xh100"))


def _plan_case(work: Workload, cluster: Topology, plan: str, *, alone: bool) -> Case:
    from weft.plan.choose import build, choose
    from weft.report.sources import simulated

    problem = work.problem(cluster.ranks)
    chosen = choose(problem, work.mask, cluster) if alone or plan == "auto" else None
    schedule = chosen.schedule if chosen and plan == "auto" else build(plan, problem, work.mask, cluster)
    others = [option.name for option in chosen.ranked] if chosen and alone else []
    return simulated(schedule, cluster, others, model=work.model.name, asked=work.spec)


def _show(report: Report) -> None:
    """Print the summary table, the verdict, and the timelines or the losses."""
    typer.echo(output.fill(f"{report.title} · {report.about}"))
    notes = any(row.note for row in report.rows)
    names = report.columns or [" "]
    output.table(
        [
            {
                "": row.label,
                **dict(zip(names, row.values, strict=True)),
                **({"note": row.note} if notes else {}),
            }
            for row in report.rows
        ],
        header=bool(report.columns),
    )
    if report.verdict:
        typer.echo(output.fill(report.verdict))
    for line in report.lines:
        typer.echo(line)
    for one in report.tables:
        if one.printed:
            typer.echo(one.title)
            output.table([dict(zip(one.head, row, strict=True)) for row in one.rows])
