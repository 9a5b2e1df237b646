"""`weft calibrate`: measure links and the attention kernel here, and write the Topology the planner reads."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.options import Backend, DeviceDtype, HeadDim, Json
from weft.core.codec import to_plain
from weft.core.errors import InputError
from weft.core.files import check_place, writing

if TYPE_CHECKING:
    from weft.core.topology import Topology


def run(
    *,
    ranks: Annotated[
        int, typer.Option(help="Ranks to start here; under torchrun its world is measured.")
    ] = 2,
    out: Annotated[Path, typer.Option("--out", "-o", help="The TOML to write.")] = Path("topology.toml"),
    head_dim: HeadDim = 64,
    dtype: DeviceDtype = "",
    backend: Backend = "auto",
    as_json: Json = False,
) -> None:
    """Measure links and the attention kernel, in under a minute; then: weft plan --topology topology.toml."""
    if ranks < 1 or head_dim < 1:
        raise InputError(f"ranks={ranks}, head_dim={head_dim}.", hint="Both are 1 or more.")
    check_place(out, hint="Give another --out.")  # before the measuring, not after it
    found = _measure(ranks, {"head_dim": head_dim, "dtype": dtype, "backend": backend})
    if found is None:  # another rank writes
        return
    with writing(out, hint="Give another --out."):
        out.write_text(found.to_toml())
    typer.echo(json.dumps(to_plain(found), indent=2) if as_json else _words(found, out))


def _measure(ranks: int, how: dict[str, Any]) -> Topology | None:
    from rich.console import Console

    from weft.run.calibrate import calibrate
    from weft.run.pool import Pool
    from weft.run.world import is_launched, machines, world_of

    if is_launched():
        rank = world_of(None, 60.0).comm.rank
        found = calibrate(**how, machines=machines())
        return found if rank == 0 else None
    with Console(stderr=True).status("measuring links and kernel …"), Pool(ranks) as pool:
        return pool.run(partial(calibrate, **how))[0]


def _words(found: Topology, out: Path) -> str:
    shared = f", {found.cores} cores shared" if found.cores else ""
    lines = [
        f"{found.machines} × {found.devices} devices{shared}",
        f"attention  {found.flops / 1e9:,.1f} GFLOP/s, {found.call_seconds * 1e6:,.0f} µs a call, "
        f"{found.row_seconds * 1e6:,.1f} µs a row of blocks, {found.tile_seconds * 1e9:,.0f} ns a tile",
    ]
    for name in ("intra", "inter") if found.machines > 1 else ("intra",):
        link = getattr(found, name)
        lines.append(f"{name:<10} {link.bandwidth / 1e9:,.2f} GB/s, {link.latency * 1e6:,.0f} µs")
    return "\n".join([*lines, f"written to {out}: weft plan … --topology {out}"])
