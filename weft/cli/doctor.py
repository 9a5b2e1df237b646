"""`weft doctor`: report the capabilities of this machine, and the commands that add missing ones."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from weft import __version__
from weft.cli import doctor_gpu, output
from weft.cli.packages import PACKAGES, TORCH

Status = Literal["ok", "limited", "missing"]
Read = Annotated[Path | None, typer.Option(help="Write the page of a doctor.json beside it.")]
NEEDS_TORCH = {"backends", "shared memory", "CPU kernel"}


@dataclass(frozen=True)
class Finding:
    """A row of the report: capability, status, version or value, note, and the command that adds it."""

    name: str
    status: Status
    value: str = ""
    note: str = ""
    add: str = ""


def run(options: doctor_gpu.GpuOptions, *, read: Read = None) -> None:
    """Show what this machine can do, and the commands that add what it lacks.

    With --gpu, run every part of weft on all GPUs, check it against float64, and write a page, a JSON to send
    and the topology for the planner. Under torchrun, use its ranks, also over several machines.
    """
    if options.gpu:
        sys.exit(doctor_gpu.examine_gpus(options))
    if read is not None:
        typer.echo(doctor_gpu.write_page(read))
        return
    findings = examine()
    if options.as_json:
        report = {"weft": __version__, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(findings)


def examine() -> list[Finding]:
    """Return all rows of the report in display order."""
    torch, torch_rows = _torch()
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "python": _python,
        "torch": lambda: torch_rows,
        "backends": lambda: _backends(torch),
        "cores": _cores,
        "memory": _memory,
        "shared memory": _sharing,
        "GPUs": lambda: _gpus(torch),
        "compilers": _compilers,
        "CPU kernel": _cpu_kernel,
        "packages": _packages,
    }
    usable = [name for name in checks if torch is not None or name not in NEEDS_TORCH]
    return [finding for name in usable for finding in _guarded(name, checks[name])]


def _guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    # Drivers and /proc files fail in unforeseeable ways; a failure costs its row, not the report.
    try:
        return list(check())
    except Exception as error:
        return [Finding(name, "limited", note=f"could not be examined: {error}")]


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _torch() -> tuple[ModuleType | None, list[Finding]]:
    if find_spec("torch") is None:
        return None, [Finding("torch", "missing", "", "weft can plan, but run nothing", TORCH.add)]
    try:
        import torch
    except Exception as error:  # a half-installed torch raises OSError, ImportError and more
        add = "pip install --force-reinstall torch"
        return None, [Finding("torch", "limited", _version("torch"), f"does not import: {error}", add)]
    return torch, [
        Finding("torch", "ok", f"{torch.__version__}, {output.counted(torch.get_num_threads(), 'thread')}"),
        Finding("CPU kernels", "ok", torch.backends.cpu.get_cpu_capability(), _bfloat16_note()),
    ]


def _bfloat16_note() -> str:
    about = Path("/proc/cpuinfo")
    if not about.exists() or "bf16" in about.read_text():
        return ""
    return "no native bfloat16 here: float32 is faster"


def _backends(torch: Any) -> Iterator[Finding]:
    if not torch.distributed.is_available():
        note = "this torch is built without torch.distributed: one process only"
        yield Finding("backends", "limited", note=note)
        return
    names = ("gloo", "nccl", "mpi")
    here = [name for name in names if getattr(torch.distributed, f"is_{name}_available")()]
    note = "" if "nccl" in here else "CPUs only; GPUs need a CUDA build of torch"
    if "gloo" not in here:
        note = "ranks on CPUs need gloo, which this torch is built without"
    yield Finding("backends", "ok" if "gloo" in here else "limited", ", ".join(here), note)


def _cores() -> Iterator[Finding]:
    from weft.run.spawn.launch import usable_cores

    total, usable = os.cpu_count() or 1, float(usable_cores())
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            usable = min(usable, int(limit) / int(period))
    note = "ranks take turns: results hold, timings do not" if usable < 2 else ""
    yield Finding("cores", "limited" if note else "ok", f"{usable:g} of {total}", note)


def _memory() -> Iterator[Finding]:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        size = min(size, int(text))
    yield Finding("memory", "ok", _gib(size))


def _sharing() -> Iterator[Finding]:
    from weft.run.comm.shm import unavailable_reason

    if reason := unavailable_reason():
        note = f"ranks of this machine communicate over sockets: {reason}"
        yield Finding("shared memory", "limited", note=note)
    else:
        yield Finding("shared memory", "ok", "read in place by the ranks of this machine")


def _gpus(torch: Any) -> Iterator[Finding]:
    if torch is not None and torch.cuda.is_available():
        for index in range(count := torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            peers = sum(torch.cuda.can_device_access_peer(index, i) for i in range(count) if i != index)
            value = f"{about.name}, {_gib(about.total_memory)}, sm {about.major}.{about.minor}"
            yield Finding(f"GPU {index}", "ok", value, f"reaches {output.counted(peers, 'peer')} directly")
    elif listed := _lines("nvidia-smi", "-L"):
        note = "torch does not see them: install a CUDA build of torch"
        yield Finding("GPUs", "limited", str(len(listed)), note)
    else:
        yield Finding("GPUs", "missing", note="not needed: ranks run on CPUs")


def _compilers() -> Iterator[Finding]:
    wanted = (
        ("C compiler", ("cc", "gcc", "clang"), "fast CPU kernels", "apt install gcc"),
        ("C++ compiler", ("g++", "clang++"), "torch.compile on CPUs", "apt install g++"),
        ("CUDA compiler", ("nvcc",), "compiling GPU kernels", "apt install nvidia-cuda-toolkit"),
    )
    for name, commands, gives, add in wanted:
        here = [f"{command} {_release(command)}" for command in commands if shutil.which(command)]
        yield (
            Finding(name, "ok", ", ".join(here))
            if here
            else Finding(name, "missing", "", f"for {gives}", add)
        )


def _cpu_kernel() -> Iterator[Finding]:
    """Check that the compiled kernel builds and runs, and list its instruction sets."""
    from weft.run.kernels.cpu import isas, unavailable_reason

    if why := unavailable_reason():
        note = f"block-sparse attention is gathered for torch's SDPA instead: {why}"
        yield Finding("CPU kernel", "limited", note=note)
    else:
        yield Finding("CPU kernel", "ok", ", ".join(isas()), "the fastest first")


def _release(command: str) -> str:
    if command != "nvcc":
        return next(iter(_lines(command, "-dumpversion")), "")
    # Cuda compilation tools, release 13.0, V13.0.88
    output = " ".join(_lines(command, "--version"))
    return output.partition("release ")[2].partition(",")[0]


def _packages() -> Iterator[Finding]:
    for name, package in PACKAGES.items():
        if package is TORCH:  # has rows of its own
            continue
        if find_spec(name) is None:
            yield Finding(name, "missing", "", f"for {package.gives}", package.add)
        else:
            yield Finding(name, "ok", _version(package.distribution or name))


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


def _show(findings: list[Finding]) -> None:
    typer.echo(f"weft {__version__}")
    output.table(
        [{"": row.name, "status": row.status, "value": row.value, "note": row.note} for row in findings]
    )
    if missing := [{"": f"  {row.name}", "add": row.add} for row in findings if row.add]:
        typer.echo("\nCommands that add what is missing:")
        output.table(missing, header=False)
    typer.echo(f"\n{_verdict(findings)}")


def _verdict(findings: list[Finding]) -> str:
    rows = {finding.name: finding for finding in findings}
    if rows["torch"].status != "ok":
        return "weft can plan here, but run nothing."
    gpus = sum(name.startswith("GPU ") for name in rows)
    where = output.counted(gpus, "GPU") if gpus else f"CPUs, {rows['cores'].value} cores"
    return f"weft runs here: {where}. Next: weft {'doctor --gpu' if gpus else 'verify'}"
