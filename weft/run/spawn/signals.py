"""Signals: receive them as bytes of a descriptor, name them, and end a process with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PARENT_DEATH_SIGNAL = 1  # prctl


@contextmanager
def caught_signals() -> Generator[int]:
    """Yield a descriptor that receives the number of each signal, in place of the handlers."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    handlers = {number: signal.getsignal(number) for number in CAUGHT}
    if handlers[signal.SIGHUP] is signal.SIG_IGN:  # nohup
        del handlers[signal.SIGHUP]
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        for number in handlers:
            signal.signal(number, _do_nothing)
        yield reading
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous)
        os.close(reading)
        os.close(writing)


def read_signals(descriptor: int) -> list[int]:
    with suppress(BlockingIOError):
        return [number for number in os.read(descriptor, 64) if number in CAUGHT]
    return []


def signal_name(number: int) -> str:
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")


def end_with_parent(number: int) -> None:
    """Have the kernel send a signal to this process when its parent dies (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, number)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal that `caught_signals` reports by its descriptor."""
