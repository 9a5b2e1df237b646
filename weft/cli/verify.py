"""`weft verify`: check that N ranks compute what one rank computes, by every strategy or for a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import output
from weft.cli.numbers import counts
from weft.cli.options import Backend, DeviceDtype, HeadDim, Heads, Json
from weft.core.errors import CommError, InputError
from weft.plan.strategies import parse

if TYPE_CHECKING:
    from weft.run.measure.compare import Trial, TrialResult


def run(
    model_dir: Annotated[
        Path | None, typer.Argument(help="A Diffusers checkpoint directory: its transformers are checked.")
    ] = None,
    *,
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks to try, such as 2,3; by default all GPUs, or 2,3 on CPUs.")
    ] = "",
    tokens: Annotated[int, typer.Option(help="Length of the whole sequence.")] = 509,
    heads: Heads = 6,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads; 0 means as many as query heads.")] = 0,
    head_dim: HeadDim = 32,
    dtype: DeviceDtype = "",
    backend: Backend = "auto",
    device: Annotated[str, typer.Option(help="cuda or cpu; by default GPUs, if there are any.")] = "",
    plan: Annotated[str, typer.Option(help="One plan, such as usp:2x2, instead of all of them.")] = "",
    as_json: Json = False,
) -> None:
    """Check that N ranks compute what one rank computes: outputs and gradients of every strategy.

    Also prove, step by step, that the programs of the ranks have no races and no deadlocks.

    With a checkpoint directory, compare the outputs of its transformers on a few tokens.

    Under torchrun, use the ranks that it launched, on one or several machines.
    """
    if device not in ("", "cpu", "cuda"):
        raise InputError(f"--device must be cuda or cpu, got {device!r}.")
    device, worlds = _place(device, counts(ranks, "ranks") if ranks else [])
    for world in worlds:  # before any rank is started
        if plan not in ("", "auto"):
            parse(plan, world)
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    if model_dir is not None:
        return _verify_model(model_dir, worlds, (device, dtype), (plan or "auto", backend), as_json=as_json)
    sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads or heads, "head_dim": head_dim}
    if bad := [f"{name}={size}" for name, size in sizes.items() if size < 1]:
        raise InputError(f"Sizes must be >= 1, got {bad[0]}.")
    options = {"dtype": dtype, "backend": backend, "device": device}
    trials = {world: _trials(world, plan, sizes | options) for world in worlds}
    rows = [
        {"ranks": world, **asdict(trial), **asdict(outcome), "holds": outcome.holds}
        for world, _, trial, outcome in run_trials(trials, quiet=as_json)
    ]
    proved = sum(row["proved_steps"] for row in rows)
    title = f"N ranks ({dtype}, {device}) against one in float64 · {proved:,} steps proved free of races"
    return _report(rows, title, _cells, as_json=as_json)


def _place(device: str, worlds: list[int]) -> tuple[str, list[int]]:
    """Return the device type and the world sizes to check on it."""
    import torch

    from weft.run.world import is_launched, place

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if is_launched():
        return device, [place()[1]]
    gpus = torch.cuda.device_count()
    if device == "cuda" and (max(worlds, default=1) > gpus):
        fewer = f"--ranks {gpus}, or " if gpus else ""
        demand = f"{max(worlds, default=1)} rank{'s need as many GPUs' if worlds else ' needs a GPU'}"
        raise InputError(f"{demand}; {gpus} are visible.", hint=f"Use {fewer}--device cpu.")
    return device, worlds or ([gpus] if device == "cuda" else [2, 3])


def run_trials(
    trials_of: Mapping[int, Mapping[str, Trial]], *, quiet: bool = False
) -> Iterator[tuple[int, str, Trial, TrialResult]]:
    """Run the named trials of each number of ranks, on ranks that are started once for each number."""
    from weft.cli.ranks import LaunchedRanks, report_once
    from weft.run.measure.compare import check
    from weft.run.spawn.pool import Pool
    from weft.run.world import is_launched

    with report_once(), output.progress("starting ranks …", quiet=quiet) as status:
        for world, trials in trials_of.items():
            # On GPUs the first call compiles kernels, which takes longer on some ranks than on others.
            timeout = 180.0 if any(trial.device == "cuda" for trial in trials.values()) else 30.0
            with LaunchedRanks() if is_launched() else Pool(world, timeout=timeout) as ranks:
                for name, trial in trials.items():
                    status.update(f"{output.counted(world, 'rank')} · {name}")
                    yield world, name, trial, check(ranks, trial)


def _trials(world: int, plan: str, sizes: dict[str, Any]) -> dict[str, Trial]:
    """Return trials of every plan: dense, sparse and with text."""
    from weft.run.measure.compare import Trial, plan_names
    from weft.run.world import machines

    block = 64 if sizes["device"] == "cuda" else 16  # GPU kernels require blocks of 64 or more
    trials: dict[str, Trial] = {}
    for name in [plan] if plan else plan_names(world):
        for kind, density, prefix in (("dense", None, 0), ("sparse", 0.3, 0), ("text", None, 7)):
            extra = {"density": density, "block": block, "prefix": min(prefix, sizes["tokens"])}
            trials[f"{name} · {kind}"] = Trial(**sizes, asked=name, machines=machines(), **extra)
    return trials


def _report(
    rows: list[dict[str, Any]], title: str, cells: Callable[[dict[str, Any]], output.Row], *, as_json: bool
) -> None:
    """Print the rows on rank 0; fail if any row exceeds its tolerance."""
    from weft.run.world import place

    failed = sum(not row["holds"] for row in rows)
    if place()[0]:  # a launched rank other than 0 prints nothing
        raise typer.Exit(bool(failed))
    if as_json:
        typer.echo(json.dumps({"holds": not failed, "rows": rows}, indent=2))
    else:
        typer.echo(output.fill(title))
        output.table([{**cells(row), "": "ok" if row["holds"] else "DIFFERS"} for row in rows])
        typer.echo(f"{len(rows) - failed} of {len(rows)} agree")
    if failed:
        raise CommError(f"{failed} of {len(rows)} checks exceed their tolerance.")


def _verify_model(
    model: Path, worlds: list[int], place: tuple[str, str], numerics: tuple[str, str], *, as_json: bool
) -> None:
    from weft.cli.ranks import LaunchedRanks, model_ranks, run_once
    from weft.generate import pretrained, rank_parity
    from weft.run.world import is_launched

    model = pretrained.locate(model)
    rows: list[dict[str, Any]] = []
    where = rank_parity.RunPlace(*place)
    with output.progress("loading …", quiet=as_json) as status:
        launched = LaunchedRanks() if is_launched() else None
        call = rank_parity.first_call(model, where.dtype) if not launched or launched.rank == 0 else None
        call = rank_parity.broadcast_call(call) if launched else call
        for world in worlds:
            with launched or model_ranks(world) as pool:
                for component in pretrained.transformers(model):
                    status.update(f"{output.counted(world, 'rank')} · {component}")
                    run_once(pool, rank_parity.run_alone, model, component, call, where)
                    worst = run_once(pool, rank_parity.compare, model, component, *numerics)[0]
                    row = {**asdict(worst), "device": where.device, "tolerance": worst.tolerance}
                    row["holds"] = worst.error <= worst.tolerance
                    rows.append({"ranks": world, "part": component, **row})
    title = f"{rows[0]['model']}: N ranks against one, in {rows[0]['dtype']} on {where.device}"
    _report(rows, title, _model_cells, as_json=as_json)


def _model_cells(row: dict[str, Any]) -> output.Row:
    return {
        "ranks": str(row["ranks"]),
        "part": row["part"],
        "plan": ", ".join(row["plans"]) or row["attention"],
        "output error": f"{row['error']:.1e}",
        "allowed": f"{row['tolerance']:.1e}",
        "sent": f"{row['sent'] / 1e6:.2f} MB",
    }


def _cells(row: dict[str, Any]) -> output.Row:
    mask = "dense" if row["density"] is None else f"{row['density']:.0%} of tiles"
    text = f", text {row['prefix']}" if row["prefix"] else ""
    chosen = f": {row['plan']}" if row["plan"] != row["asked"] else ""
    return {
        "ranks": str(row["ranks"]),
        "plan": row["asked"] + chosen,
        "attention": mask + text,
        "output error": f"{row['output_error']:.1e}",
        "grad. error": f"{row['gradient_error']:.1e}",
        "limit": f"{row['tolerance']:.0e}",
        "sent": f"{row['bytes_sent'] / 1e6:.2f} MB",
    }
