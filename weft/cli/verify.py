"""`weft verify`: N ranks compute what one rank computes: every strategy, or a checkpoint's transformer."""

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
from weft.plan.choose import usp_names
from weft.plan.strategies import parse, short_names

if TYPE_CHECKING:
    from rich.table import Table

    from weft.run.check import Outcome, Trial


BALANCED = ("ulysses+balanced", "ring+balanced", "gather+cuts")


def run(
    model_dir: Annotated[
        Path | None, typer.Argument(help="A Diffusers checkpoint directory: its transformers are tried.")
    ] = None,
    *,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to try, such as 2,3.")] = "2,3",
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
    """Prove that N ranks compute what one rank computes: outputs and gradients, every strategy.

    What the ranks run is proved free of races and deadlocks, step by step.

    With a checkpoint directory: the outputs of its transformers on CPUs, in float32 on a few tokens.
    """
    plan, worlds = plan or strategy, counts(ranks, "ranks")
    for world in worlds:  # before any rank is started
        if plan not in ("", "auto"):
            parse(plan, world)
    if model_dir is not None:
        return _verify_model(model_dir, worlds, plan or "auto", backend, as_json=as_json)
    if device not in ("", "cpu", "cuda"):
        raise InputError(f"--device {device} is unknown.", hint="It is cuda or cpu.")
    sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads or heads, "head_dim": head_dim}
    if bad := [f"{name}={size}" for name, size in sizes.items() if size < 1]:
        raise InputError(f"{bad[0]} is no size.", hint="Sizes are 1 or more.")
    how = {"dtype": dtype, "backend": backend, "device": device}
    outcomes = _outcomes(worlds, sizes | how, plan, quiet=as_json)
    rows = [
        {"ranks": world, **asdict(trial), **asdict(outcome), "holds": outcome.holds}
        for world, trial, outcome in outcomes
    ]
    return _tell(rows, _table, as_json=as_json)


def _outcomes(
    worlds: list[int], sizes: dict[str, Any], plan: str, *, quiet: bool
) -> Iterator[tuple[int, Trial, Outcome]]:
    import torch
    from rich.console import Console

    from weft.cli.ranks import told_once
    from weft.run.check import Trial, check
    from weft.run.devices import default_dtype
    from weft.run.pool import Pool

    sizes["device"] = sizes["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpus, gpus = sizes["device"] == "cuda", torch.cuda.device_count()
    if on_gpus and max(worlds) > gpus:
        few = f"--ranks {gpus}, or " if gpus else ""
        raise InputError(
            f"{max(worlds)} ranks need as many GPUs; {gpus} are visible.", hint=f"Use {few}--device cpu."
        )
    sizes["dtype"] = sizes["dtype"] or (default_dtype() if on_gpus else "float32")
    block = 64 if on_gpus else 16  # kernels of GPUs have no smaller ones
    with told_once(), Console(stderr=True, quiet=quiet).status("starting ranks …") as status:
        for world in worlds:
            names = [plan] if plan else ["auto", *short_names(), *usp_names(world)[1:-1], *BALANCED]
            with Pool(world) as pool:
                for name in names:
                    for density, prefix in ((None, 0), (0.3, 0), (None, 7)):
                        status.update(f"{world} ranks · {name}")
                        extra = {"density": density, "block": block, "prefix": min(prefix, sizes["tokens"])}
                        trial = Trial(**sizes, asked=name, **extra)
                        yield world, trial, check(pool, trial)


def _tell(
    rows: list[dict[str, Any]], table: Callable[[list[dict[str, Any]]], Table], *, as_json: bool
) -> None:
    """Show what was found, and fail if a row differs."""
    if as_json:
        typer.echo(json.dumps({"holds": all(row["holds"] for row in rows), "rows": rows}, indent=2))
    else:
        from rich.console import Console

        Console().print(table(rows))
    if failed := [row for row in rows if not row["holds"]]:
        raise CommError(f"{len(failed)} of {len(rows)} checks differ from one rank by more than they may.")


def _verify_model(model: Path, worlds: list[int], plan: str, backend: str, *, as_json: bool) -> None:
    from rich.console import Console

    from weft.cli.ranks import model_ranks, run_once
    from weft.models import checkpoint, equal

    checkpoint.check(model)
    rows: list[dict[str, Any]] = []
    with Console(stderr=True, quiet=as_json).status("loading …") as status:
        call = equal.first_call(model)
        for world in worlds:
            with model_ranks(world) as pool:
                for part in checkpoint.transformers(model):
                    status.update(f"{world} ranks · {part}")
                    run_once(pool, equal.alone, model, part, call)
                    found = run_once(pool, equal.compare, model, part, call, plan, backend)
                    worst = max(found, key=lambda one: one.error)
                    row = {**asdict(worst), "sent": max(one.sent for one in found)}
                    row |= {"tolerance": equal.TOLERANCE, "holds": worst.error <= equal.TOLERANCE}
                    rows.append({"ranks": world, "part": part, **row})
    _tell(rows, _model_table, as_json=as_json)


def _model_table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    title = f"{rows[0]['model']}: N ranks against one, in float32"
    table = Table(title=title, title_justify="left")
    for name in ("ranks", "part", "plan", "output error", "allowed", "sent", ""):
        table.add_column(name, justify="left" if name in ("part", "plan") else "right")
    for row in rows:
        table.add_row(
            str(row["ranks"]),
            row["part"],
            ", ".join(row["plans"]) or row["attention"],
            f"{row['error']:.1e}",
            f"{row['tolerance']:.0e}",
            f"{row['sent'] / 1e6:.2f} MB",
            "ok" if row["holds"] else "DIFFERS",
        )
    return table


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    proved = sum(row["proved_steps"] for row in rows)
    how = f"{rows[0]['dtype']}, {rows[0]['device']}"
    title = f"N ranks ({how}) against one in float64 · {proved:,} steps proved free of races"
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
