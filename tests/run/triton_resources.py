"""Cross-compile the Triton kernels without a GPU and read what they take: registers, shared memory, spills.

    python -m tests.run.triton_resources docs/kernels_gpu.md

writes the table between the marks of that file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from weft.run.kernels.triton_configs import (
    HEAD_DIMS,
    KERNELS,
    SMALL_TARGETS,
    TARGETS,
    TMA_TARGETS,
    Config,
    configs,
    padded,
)

# What the target's matrix units are called in its assembly.
INSTRUCTION = {
    "sm_80": "mma.sync",
    "sm_86": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "sm_120": "mma.sync",
    "gfx942": "v_mfma",
}
_SIXTEEN = ("q", "k", "v", "grad", "narrow", "new_out")
_INTEGERS = {
    "starts": "*i32",
    "blocks": "*i32",
    "order": "*i32",
    "heads": "i32",
    "q_len": "i32",
    "k_len": "i32",
    "scale": "fp32",
}
_MARKS = "<!-- resources: begin -->", "<!-- resources: end -->"


@dataclass(frozen=True)
class Case:
    """One kernel compiled for one target; the flags are the worst case unless told otherwise."""

    target: str
    kernel: str
    head_dim: int
    block: int
    config: Config
    dtype: str = "bf16"
    dense: bool = False
    even: bool = False
    add: bool = True
    group: int = 1


@dataclass(frozen=True)
class Resources:
    """What one program takes. `resident` bounds the warps (wavefronts) that fit on one SM (CU), of `of`."""

    registers: int
    shared: int
    spills: int
    resident: int
    of: int
    matrix: int
    """How many matrix instructions are in the assembly."""
    bulk: int = 0
    """Loads by tensor-memory descriptors."""
    copies: int = 0
    """Plain cp.async, which threads of the program issue."""
    scratch: int = 0
    """Bytes of global memory that a launch would have to allocate."""
    reassigned: int = 0
    """Times that warps pass registers to others: warp specialisation took place."""
    overlapped: int = 0
    """Exponentials of the loop that stand where a matrix product is under way; counted on sm_90 only."""


def cases(targets: Iterable[str] = (*TARGETS, *SMALL_TARGETS)) -> Iterator[Case]:
    """The default configuration of every kernel, target and padded head dim, for blocks of 128."""
    for target, kernel, head_dim in product(targets, KERNELS, HEAD_DIMS):
        yield Case(target, kernel, head_dim, 128, configs(target, kernel, head_dim, 128, 128)[0])


def small_cases(targets: Iterable[str] = TARGETS) -> Iterator[Case]:
    """The kernels that only stream: they have no tiles to choose and no matrix product."""
    for target, kernel, head_dim in product(targets, ("prepare", "merge_rows"), HEAD_DIMS):
        yield Case(target, kernel, head_dim, 0, Config(0, 0, 4, 3))


def compile_all(wanted: Iterable[Case], processes: int = 2) -> list[Resources]:
    """In fresh processes: what this one has imported or set for triton does not matter."""
    with ProcessPoolExecutor(processes, get_context("spawn"), _no_interpreter) as pool:
        return list(pool.map(compile_one, wanted))


def _no_interpreter() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def compile_one(case: Case) -> Resources:
    """Compile, and read the registers and spills out of the binary (NVIDIA) or the assembly (AMD)."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as build

    amd = case.target.startswith("gfx")
    target = GPUTarget("hip", case.target, 64) if amd else GPUTarget("cuda", int(case.target[3:]), 32)
    options = {"num_warps": case.config.warps, "num_stages": case.config.stages}
    built = build(_source(case), target=target, options=options)
    shared, warps = built.metadata.shared, built.metadata.num_warps
    if amd:
        text = built.asm["amdgcn"]
        found = re.findall(r"\.(\w+_count|private_segment_fixed_size):\s+(\d+)", text)
        count = {key: int(value) for key, value in found}
        registers = count["vgpr_count"]  # of both kinds
        spills = count["vgpr_spill_count"] + count["sgpr_spill_count"] + count["private_segment_fixed_size"]
        limits = _resident_amd(registers, shared, warps)
        return Resources(registers, shared, spills, *limits, text.count(INSTRUCTION[case.target]))
    text, count = built.asm["ptx"], _usage(built.asm["cubin"])
    registers, spills = count["REG"], count["STACK"] + count["LOCAL"]
    matrix = text.count(INSTRUCTION[case.target])
    if min(case.config.bq, case.config.bk) < 64:  # too small for the matrix unit that many warps share
        matrix += text.count("mma.sync")
    return Resources(
        registers,
        shared,
        spills,
        *_resident_nvidia(case.target, registers, shared, warps, built.metadata.tmem_size),
        matrix,
        bulk=text.count("cp.async.bulk.tensor"),
        copies=len(re.findall(r"cp\.async\.c[ag]", text)),
        scratch=built.metadata.global_scratch_size,
        reassigned=text.count("setmaxnreg"),
        overlapped=overlapped(_disassembled(built.asm["cubin"])) if case.config.early else 0,
    )


def _source(case: Case) -> Any:
    """What a launch would hand to the compiler: aligned pointers, strides in units of 8 numbers."""
    from triton.compiler import ASTSource

    room = {"forward": "forward", "merge_rows": "merge"}.get(case.kernel, "backward")
    kernel = getattr(import_module(f"weft.run.kernels.triton_{room}"), case.kernel)
    config, tma = case.config, case.kernel == "forward" and case.target in TMA_TARGETS
    constants: dict[Any, int] = {
        "UNIT": 8, "D": case.head_dim, "DPAD": padded(case.head_dim), "GROUP": case.group,
        "BLOCK_Q": case.block, "BLOCK_K": case.block, "DENSE": case.dense, "ADD": case.add,
        "EVEN": case.even, "TMA": tma, "BQ": config.bq, "BK": config.bk,
        "EARLY": config.early, "SPECIALIZE": config.specialize,
        "ROWS": 32, "NARROW": True, "WIDTH": case.head_dim, "FRESH": not case.add,
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif tma and name in ("q", "k", "v"):
            rows = config.bq if name == "q" else config.bk
            signature[name] = f"tensordesc<{case.dtype}[1, 1, {rows}, {constants['DPAD']}]>"
        elif name.endswith("_strides"):
            signature[name] = ("i32", "i32", "i32" if name != "lse_strides" else "constexpr")
            if "UNIT" not in constants:
                attributes |= {(place, axis): [["tt.divisibility", 16]] for axis in range(3)}
        else:
            signature[name] = _INTEGERS.get(name, f"*{case.dtype}" if name in _SIXTEEN else "*fp32")
            if signature[name].startswith("*"):
                attributes[place,] = [["tt.divisibility", 16]]
    if "lse_strides" in signature:  # rows of lse lie side by side
        place = kernel.arg_names.index("lse_strides")
        constants[place, 2] = 1
        attributes.pop((place, 2), None)
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def overlapped(sass: str) -> int:
    """Exponentials that stand in the loop between the issue of a group of products and the wait for it.

    The order of instructions says nothing about speed: it guards what one compiler made of one configuration.
    """
    lines = sass.splitlines()
    labels = {match[1]: at for at, line in enumerate(lines) if (match := re.match(r"\s*(\.L_x_\d+):", line))}
    jumps = [(labels.get(match[1]), at) for at, line in enumerate(lines) if (match := _JUMP.search(line))]
    bodies = [lines[start:end] for start, end in jumps if start is not None and start < end]
    # Jumps back at the end of the kernel make loops that are none: the shortest with most of the work is it.
    work = [sum("MUFU.EX2" in line for line in body) for body in bodies]
    loops = [body for body, count in zip(bodies, work, strict=True) if count and count > max(work) // 2]
    body = min(loops, key=len, default=[])
    pending, found = 0, 0
    for at, line in enumerate(body * 2):  # what a step leaves open is open where the next one begins
        if "HGMMA" in line and "gsb0" in line:
            pending += 1
        elif wait := _WAIT.search(line):
            pending = min(pending, int(wait[1], 16))
        elif "MUFU.EX2" in line and pending and at >= len(body):
            found += 1
    return found


_JUMP = re.compile(r"BRA.*`\((\.L_x_\d+)\)")
_WAIT = re.compile(r"DEPBAR\.LE gsb0, (0x[0-9a-f]+)")


def _disassembled(cubin: bytes) -> str:
    return _read("nvdisasm", cubin, "-c")


def _usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL: a kernel with neither stack nor local memory has spilled nothing."""
    text = _read("cuobjdump", cubin, "--dump-resource-usage")
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def _read(tool: str, cubin: bytes, option: str) -> str:
    """What a tool that ships with triton says of a binary."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _resident_nvidia(
    target: str, registers: int, shared: int, warps: int, columns: int | None
) -> tuple[int, int]:
    """65 536 registers, 64 warps, 512 columns of tensor memory; a program takes 1 KiB more than it says."""
    memory = {"sm_80": 164, "sm_90": 228, "sm_100": 228}.get(target, 100) * 1024
    most = 48 if target in SMALL_TARGETS else 64
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    by_columns = 512 // columns if columns else 64
    return min(by_registers, memory // (shared + 1024), most // warps, by_columns) * warps, most


def _resident_amd(registers: int, shared: int, warps: int) -> tuple[int, int]:
    """512 registers of each lane on each of 4 SIMDs, 8 wavefronts each; 64 KiB of shared memory."""
    by_registers = 4 * min(512 // (-(-registers // 8) * 8), 8) // warps
    return min(by_registers, 65536 // max(shared, 1)) * warps, 32


def table(wanted: Iterable[Case]) -> str:
    """Markdown, one line per case."""
    wanted = list(wanted)
    head = "target|kernel|D|tile|warps|stages|registers|shared KiB|spills|resident|TMA|cp.async|setmaxnreg"
    lines = [f"| {' | '.join(head.split('|'))} |", "|" + "---|" * 13]
    for case, found in zip(wanted, compile_all(wanted), strict=True):
        config = case.config
        how = " early" * config.early + " specialized" * config.specialize
        cells = [
            case.target, case.kernel, case.head_dim, f"{config.bq}x{config.bk}{how}", config.warps,
            config.stages, found.registers, f"{found.shared / 1024:.1f}", found.spills,
            f"{found.resident}/{found.of}", found.bulk, found.copies, found.reassigned,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines)


def main(path: str) -> None:
    """Put the table between the marks of a file."""
    file = Path(path)
    before, _, rest = file.read_text().partition(_MARKS[0])
    _, _, after = rest.partition(_MARKS[1])
    file.write_text(f"{before}{_MARKS[0]}\n{table(cases())}\n{_MARKS[1]}{after}")


if __name__ == "__main__":
    main(sys.argv[1])
