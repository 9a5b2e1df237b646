"""Streams and events of a device: the only module that uses those of torch.cuda.

On devices without streams (CPUs, meta and fake tensors) work is done in the order of the calls: the stream is
number 0, nothing is captured, and an event has passed when it is recorded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from typing import Protocol, cast

import torch

THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal: captures of other threads do not restrict this one."""
CYCLES_PER_SECOND = 2e9
"""Of a fast GPU; slower ones have 1e9."""


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it; never waits."""
        ...

    def synchronize(self) -> None:
        """Block the host until the stream has passed it."""
        ...

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`, both recorded with `timing`."""
        ...


def has_streams(device: torch.device) -> bool:
    # A fake tensor may be on a device that this process has never touched.
    return device.type == "cuda" and torch.cuda.is_initialized()


def current(device: torch.device) -> int:
    """Return the number of the stream that work on a device is queued on now."""
    return torch.cuda.current_stream(device).cuda_stream if has_streams(device) else 0


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured, so that work is recorded and not executed."""
    return has_streams(device) and torch.cuda.is_current_stream_capturing()


def record(device: torch.device, *, timing: bool = False) -> Event:
    """Return a new event behind all that is queued on the current stream."""
    if not has_streams(device):
        return _PASSED
    event = torch.cuda.Event(enable_timing=timing)
    event.record(torch.cuda.current_stream(device))
    return cast("Event", event)


def delay(device: torch.device, seconds: float) -> None:
    """Keep the current stream busy for about as long, up to twice that, while the host queues work."""
    if has_streams(device):
        with torch.cuda.device(device):
            torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]


def side(device: torch.device, purpose: str) -> torch.cuda.Stream | None:
    """Return the stream of a device for one purpose, of high priority; None where there are no streams."""
    if not has_streams(device):
        return None
    key = device, purpose
    if key not in _sides:  # torch reuses few streams: share one for each purpose
        _sides[key] = torch.cuda.Stream(device, priority=-1)
    return _sides[key]


@contextmanager
def on(stream: torch.cuda.Stream | None) -> Generator[None, None, None]:
    """Queue work on another stream."""
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        yield


def wait(device: torch.device, event: Event) -> None:
    """Order the current stream behind an event; the host goes on."""
    if has_streams(device):
        torch.cuda.current_stream(device).wait_event(cast("torch.cuda.Event", event))


def copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the current stream: between two GPUs by a copy engine, if both are contiguous."""
    into.copy_(source, non_blocking=True)


def ignore_captures() -> None:
    """Let this thread query events while another one captures; by default that fails the capture."""
    if torch.version.hip:
        library, function = "libamdhip64.so", "hipThreadExchangeStreamCaptureMode"
    else:
        major = (torch.version.cuda or "").split(".")[0]
        library, function = f"libcudart.so.{major}", "cudaThreadExchangeStreamCaptureMode"
    # The library that torch has loaded. Without it there is no stream to capture.
    with suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(library), function)(ctypes.byref(ctypes.c_int(THREAD_LOCAL)))


class _Passed:
    """The event of work that is done when its call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        del end_event
        return 0.0


_PASSED = _Passed()
_sides: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
