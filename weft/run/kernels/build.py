"""How the C kernel is compiled: each direction once for every instruction set of this kind of machine."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from weft.run.build import Library

SOURCES = Path(__file__).parent / "csrc"
# Strict IEEE order except for contraction: -ffast-math would undo the rounding trick of 2^x.
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-std=gnu11"]
# Lanes of one vector, and the flags that allow them, by instruction set.
ISAS = {
    "avx512": ["-DW=16", "-mavx512f", "-mavx2", "-mfma"],
    "avx2": ["-DW=8", "-mavx2", "-mfma"],
    "base": ["-DW=4"],
}


@cache
def library_path() -> Path:
    """The shared library, built if it is not in the cache yet."""
    isas = ISAS if platform.machine() in ("x86_64", "AMD64") else {"base": ISAS["base"]}
    units: list[tuple[str, tuple[str, ...]]] = [("dispatch.c", ("-O2",))]
    for isa, flags in isas.items():
        for name in ("forward", "backward"):
            units.append((f"{name}.c", (*FLAGS, *flags, f"-DISA={isa}")))
    what, instead = "The compiled CPU kernel", "impl='sdpa'"
    return Library("attend", SOURCES, tuple(units), what, instead).path()
