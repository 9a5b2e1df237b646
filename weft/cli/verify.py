"""`weft verify`: check that N ranks compute what one rank computes, by every strategy or for a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.numbers import counts
from weft.cli.options import Backend, DeviceDtype, HeadDim, Heads, Json
from weft.core.errors import CommError, InputError
from weft.plan.strategies import parse

if TYPE_CHECKING:
    from rich.table import Table

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
    strategy: Annotated[str, typer.Option(hidden=True)] = "",
    as_json: Json = False,
) -> None:
    """Check that N ranks compute what one rank computes: outputs and gradients of every strategy.

    Also prove, step by step, that the programs of the ranks have no races and no deadlocks.

    With a checkpoint directory, compare the outputs of its transformers on a few tokens.

    Under torchrun, use the ranks that it launched, on one or several machines.
    """
    plan = plan or strategy
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
    outcomes = _outcomes(worlds, sizes | options, plan, quiet=as_json)
    rows = [
        {"ranks": world, **asdict(trial), **asdict(outcome), "holds": outcome.holds}
        for world, trial, outcome in outcomes
    ]
    return _report(rows, _table, as_json=as_json)


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


def _outcomes(
    worlds: list[int], sizes: dict[str, Any], plan: str, *, quiet: bool
) -> Iterator[tuple[int, Trial, TrialResult]]:
    from rich.console import Console

    from weft.cli.ranks import LaunchedRanks, report_once
    from weft.run.measure.compare import Trial, check, plan_names
    from weft.run.spawn.pool import Pool
    from weft.run.world import is_launched, machines

    on_gpus = sizes["device"] == "cuda"
    block = 64 if on_gpus else 16  # GPU kernels require blocks of 64 or more
    with report_once(), Console(stderr=True, quiet=quiet).status("starting ranks …") as status:
        for world in worlds:
            names = [plan] if plan else plan_names(world)
            # On GPUs the first call compiles kernels, which takes longer on some ranks than on others.
            timeout = 180.0 if on_gpus else 30.0
            with LaunchedRanks() if is_launched() else Pool(world, timeout=timeout) as ranks:
                for name in names:
                    for density, prefix in ((None, 0), (0.3, 0), (None, 7)):  # dense, sparse, text
                        status.update(f"{world} ranks · {name}")
                        extra = {"density": density, "block": block, "prefix": min(prefix, sizes["tokens"])}
                        trial = Trial(**sizes, asked=name, machines=machines(), **extra)
                        yield world, trial, check(ranks, trial)


def _report(
    rows: list[dict[str, Any]], table: Callable[[list[dict[str, Any]]], Table], *, as_json: bool
) -> None:
    """Print the rows on rank 0; fail if any row exceeds its tolerance."""
    from weft.run.world import place

    failed = [row for row in rows if not row["holds"]]
    if place()[0]:  # a launched rank other than 0 prints nothing
        raise typer.Exit(bool(failed))
    if as_json:
        typer.echo(json.dumps({"holds": all(row["holds"] for row in rows), "rows": rows}, indent=2))
    else:
        from rich.console import Console

        Console().print(table(rows))
    if failed:
        raise CommError(f"{len(failed)} of {len(rows)} checks exceed their tolerance.")


def _verify_model(
    model: Path, worlds: list[int], place: tuple[str, str], numerics: tuple[str, str], *, as_json: bool
) -> None:
    from rich.console import Console

    from weft.cli.ranks import LaunchedRanks, model_ranks, run_once
    from weft.generate import pretrained, rank_parity
    from weft.run.world import is_launched

    model = pretrained.locate(model)
    rows: list[dict[str, Any]] = []
    where = rank_parity.RunPlace(*place)
    with Console(stderr=True, quiet=as_json).status("loading …") as status:
        launched = LaunchedRanks() if is_launched() else None
        call = rank_parity.first_call(model, where.dtype) if not launched or launched.rank == 0 else None
        call = rank_parity.broadcast_call(call) if launched else call
        for world in worlds:
            with launched or model_ranks(world) as pool:
                for component in pretrained.transformers(model):
                    status.update(f"{world} ranks · {component}")
                    run_once(pool, rank_parity.run_alone, model, component, call, where)
                    worst = run_once(pool, rank_parity.compare, model, component, *numerics)[0]
                    row = {**asdict(worst), "device": where.device, "tolerance": worst.tolerance}
                    row["holds"] = worst.error <= worst.tolerance
                    rows.append({"ranks": world, "part": component, **row})
    _report(rows, _model_table, as_json=as_json)


def _model_table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    title = f"{rows[0]['model']}: N ranks against one, in {rows[0]['dtype']} on {rows[0]['device']}"
    table = Table(title=title, title_justify="left")
    for name in ("ranks", "part", "plan", "output error", "allowed", "sent", ""):
        table.add_column(name, justify="left" if name in ("part", "plan") else "right")
    for row in rows:
        table.add_row(
            str(row["ranks"]),
            row["part"],
            ", ".join(row["plans"]) or row["attention"],
            f"{row['error']:.1e}",
            f"{row['tolerance']:.1e}",
            f"{row['sent'] / 1e6:.2f} MB",
            "ok" if row["holds"] else "DIFFERS",
        )
    return table


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    proved = sum(row["proved_steps"] for row in rows)
    numerics = f"{rows[0]['dtype']}, {rows[0]['device']}"
    title = f"N ranks ({numerics}) against one in float64 · {proved:,} steps proved free of races"
    table = Table(title=title, title_justify="left")
    columns = ("ranks", "asked", "plan", "attention", "output error", "gradient error", "allowed", "sent", "")
    for name in columns:
        table.add_column(name, justify="left" if name in ("asked", "plan", "attention") else "right")
    for row in rows:
        mask = "dense" if row["density"] is None else f"{row['density']:.0%} of tiles"
        if row["prefix"]:
            mask += f", text {row['prefix']}"
        table.add_row(
            str(row["ranks"]),
            row["asked"],
            row["plan"],
            mask,
            f"{row['output_error']:.1e}",
            f"{row['gradient_error']:.1e}",
            f"{row['tolerance']:.0e}",
            f"{row['bytes_sent'] / 1e6:.2f} MB",
            "ok" if row["holds"] else "DIFFERS",
        )
    return table
