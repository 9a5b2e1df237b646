"""Bindings of csrc/signals.c: lines, counters and doorbells in memory that processes share."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from weft.run.build import Library

LINE_BYTES = 64
LINE_WORDS = 7
Line = ctypes.c_int64 * LINE_WORDS

_LIBRARY = Library(
    "signals",
    Path(__file__).parent / "csrc",
    (("signals.c", ("-O2", "-std=gnu11", "-Wall", "-Werror")),),
    "Shared memory between ranks",
    "transport='group' (WEFT_TRANSPORT=group)",
)


@cache
def library() -> Any:
    c = ctypes.CDLL(str(_LIBRARY.path()))
    address, number = ctypes.c_void_p, ctypes.c_uint64
    c.weft_write.argtypes = c.weft_read.argtypes = [address, number, Line]
    c.weft_set.argtypes = [address, number]
    c.weft_get.argtypes, c.weft_get.restype = [address], number
    c.weft_rung.argtypes, c.weft_rung.restype = [address], ctypes.c_uint32
    c.weft_ring.argtypes = [address]
    c.weft_sleep.argtypes = [address, ctypes.c_uint32, ctypes.c_int64]
    for name in ("weft_write", "weft_set", "weft_ring", "weft_sleep"):
        getattr(c, name).restype = None
    return c
