"""The stopwatch on a GPU, with a stand-in for its stream: work is queued by the host and done in order."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.run import streams
from weft.run.measure.stopwatch import device_seconds, launch_seconds, lowest_eighth

GPU = torch.device("cuda", 0)


class Stream:
    """A device that takes what it is told; the host takes its own time to tell it."""

    def __init__(self, launch: float, work: list[float]) -> None:
        self.launch, self.work = launch, work
        self.host = self.device = 0.0
        self.calls = 0

    def call(self) -> None:
        self.host += self.launch
        self.device = max(self.device, self.host) + self.work[self.calls % len(self.work)]
        self.calls += 1

    def delay(self, _: torch.device, seconds: float) -> None:
        self.device = max(self.device, self.host) + seconds

    def record(self, _: torch.device, *, timing: bool = False) -> Any:
        at = max(self.device, self.host)

        def wait() -> None:
            self.host = max(self.host, at)

        return SimpleNamespace(at=at, synchronize=wait, elapsed_time=lambda end: (end.at - at) * 1e3 * timing)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(streams, "has_streams", lambda _: True)
        patch.setattr(streams, "delay", self.delay)
        patch.setattr(streams, "record", self.record)
        patch.setattr(time, "perf_counter", lambda: self.host)


@pytest.mark.parametrize("launch", [1e-6, 50e-6])
def test_device_time_does_not_count_the_host(launch: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where launching takes longer than computing: the device gets a head start."""
    stream = Stream(launch, [5e-6])
    stream.install(monkeypatch)
    assert device_seconds(stream.call, GPU, 7) == pytest.approx([5e-6] * 7)


def test_what_warms_up_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(1e-6, [9.0, 9.0, 9.0, 9.0, *[1e-6] * 5])
    stream.install(monkeypatch)
    assert device_seconds(stream.call, GPU, 5) == pytest.approx([1e-6] * 5)
    assert stream.calls == 9  # the same on all ranks


def test_host_time_does_not_count_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(20e-6, [1e-6])
    stream.install(monkeypatch)
    assert launch_seconds(stream.call, GPU, 10) == pytest.approx(20e-6)


def test_on_a_cpu_calls_are_the_work() -> None:
    taken = device_seconds(lambda: time.sleep(0.002), torch.device("cpu"), 3)
    assert len(taken) == 3 and min(taken) >= 0.002


def test_the_lowest_eighth() -> None:
    assert lowest_eighth([float(n) for n in range(1, 10)]) == 2
    assert lowest_eighth([1e-6, 1.0]) > 0, "never below the least of them"
