"""Which transport a world takes, and what is left of it when its group ends."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.threads import ThreadComm, run_threads
from weft.core.topology import Topology
from weft.run import transport, world
from weft.run.comm import shm, symmetric
from weft.run.comm.group import GroupComm
from weft.run.comm.onesided import OneSidedComm
from weft.run.comm.window import Window

GROUP: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def measured(transport: str) -> None:
        path = tmp_path / "topology.toml"
        path.write_text(Topology(transport=transport).to_toml())
        monkeypatch.setenv("WEFT_TOPOLOGY", str(path))

    monkeypatch.delenv("WEFT_TRANSPORT", raising=False)
    return measured


@pytest.mark.parametrize(
    ("faster", "setting", "expected"),
    [
        ("", "auto", "shm"),
        ("group", "auto", "shm"),
        ("symmetric", "auto", "symmetric"),
        ("symmetric", "group", "group"),
        ("symmetric", "shm", "shm"),
        ("group", "symmetric", "symmetric"),
    ],
)
def test_auto_takes_what_was_measured_faster(
    faster: str, setting: str, expected: str, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(faster)
    monkeypatch.setenv("WEFT_TRANSPORT", setting)
    comm = transport.connect(GROUP, 1.0)
    assert comm.transport == expected
    assert isinstance(comm, GroupComm if expected == "group" else OneSidedComm)
    assert getattr(comm, "_strict", False) == (setting not in ("auto", "group"))


def test_ranks_without_symmetric_memory_go_on_as_by_default_and_say_why(
    measured: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured("symmetric")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def job(base: ThreadComm) -> tuple[bool, bool]:
        comm: Any = transport.connect(GROUP, 1.0)
        comm.base = base
        lender = comm.begin(torch.device("cpu"))
        return isinstance(comm.window, shm.ShmWindow), lender.lands

    with caplog.at_level(logging.WARNING, "weft.run"):
        assert run_threads(2, job) == [(True, False)] * 2
    expected = "No symmetric memory, which WEFT_TOPOLOGY requests: symmetric memory needs a GPU."
    assert [record.getMessage() for record in caplog.records] == [expected] * 2


def test_a_rendezvous_by_all_ranks_is_taken(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured("symmetric")
    window: Any = SimpleNamespace(near=frozenset({1}))
    monkeypatch.setattr(symmetric, "rendezvous", lambda *_: (window, ""))
    comm: Any = transport.connect(GROUP, 1.0)
    assert comm._rendezvous(comm.base) == (window, "")


class Closing(Window):
    """A window that counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_the_memory_of_a_group_that_has_ended_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, other = (dist.ProcessGroup(0, 1) for _ in range(2))  # pyright: ignore[reportCallIssue]
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, other, ("gloo", None))  # type: ignore[arg-type]
    windows: list[Any] = []
    for group in (ended, other):
        comm: Any = transport.connect(GROUP, 1.0)
        comm.window = Closing()  # type: ignore[abstract]
        windows.append(comm.window)
        monkeypatch.setitem(world._worlds, group, {1.0: world.World(comm)})
    monkeypatch.setattr(transport, "connect", lambda *_: world.LocalComm())
    world.world_of(other, 2.0)
    assert [window.closed for window in windows] == [1, 0]
    assert ended not in world._worlds and set(world._worlds[other]) == {1.0, 2.0}
