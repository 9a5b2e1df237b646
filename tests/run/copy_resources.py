"""Cross-compile the kernel of fused copies with the constants that real copies have, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from tests.run.triton_resources import _no_interpreter, _usage
from weft.program.slots import Slot
from weft.run.copies import ATTENTION, SegmentMoves
from weft.run.fused import FusedCopier, FusedCopy, PreparedLaunch

KINDS = ("move", "cast", "move and cast", "add", "odd address")
WHOLE = slice(0, 4), slice(0, 100)


class Made(NamedTuple):
    """What the compiler made of one copy for one target."""

    spills: int
    accesses: list[str]
    """Loads and stores of global memory in the assembly."""
    assembly: str


def table_of(kind: str) -> PreparedLaunch:
    """The table and the constants of a copy of [1, 4, 100, 128]."""
    narrow, wide = (torch.zeros(1, 4, 100, 128, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    odd = torch.zeros(4 * 100 * 128 + 1, dtype=torch.bfloat16)[1:].view(narrow.shape)
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {
        "move": [(narrow, narrow)],
        "cast": [(wide, narrow)],
        "move and cast": [(narrow, narrow), (wide, narrow)],
        "add": [(narrow, wide)],
        "odd address": [(odd, narrow)],
    }
    slots = [tuple(Slot(str(x.dtype), "input", 0, shape=(1, *x.shape)) for x in pair) for pair in pairs[kind]]
    copier = FusedCopier(ATTENTION, torch.device("cpu"), {}, SegmentMoves())
    copy = FusedCopy(copier, [(a, b, WHOLE, WHOLE) for a, b in slots], add=kind == "add")
    bases = [x for pair in pairs[kind] for x in pair]
    return copy._table(bases, tuple(x.data_ptr() for x in bases))


def compile_copies(wanted: Iterable[tuple[str, str]]) -> list[Made]:
    """(target, kind): in fresh processes, which interpret nothing."""
    with ProcessPoolExecutor(2, get_context("spawn"), _no_interpreter) as pool:
        return list(pool.map(_compile, wanted))


def _compile(case: tuple[str, str]) -> Made:
    """Compile what a launch would, by its own path: only the driver is another."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    name, kind = case
    amd = name.startswith("gfx")
    target = GPUTarget("hip", name, 64) if amd else GPUTarget("cuda", int(name[3:]), 32)
    facts = {"target": target, "device": case, "stream": 0}
    driver.set_active(
        SimpleNamespace(**{f"get_current_{name}": lambda *_, fact=fact: fact for name, fact in facts.items()})
    )
    table = table_of(kind)
    addresses = tuple(0x7F0000001000 * (1 + i) for i in range(0 if kind == "move" else 3))
    built = table.kernel.warmup(table.boxes, table.tiles, addresses, grid=(1,), **table.constants)
    if amd:
        text = built.asm["amdgcn"]
        found = re.findall(r"\.(?:\w+_spill_count|private_segment_fixed_size):\s+(\d+)", text)
        return Made(
            sum(map(int, found)), re.findall(r"(?:global|flat|buffer)_(?:load|store)_\w+", text), text
        )
    text, used = built.asm["ptx"], _usage(built.asm["cubin"])
    return Made(used["STACK"] + used["LOCAL"], re.findall(r"(?:ld|st)\.global\S*", text), text)
