"""Process groups: made by all that NCCL needs for them, as few as can be, on high-priority streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from weft.diffusers.guidance import Halves
from weft.run import groups
from weft.run.spawn.pool import Pool
from weft.serve.assignment import groups as groups_of_tasks

Worlds = Callable[[int], Pool]


class FakeGroup:
    def __init__(self, ranks: tuple[int, ...], own: int, device_id: object) -> None:
        self.ranks, self.own, self.bound_device_id = ranks, own, device_id

    def rank(self) -> int:
        return self.ranks.index(self.own)

    def size(self) -> int:
        return len(self.ranks)


class FakeDist:
    """torch.distributed with NCCL's rules for who takes part, with threads as ranks. Who waits alone fails.

    With `device_id`, a new group splits the world's communicator: all ranks of the world must come.
    """

    def __init__(self, size: int, device_id: object) -> None:
        self.size, self.device_id = size, device_id
        self.local = threading.local()
        self.meetings: dict[Any, threading.Barrier] = {}
        self.lock = threading.Lock()
        self.communicators: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in range(size)}
        self.priorities: list[bool] = []
        self.group = self
        self.ProcessGroupNCCL = SimpleNamespace(Options=SimpleNamespace)
        self.distributed_c10d = SimpleNamespace(_world=SimpleNamespace(pg_map=self))

    def __getitem__(self, group: FakeGroup) -> tuple[str, None]:
        del group
        return "cpu:gloo,cuda:nccl", None

    @property
    def WORLD(self) -> FakeGroup:  # noqa: N802 - as torch has it
        return self.local.world

    def get_process_group_ranks(self, group: FakeGroup) -> list[int]:
        return list(group.ranks)

    def new_group(
        self,
        ranks: list[int],
        *,
        use_local_synchronization: bool = False,
        sort_ranks: bool = True,
        pg_options: Any = None,
    ) -> FakeGroup | None:
        assert sort_ranks is not use_local_synchronization
        own, members = self.local.rank, tuple(ranks)
        self.priorities.append(pg_options.is_high_priority_stream)
        if use_local_synchronization and own not in members:
            return None
        whole = tuple(range(self.size))
        self.meet("new", members, members if use_local_synchronization and not self.device_id else whole)
        return self.made(members) if own in members else None

    def split_group(self, parent: FakeGroup, parts: list[list[int]]) -> FakeGroup:
        assert self.device_id, "No device associated with the default pg"
        self.meet("split", tuple(map(tuple, parts)), parent.ranks)
        part = next(part for part in parts if parent.rank() in part)
        return self.made(tuple(parent.ranks[rank] for rank in part))

    def made(self, members: tuple[int, ...]) -> FakeGroup:
        self.communicators[self.local.rank] += [members] if len(members) > 1 else []
        return FakeGroup(members, self.local.rank, self.device_id)

    def meet(self, way: str, what: Any, ranks: tuple[int, ...]) -> None:
        with self.lock:
            barrier = self.meetings.setdefault((way, what, ranks), threading.Barrier(len(ranks)))
        barrier.wait(5.0)

    def run(self, job: Callable[[], Any]) -> list[Any]:
        def rank(own: int) -> Any:
            self.local.rank, self.local.world = own, FakeGroup(tuple(range(self.size)), own, self.device_id)
            self.local.made = {}
            return job()

        class Made:
            """Each rank has its own, as processes do."""

            def get(_, key: Any) -> Any:  # noqa: N805
                return self.local.made.get(key)

            def __setitem__(_, key: Any, group: Any) -> None:  # noqa: N805
                self.local.made[key] = group

            def setdefault(_, key: Any, group: Any) -> Any:  # noqa: N805
                return self.local.made.setdefault(key, group)

        with (
            patch.object(groups, "dist", self),
            patch.object(groups, "_by_ranks", Made()),
            ThreadPoolExecutor(self.size) as pool,
        ):
            return list(pool.map(rank, range(self.size), timeout=60.0))


@pytest.mark.parametrize("device_id", [None, "cuda:0"])
def test_halves_of_some_ranks_need_no_others(device_id: object) -> None:
    """Only ranks 2 to 5 of 8 make halves, as on a user's sub-mesh."""
    fake = FakeDist(8, device_id)

    def job() -> Any:
        group: Any = groups.new_group((2, 3, 4, 5))
        return None if group is None else Halves.of(group)

    halves = fake.run(job)
    assert [halves[rank].half.ranks for rank in (2, 3, 4, 5)] == [(2, 3), (2, 3), (4, 5), (4, 5)]
    assert [halves[rank].pair.ranks for rank in (2, 3, 4, 5)] == [(2, 4), (3, 5), (2, 4), (3, 5)]
    assert [halves[rank].branch for rank in (2, 3, 4, 5)] == [0, 0, 1, 1]
    assert halves[:2] == halves[6:] == [None, None]


@pytest.mark.parametrize("device_id", [None, "cuda:0"])
def test_a_server_of_eight_makes_few_communicators(device_id: object) -> None:
    fake = FakeDist(8, device_id)

    def job() -> None:
        for ranks in groups_of_tasks(8):
            group: Any = groups.new_group(ranks)
            if group is not None and len(ranks) % 2 == 0:
                Halves.of(group)

    fake.run(job)
    most = max(len(made) for made in fake.communicators.values())
    assert most == (6 if device_id else 4)  # and the world's: pairs of 8 and of 4, groups of 4 and of 2
    assert fake.priorities and all(fake.priorities)


def test_weft_s_world_communicates_on_streams_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    fake = FakeDist(2, None)
    fake.init_process_group = lambda backend, **how: calls.append((backend, how))  # type: ignore[attr-defined]
    monkeypatch.setattr(groups, "dist", fake)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    groups.join_world(store="store")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    groups.join_world()
    (gpu, how), (cpu, plain) = calls
    assert (gpu, how["store"], how["pg_options"].is_high_priority_stream) == (
        "cpu:gloo,cuda:nccl",
        "store",
        True,
    )
    assert (cpu, plain["pg_options"]) == ("gloo", None)


@pytest.mark.parametrize(("high", "environment", "lines"), [(True, "0", 0), (False, "1", 0), (False, "0", 1)])
def test_a_user_s_group_of_normal_priority_is_logged(
    high: bool,
    environment: str,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", environment)
    backend = SimpleNamespace(options=SimpleNamespace(is_high_priority_stream=high))
    group: Any = SimpleNamespace(_get_backend=lambda _: backend, group_name="7")
    with caplog.at_level("INFO", "weft.run"):
        groups.note_priority(group, torch.device("cuda"))
    assert [("group 7" in line, "set TORCH_NCCL_HIGH_PRIORITY=1" in line) for line in caplog.messages] == [
        (True, True)
    ] * lines


def halves() -> tuple[Any, ...]:
    """On real ranks: half and pair of the world, and of a group of two that shares one of them."""
    world: Any = dist.group.WORLD
    first = Halves.of(world)
    others = groups.new_group((0, 1)), groups.new_group((2, 3))  # of the same ranks, and not in their place
    again = groups.split(world, [(0, 1), (2, 3)])
    both = groups.new_group((0, 1)), groups.new_group((2, 3))
    own = both[world.rank() // 2]
    assert own is not None
    pair = Halves.of(own).pair
    return (
        first.branch,
        dist.get_process_group_ranks(first.half),
        dist.get_process_group_ranks(first.pair),
        again is first.half and again not in others,
        pair is own,
    )


def test_groups_of_the_same_ranks_are_one(worlds: Worlds) -> None:
    assert worlds(4).run(halves) == [
        (rank // 2, [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2], True, True)
        for rank in range(4)
    ]
