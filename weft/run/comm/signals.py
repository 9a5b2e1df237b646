"""The C of csrc/signals.c: lines, counters and bells in memory that processes share."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from weft.run.build import Library

LINE = 64
WORDS = 7
Words = ctypes.c_int64 * WORDS

_LIBRARY = Library(
    "signals",
    Path(__file__).parent / "csrc",
    (("signals.c", ("-O2", "-std=gnu11", "-Wall", "-Werror")),),
    "Shared memory between ranks",
    "transport='group' (WEFT_TRANSPORT=group)",
)


@cache
def library() -> Any:
    found = ctypes.CDLL(str(_LIBRARY.path()))
    at, number = ctypes.c_void_p, ctypes.c_uint64
    found.weft_write.argtypes = [at, number, Words]
    found.weft_read.argtypes = [at, number, Words]
    found.weft_set.argtypes = [at, number]
    found.weft_get.argtypes, found.weft_get.restype = [at], number
    found.weft_rung.argtypes, found.weft_rung.restype = [at], ctypes.c_uint32
    found.weft_ring.argtypes = [at]
    found.weft_sleep.argtypes = [at, ctypes.c_uint32, ctypes.c_int64]
    for name in ("weft_write", "weft_set", "weft_ring", "weft_sleep"):
        getattr(found, name).restype = None
    return found
