"""Pause Python's garbage collector while many small values without cycles are made."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Generator[None]:
    """Do not look for cycles: among a million values that have none, that would take half of the time.

    Drop what is no longer needed before the end, or the collector looks through it all the same.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
