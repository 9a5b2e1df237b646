"""`weft testbed`: emulate several machines on this one; measure their links or run a script on them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import output
from weft.cli.numbers import sizes
from weft.cli.packages import need
from weft.core.errors import InputError

if TYPE_CHECKING:
    from weft.run.spawn.testbed import Testbed

LARGE, TIMES = 4 << 20, 5  # bytes that a device sends, and how often
# Names of machines cannot be looked up and torch says so at each connection; lines come as they are printed.
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
GRACE_SECONDS = 10.0  # time for the other machines to report a failure


def run(
    shape: Annotated[str, typer.Argument(help="Machines x devices in each.")] = "2x2",
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: what torchrun is to start, and its arguments.")
    ] = None,
    *,
    rate: Annotated[str, typer.Option(help="Limit of each machine's link, or none.")] = "400mbit",
) -> None:
    """Build machines as network namespaces; measure their links, or run a script on them with torchrun.

    weft testbed 3x2 --rate 1gbit -- train.py --steps 3
    """
    machines, devices = sizes(shape, "machines x devices", "3x2; a script goes after --")
    if command and not command[0].startswith("-") and not Path(command[0]).is_file():
        raise InputError(f"Script {command[0]} not found.", hint="weft testbed 2x2 -- SCRIPT [ARGS]")
    need("torch")
    from weft.run.spawn.testbed import Testbed

    with Testbed(machines, rate=None if rate == "none" else rate) as bed:
        if command:
            sys.exit(launch(bed, devices, command))
        _show(bed, devices)


def launch(bed: Testbed, devices: int, command: list[str]) -> int:
    """Run torchrun in every machine, print its output, and return the first nonzero exit code."""
    environment = QUIET | os.environ | bed.environment()
    processes = [
        subprocess.Popen(
            bed.command(i, *_torchrun(bed, i, devices), *command),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for i in range(len(bed.machines))
    ]
    with ThreadPoolExecutor(len(processes)) as followers:
        codes = [followers.submit(_follow, i, process) for i, process in enumerate(processes)]
        try:
            for done in as_completed(codes):
                if code := done.result():
                    wait(codes, timeout=GRACE_SECONDS)
                    return code if code > 0 else 128 - code  # the exit code of a shell for a signal
            return 0
        finally:
            bed.close()  # end the remaining processes, which the follower threads wait for


def _torchrun(bed: Testbed, machine: int, devices: int) -> list[str]:
    master, own = bed.machines[0].address, bed.machines[machine].address
    options = {
        "nnodes": len(bed.machines),
        "nproc-per-node": devices,
        "node-rank": machine,
        "master-addr": master,
        "master-port": 29500,
        "local-addr": own,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "torch.distributed.run", *words]


def _follow(machine: int, process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None, "started with a pipe"
    with process:
        for line in process.stdout:
            typer.echo(f"[m{machine}] {line}", nl=False)
    return process.returncode


def _show(bed: Testbed, devices: int) -> None:
    before = bed.traffic()
    with output.progress("sending around …"), bed.pool(devices) as pool:
        seconds = max(pool.run(send_around, devices))
    payload = TIMES * LARGE * devices
    output.table(
        [
            {
                "machine": machine.name,
                "address": machine.address,
                "limit": bed.rate or "none",
                "sent": f"{payload / 1e6:.1f} MB",
                "on the wire": f"{(now.sent - then.sent) / 1e6:.1f} MB",
                "speed": f"{payload / seconds / 1e6:.1f} MB/s",
            }
            for machine, now, then in zip(bed.machines, bed.traffic(), before, strict=True)
        ]
    )
    output.note(
        f"{output.counted(devices, 'rank')} of every machine sent {TIMES} × {LARGE / 1e6:.1f} MB to the next "
        "machine by gloo, all at the same time · on the wire: by the counters of its interface"
    )


def send_around(devices: int) -> float:
    """Return the seconds of one exchange of every rank with its peers in the adjacent machines."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    ours, theirs = (torch.zeros(LARGE, dtype=torch.uint8) for _ in range(2))
    dist.barrier()
    began = time.perf_counter()
    for _ in range(TIMES):
        sent = dist.isend(ours, (rank + devices) % ranks)
        dist.recv(theirs, (rank - devices) % ranks)
        assert sent is not None
        sent.wait()
    dist.barrier()
    return time.perf_counter() - began
