"""`weft doctor`: report the capabilities of this machine, and the commands that add missing ones."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal

import typer

from weft import __version__
from weft.cli import doctor_gpu
from weft.cli.options import Json
from weft.cli.packages import PACKAGES, TORCH

Status = Literal["ok", "limited", "missing"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A row of the report: capability, status, version or value, note, and the command that adds it."""

    name: str
    status: Status
    value: str = ""
    note: str = ""
    add: str = ""


def run(
    *, gpu: doctor_gpu.Gpu = False, device: doctor_gpu.Device = "cuda", ranks: doctor_gpu.Ranks = 0,
    minutes: doctor_gpu.Minutes = 10.0, only: doctor_gpu.Only = "",
    out: doctor_gpu.Out = Path("weft-doctor"), read: doctor_gpu.Read = None, fault: doctor_gpu.Fault = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show what this machine can do, and the commands that add what it lacks.

    With --gpu, run all that weft has on all GPUs, check it against float64, and write a page, a JSON to send
    and the topology for the planner. Under torchrun its ranks are used, over several machines.
    """
    if gpu:
        options = doctor_gpu.GpuOptions(device, ranks, minutes, out, only, fault or [], as_json)
        sys.exit(doctor_gpu.examine_gpus(options))
    if read is not None:
        typer.echo(doctor_gpu.write_page(read))
        return
    findings = examine()
    if as_json:
        report = {"weft": __version__, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(findings)


def examine() -> list[Finding]:
    """Return all rows of the report in display order."""
    torch, torch_rows = _torch()
    checks: dict[str, Callable[[], list[Finding]]] = {
        "python": _python,
        "torch": lambda: torch_rows,
        "backends": lambda: _backends(torch),
        "cores": _cores,
        "memory": _memory,
        "shared memory": lambda: _sharing(torch),
        "GPUs": lambda: _gpus(torch),
        "compilers": _compilers,
        "CPU kernel": lambda: _cpu_kernel(torch),
        "packages": _packages,
    }
    return [finding for name, check in checks.items() for finding in _guarded(name, check)]


def _guarded(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    # Drivers and /proc files fail in unforeseeable ways; a failure costs its row, not the report.
    try:
        return check()
    except Exception as error:
        return [Finding(name=name, status="limited", note=f"could not be examined: {error}")]


def _python() -> list[Finding]:
    line = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return [Finding(name="python", status="ok", value=line)]


def _torch() -> tuple[ModuleType | None, list[Finding]]:
    if find_spec("torch") is None:
        note = "weft can plan, but run nothing"
        return None, [Finding(name="torch", status="missing", note=note, add=TORCH.add)]
    try:
        import torch
    except Exception as error:  # a half-installed torch raises OSError, ImportError and more
        return None, [
            Finding(
                name="torch",
                status="limited",
                value=_version("torch"),
                note=f"does not import: {error}",
                add="pip install --force-reinstall torch",
            )
        ]
    line = f"{torch.__version__}, {_count(torch.get_num_threads(), 'thread')}"
    capability = torch.backends.cpu.get_cpu_capability()
    return torch, [
        Finding(name="torch", status="ok", value=line),
        Finding(name="CPU kernels", status="ok", value=capability, note=_bfloat16_note()),
    ]


def _bfloat16_note() -> str:
    about = Path("/proc/cpuinfo")
    if not about.exists() or "bf16" in about.read_text():
        return ""
    return "no native bfloat16 here: float32 is faster"


def _backends(torch: ModuleType | None) -> list[Finding]:
    if torch is None:
        return []
    if not torch.distributed.is_available():
        note = "this torch is built without torch.distributed: one process only"
        return [Finding(name="backends", status="limited", note=note)]
    names = ("gloo", "nccl", "mpi")
    here = [name for name in names if getattr(torch.distributed, f"is_{name}_available")()]
    if "gloo" not in here:
        note = "ranks on CPUs need gloo, which this torch is built without"
        return [Finding(name="backends", status="limited", value=", ".join(here), note=note)]
    note = "" if "nccl" in here else "CPUs only; GPUs need a CUDA build of torch"
    return [Finding(name="backends", status="ok", value=", ".join(here), note=note)]


def _cores() -> list[Finding]:
    from weft.run.spawn.launch import usable_cores

    total, usable = os.cpu_count() or 1, float(usable_cores())
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            usable = min(usable, int(limit) / int(period))
    cores = f"{usable:g} of {total}"
    if usable < 2:
        note = "ranks take turns: results hold, timings do not"
        return [Finding(name="cores", status="limited", value=cores, note=note)]
    return [Finding(name="cores", status="ok", value=cores)]


def _memory() -> list[Finding]:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        size = min(size, int(text))
    return [Finding(name="memory", status="ok", value=_gib(size))]


def _sharing(torch: ModuleType | None) -> list[Finding]:
    if torch is None:
        return []
    from weft.run.comm.shm import unavailable_reason

    if reason := unavailable_reason():
        note = f"ranks of this machine communicate over sockets: {reason}"
        return [Finding(name="shared memory", status="limited", note=note)]
    return [Finding(name="shared memory", status="ok", value="read in place by the ranks of this machine")]


def _gpus(torch: ModuleType | None) -> list[Finding]:
    if torch is not None and torch.cuda.is_available():
        return [_gpu(torch, index) for index in range(torch.cuda.device_count())]
    listed = _lines("nvidia-smi", "-L")
    if not listed:
        return [Finding(name="GPUs", status="missing", note="not needed: ranks run on CPUs")]
    note = "torch does not see them: install a CUDA build of torch"
    return [Finding(name="GPUs", status="limited", value=str(len(listed)), note=note)]


def _gpu(torch: ModuleType, index: int) -> Finding:
    about = torch.cuda.get_device_properties(index)
    others = (other for other in range(torch.cuda.device_count()) if other != index)
    peers = sum(torch.cuda.can_device_access_peer(index, other) for other in others)
    return Finding(
        name=f"GPU {index}",
        status="ok",
        value=f"{about.name}, {_gib(about.total_memory)}, sm {about.major}.{about.minor}",
        note=f"reaches {_count(peers, 'peer')} directly",
    )


def _compilers() -> list[Finding]:
    wanted = (
        ("C compiler", ("cc", "gcc", "clang"), "fast CPU kernels", "apt install gcc"),
        ("C++ compiler", ("g++", "clang++"), "torch.compile on CPUs", "apt install g++"),
        ("CUDA compiler", ("nvcc",), "compiling GPU kernels", "apt install nvidia-cuda-toolkit"),
    )
    rows: list[Finding] = []
    for name, commands, gives, add in wanted:
        here = [f"{command} {_release(command)}" for command in commands if shutil.which(command)]
        if here:
            rows.append(Finding(name=name, status="ok", value=", ".join(here)))
        else:
            rows.append(Finding(name=name, status="missing", note=f"for {gives}", add=add))
    return rows


def _cpu_kernel(torch: ModuleType | None) -> list[Finding]:
    """Check that the compiled kernel builds and runs, and list its instruction sets."""
    if torch is None:
        return []
    from weft.run.kernels.cpu import isas, unavailable_reason

    if why := unavailable_reason():
        note = f"block-sparse attention is gathered for torch's SDPA instead: {why}"
        return [Finding(name="CPU kernel", status="limited", note=note)]
    return [Finding(name="CPU kernel", status="ok", value=", ".join(isas()), note="the fastest first")]


def _release(command: str) -> str:
    if command != "nvcc":
        return next(iter(_lines(command, "-dumpversion")), "")
    # Cuda compilation tools, release 13.0, V13.0.88
    output = " ".join(_lines(command, "--version"))
    return output.partition("release ")[2].partition(",")[0]


def _packages() -> list[Finding]:
    rows: list[Finding] = []
    for name, package in PACKAGES.items():
        if package is TORCH:  # has rows of its own
            continue
        if find_spec(name) is None:
            note = f"for {package.gives}"
            rows.append(Finding(name=name, status="missing", note=note, add=package.add))
        else:
            rows.append(Finding(name=name, status="ok", value=_version(package.distribution or name)))
    return rows


def _lines(command: str, *arguments: str) -> list[str]:
    """Return the output lines of a command; empty if it is missing or fails."""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "version unknown"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colors = {"ok": "green", "limited": "yellow", "missing": "red"}
    # Text, not str: rich takes the brackets of weft[models] for markup.
    table = Table("", "", "value", "note", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    to_add = Table.grid(padding=(0, 2))
    for finding in findings:
        status = Text(finding.status, style=colors[finding.status])
        table.add_row(finding.name, status, Text(finding.value), Text(finding.note))
        if finding.add:
            to_add.add_row("", finding.name, Text(finding.add))
    console = Console(highlight=False)
    console.print(f"weft {__version__}")
    console.print(table)
    if to_add.row_count:
        console.print("\nCommands that add what is missing:", to_add, sep="\n")
    console.print("", Text(_verdict(findings)), sep="\n")


def _verdict(findings: list[Finding]) -> str:
    rows = {finding.name: finding for finding in findings}
    if rows["torch"].status != "ok":
        return "weft can plan here, but run nothing."
    gpus = sum(name.startswith("GPU ") for name in rows)
    where = _count(gpus, "GPU") if gpus else f"CPUs, {rows['cores'].value} cores"
    return f"weft runs here: {where}. Next: weft {'doctor --gpu' if gpus else 'verify'}"
