"""What ranks are told to do, and what their words change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.serve.ranks import FACTS
from weft.core.topology import Topology
from weft.serve.disk import Disk
from weft.serve.dispatch import Dispatch
from weft.serve.jobs import Asked, Failure, Job
from weft.serve.latency import Latency
from weft.serve.store import Store
from weft.serve.tasks import Grant, Task


class Desk:
    """A dispatch of two ranks whose policy says what a test wants it to."""

    def __init__(self, folder: Path) -> None:
        self.store, self.sent = Store(folder), list[tuple[int, str]]()
        self.wanted: list[tuple[int, ...]] = []
        disk = Disk(folder / "jobs", quota=2**20)
        self.dispatch = Dispatch(2, self.policy, self.store, disk, self.send, lambda *_, **__: None, keep=60)
        self.dispatch.latency = Latency(FACTS, Topology.local(2))

    def policy(self, tasks: Sequence[Task], *_: Any) -> list[Grant]:
        tasks = sorted(tasks, key=lambda task: task.arrived)
        return [Grant((task.id,), ranks) for task, ranks in zip(tasks, self.wanted, strict=False) if ranks]

    def send(self, number: int, said: dict[str, Any], blob: bytes = b"") -> None:  # noqa: ARG002
        self.sent.append((number, said["do"]))

    def add(self, image: str | None = None) -> Job:
        asked = Asked(
            kind="video", model="toy", prompt="a loom", seed=0, format="mp4", frames=16, height=64, width=64,
            steps=10, image=image,
        )  # fmt: skip
        job = self.store.create(asked, deadline=time.time() + 60)
        self.dispatch.add(job)
        return job

    def want(self, *ranks: tuple[int, ...]) -> list[tuple[int, str]]:
        """What is sent when the policy gives the jobs these."""
        self.wanted = list(ranks)
        self.sent.clear()
        self.dispatch.schedule()
        return self.sent

    def hear(self, batch: Job, told: str, blob: bytes = b"", **more: Any) -> None:
        self.dispatch.hear({"told": told, "batch": batch.id, "seconds": 0.1, **more}, blob)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.store.close()


def test_a_late_word_of_lost_ranks_changes_nothing(desk: Desk) -> None:
    job = desk.add()
    desk.want((0,))
    desk.hear(job, "step", b"state", step=3)
    desk.hear(job, "step", step=4)
    assert desk.dispatch.batches[job.id].step == 4
    desk.dispatch.lost()
    desk.hear(job, "step", step=5)
    assert desk.dispatch.batches[job.id].step == 3, "what was saved last"


def test_who_was_to_stop_and_no_longer_is_goes_on(desk: Desk) -> None:
    job = desk.add()
    assert desk.want((0, 1)) == [(0, "run"), (1, "run")]
    assert desk.want((0,)) == [(0, "stop")]
    assert desk.want((0,)) == [], "once is enough"
    assert desk.want((0, 1)) == [(0, "go")]
    desk.hear(job, "stopped", b"state", step=1)  # that word came too late
    assert desk.want((0, 1)) == [(0, "run"), (1, "run")]


def test_while_the_leader_writes_the_file_all_its_ranks_are_free(desk: Desk) -> None:
    first, _ = desk.add(), desk.add()
    desk.want((0, 1))
    desk.hear(first, "decoded")
    assert desk.want((0, 1)) == [(0, "run"), (1, "run")]
    desk.hear(first, "made", b"data", job=first.id, name="video.mp4", timings={"denoise": 1.0})
    desk.hear(first, "done")
    made = desk.store.get(first.id)
    assert made is not None
    assert made.status == "completed"
    assert desk.want((0, 1)) == []


def test_who_is_lost_while_it_writes_its_file_is_made_again(desk: Desk) -> None:
    first, second = desk.add(), desk.add()
    desk.want((0,))
    desk.hear(first, "step", b"state", step=9)
    desk.hear(first, "decoded")
    desk.want((0,))
    desk.dispatch.lost()
    assert {task.id: task.left for task in desk.dispatch.tasks()} == {first.id: 1, second.id: 10}
    assert desk.want((0,), (1,)) == [(0, "run"), (1, "run")]


def test_a_file_that_is_written_for_ever_is_stuck(desk: Desk) -> None:
    job = desk.add()
    desk.want((1,))
    desk.hear(job, "decoded")
    assert desk.dispatch.stuck() is None
    desk.dispatch.batches[job.id].sign -= 1000
    assert desk.dispatch.stuck() == (1, job.id)


def test_one_deleted_while_its_file_is_written_is_forgotten(desk: Desk) -> None:
    job = desk.add()
    desk.want((0,))
    desk.hear(job, "decoded")
    desk.dispatch.drop(job.id)
    desk.hear(job, "made", b"data", job=job.id, name="video.mp4", timings={})
    desk.hear(job, "done")
    assert not desk.dispatch.batches


def test_a_job_without_its_picture_fails_and_keeps_no_ranks(desk: Desk) -> None:
    job, _ = desk.add(image="reference.png"), desk.add()
    assert desk.want((0,), (1,)) == [(1, "run")]
    failed = desk.store.get(job.id)
    assert failed is not None and failed.failure is not None
    assert "picture" in failed.failure.message
    assert job.id not in desk.dispatch.batches


def test_the_result_of_a_job_that_was_cancelled_takes_no_room(desk: Desk) -> None:
    job = desk.add()
    desk.want((0,))
    desk.store.fail(job.id, Failure(code="cancelled", message=""))
    desk.hear(job, "made", b"data", job=job.id, name="video.mp4", timings={"denoise": 1.0})
    assert desk.dispatch.disk.used() == 0


def test_a_decoder_has_the_time_that_it_takes(desk: Desk) -> None:
    job = desk.add()
    desk.want((0,))
    assert desk.dispatch.latency is not None
    batch = desk.dispatch.batches[job.id]
    batch.sign = time.monotonic() - 100
    assert desk.dispatch.stuck() == (0, job.id)
    desk.dispatch.latency.observe_fixed(batch.shape, 90.0)
    assert desk.dispatch.stuck() is None
