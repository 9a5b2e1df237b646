"""`weft calibrate`: measure links, kernels and hosts here, and write the Topology that the planner reads."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import output
from weft.cli.options import Backend, DeviceDtype, Json
from weft.cli.workload import bandwidth
from weft.core.codec import to_plain
from weft.core.errors import InputError
from weft.core.files import check_writable, writing

if TYPE_CHECKING:
    from weft.core.topology import Topology


def run(
    *,
    ranks: Annotated[
        int,
        typer.Option(
            help="Ranks to start here: by default one for each GPU, or 2. torchrun's, if there are."
        ),
    ] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The TOML to write.")] = Path("topology.toml"),
    head_dim: Annotated[int, typer.Option(help="Size of one head: by default 128 on GPUs, else 64.")] = 0,
    dtype: DeviceDtype = "",
    backend: Backend = "auto",
    as_json: Json = False,
) -> None:
    """Measure links, kernels and hosts, in under a minute; then: weft plan --topology topology.toml.

    The same measurement is the check `links` of weft doctor --gpu.
    """
    if ranks < 0 or head_dim < 0:
        raise InputError(f"--ranks and --head-dim must be >= 1 if given, got {ranks} and {head_dim}.")
    check_writable(out, hint="Give another --out.")  # fail before measuring, not after it
    topology = _measure(ranks, {"head_dim": head_dim, "dtype": dtype, "backend": backend})
    if topology is None:  # another rank writes
        return
    with writing(out, hint="Give another --out."):
        out.write_text(topology.to_toml())
    typer.echo(json.dumps(to_plain(topology), indent=2) if as_json else _words(topology, out))


def _measure(ranks: int, options: dict[str, Any]) -> Topology | None:
    import torch

    from weft.cli.ranks import LaunchedRanks
    from weft.run.measure.calibrate import calibrate
    from weft.run.spawn.pool import Pool
    from weft.run.world import is_launched, machines

    if is_launched():
        with LaunchedRanks() as ranks_here:
            topology = calibrate(**options, machines=machines())
            return topology if ranks_here.rank == 0 else None
    gpus = torch.cuda.device_count()
    if gpus and ranks > gpus:
        raise InputError(f"{ranks} ranks need as many GPUs; {gpus} are visible.", hint=f"Use --ranks {gpus}.")
    # On GPUs the first round compiles kernels, for which some ranks wait longer than others.
    size, timeout = ranks or gpus or 2, 180.0 if gpus else 60.0
    with output.progress("measuring links, kernels and hosts …"), Pool(size, timeout=timeout) as pool:
        return pool.run(partial(calibrate, **options))[0]


def _words(topology: Topology, out: Path) -> str:
    shared = f", {topology.cores} cores shared" if topology.cores else ""
    lines = [f"{topology.machines} × {topology.devices} devices{shared}", *_speeds(topology)]
    for name in ("intra", "inter") if topology.machines > 1 else ("intra",):
        link = getattr(topology, name)
        lines.append(f"{name:<10} {bandwidth(link, topology)}, {link.latency * 1e6:,.0f} µs")
    if topology.links:
        slowest = min((link for _, _, link in topology.links), key=lambda link: link.bandwidth)
        differing = output.counted(len(topology.links) // 2, "pair")
        lines.append(f"{'':<10} of {differing}, the slowest has {bandwidth(slowest, topology)}")
    if topology.transport == "symmetric":
        lines.append("messages   through symmetric memory, which was faster than the process group")
    return "\n".join([*lines, f"written to {out}; to use it: weft plan MODEL --topology {out}"])


def _speeds(topology: Topology) -> list[str]:
    if topology.cores:
        rows = f"{topology.row_seconds * 1e6:,.1f} µs a row of blocks"
        tiles = f"{topology.tile_seconds * 1e9:,.0f} ns a tile"
        calls = f"{topology.call_seconds * 1e6:,.0f} µs a call"
        return [f"attention  {topology.flops / 1e9:,.1f} GFLOP/s, {calls}, {rows}, {tiles}"]
    kinds = {"dense": (topology.flops, topology.backward_flops, topology.kernel)}
    kinds["sparse"] = topology.sparse_flops, topology.sparse_backward_flops, topology.sparse_kernel
    return [
        f"{kind:<10} {ahead / 1e12:,.0f} TFLOP/s, backward {back / 1e12:,.0f} ({name})"
        for kind, (ahead, back, name) in kinds.items()
    ]
