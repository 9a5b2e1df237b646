"""What ranks are told to do, and what their words change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from tests.serve.ranks import FACTS
from weft.core.errors import InputError
from weft.core.topology import Topology
from weft.serve import watchdog
from weft.serve.admission import Admission
from weft.serve.assignment import RankAssignment
from weft.serve.batch import Batch
from weft.serve.disk import Disk
from weft.serve.dispatch import Dispatch
from weft.serve.job_store import JobStore
from weft.serve.jobs import GenerationParams, Job, JobFailure
from weft.serve.latency import Latency
from weft.serve.messages import (
    BatchDecoded,
    BatchDone,
    BatchMessage,
    BatchStopped,
    ContinueBatch,
    ResultMade,
    RunBatch,
    StepDone,
    StopBatch,
    ToRank,
)
from weft.serve.watchdog import overdue

COMMANDS = {RunBatch: "run", StopBatch: "stop", ContinueBatch: "go"}


class Desk:
    """A dispatch of two ranks whose policy says what a test wants it to."""

    def __init__(self, folder: Path) -> None:
        self.store, self.sent = JobStore(folder), list[tuple[int, str]]()
        self.wanted: list[tuple[int, ...]] = []
        disk = Disk(folder / "jobs", quota=2**20)
        self.dispatch = Dispatch(2, self.policy, self.store, disk, self.send, lambda _: None, keep=60)
        self.dispatch.admission = Admission(Latency(FACTS, Topology.local(2)), max_step=inf)

    def policy(self, batches: Sequence[Batch], *_: Any) -> list[RankAssignment]:
        batches = sorted(batches, key=lambda batch: batch.arrived)
        both = zip(batches, self.wanted, strict=False)
        return [RankAssignment((batch.id,), ranks) for batch, ranks in both if ranks]

    def send(self, ranks: Sequence[int], message: ToRank) -> None:
        self.sent += [(number, COMMANDS[type(message)]) for number in ranks]

    def add(self, image: str | None = None) -> Job:
        params = GenerationParams(
            kind="video", model="toy", prompt="a loom", seed=0, format="mp4", frames=16, height=64, width=64,
            steps=10, image=image,
        )  # fmt: skip
        job = self.store.create(params, deadline=time.time() + 60)
        self.dispatch.add(job)
        return job

    def want(self, *ranks: tuple[int, ...]) -> list[tuple[int, str]]:
        """What is sent when the policy gives the jobs these."""
        self.wanted = list(ranks)
        self.sent.clear()
        self.dispatch.schedule()
        return self.sent

    def step(self, job: Job, step: int, state: bytes = b"") -> None:
        self.hear(StepDone(batch=job.id, step=step, seconds=0.1, state=state))

    def made(self, job: Job, **timings: float) -> None:
        self.hear(
            ResultMade(batch=job.id, job=job.id, name="video.mp4", timings=timings, data=b"data"),
        )

    def hear(self, message: BatchMessage) -> None:
        self.dispatch.on_message(message)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.store.close()


def test_a_late_word_of_lost_ranks_changes_nothing(desk: Desk) -> None:
    job = desk.add()
    desk.want((0,))
    desk.step(job, 3, b"state")
    desk.step(job, 4)
    assert desk.dispatch.batches[job.id].step == 4
    desk.dispatch.on_ranks_lost()
    desk.step(job, 5)
    assert desk.dispatch.batches[job.id].step == 3, "what was saved last"


def test_who_was_to_stop_and_no_longer_is_goes_on(desk: Desk) -> None:
    job = desk.add()
    assert desk.want((0, 1)) == [(0, "run"), (1, "run")]
    assert desk.want((0,)) == [(0, "stop")]
    assert desk.want((0,)) == [], "once is enough"
    assert desk.want((0, 1)) == [(0, "go")]
    desk.hear(BatchStopped(batch=job.id))  # that word came too late
    assert desk.want((0, 1)) == [(0, "run"), (1, "run")]


def test_while_the_leader_writes_the_file_all_its_ranks_are_free(desk: Desk) -> None:
    first, _ = desk.add(), desk.add()
    desk.want((0, 1))
    desk.hear(BatchDecoded(batch=first.id))
    assert desk.want((0, 1)) == [(0, "run"), (1, "run")]
    desk.made(first, denoise=1.0)
    desk.hear(BatchDone(batch=first.id))
    made = desk.store.get(first.id)
    assert made is not None
    assert made.status == "completed"
    assert desk.want((0, 1)) == []


def test_who_is_lost_while_it_writes_its_file_is_made_again(desk: Desk) -> None:
    first, second = desk.add(), desk.add()
    desk.want((0,))
    desk.step(first, 9, b"state")
    desk.hear(BatchDecoded(batch=first.id))
    desk.want((0,))
    desk.dispatch.on_ranks_lost()
    assert {batch.id: batch.left for batch in desk.dispatch.schedulable()} == {first.id: 1, second.id: 10}
    assert desk.want((0,), (1,)) == [(0, "run"), (1, "run")]


def test_a_file_that_is_written_for_ever_is_stuck(desk: Desk) -> None:
    job = desk.add()
    desk.want((1,))
    desk.hear(BatchDecoded(batch=job.id))
    assert overdue(desk.dispatch) is None
    desk.dispatch.batches[job.id].last_message -= 1000
    assert overdue(desk.dispatch) == (1, f"batch {job.id} made no step", True)


def test_one_deleted_while_its_file_is_written_is_forgotten(desk: Desk) -> None:
    job = desk.add()
    desk.want((0,))
    desk.hear(BatchDecoded(batch=job.id))
    desk.dispatch.drop(job.id)
    desk.made(job)
    desk.hear(BatchDone(batch=job.id))
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
    desk.store.fail(job.id, JobFailure(code="cancelled", message=""))
    desk.made(job, denoise=1.0)
    assert desk.dispatch.disk.used() == 0


def test_a_decoder_has_the_time_that_it_takes(desk: Desk) -> None:
    job = desk.add()
    desk.want((0,))
    batch = desk.dispatch.batches[job.id]
    batch.last_message = time.monotonic() - 100
    assert overdue(desk.dispatch) == (0, f"batch {job.id} made no step", True)
    desk.dispatch.latency.observe_fixed(batch.shape, 90.0)
    assert overdue(desk.dispatch) is None


def test_ranks_of_a_cancelled_batch_are_replaced_if_its_step_ends_too_late(desk: Desk) -> None:
    job = desk.add()
    desk.want((0, 1))
    batch = desk.dispatch.batches[job.id]
    desk.dispatch.latency.observe(batch.shape, 2, 1, 60.0, steps=20)
    assert overdue(desk.dispatch) is None, "somebody waits for it"
    desk.dispatch.drop(job.id)
    late = overdue(desk.dispatch)
    assert late is not None
    assert (late[0], job.id in late[1]) == (0, True)
    batch.last_message -= 57
    assert overdue(desk.dispatch) is None, "it ends in 3 s"
    assert batch.dropped is not None
    batch.dropped -= 6
    assert overdue(desk.dispatch) is not None, "it should have ended by now"
    desk.hear(BatchStopped(batch=job.id))
    assert overdue(desk.dispatch) is None


def test_ranks_of_a_cancelled_batch_that_is_decoded_or_written(desk: Desk) -> None:
    decoded, written = desk.add(), desk.add()
    desk.want((0,), (1,))
    for job in (decoded, written):
        desk.step(job, 10)
    desk.hear(BatchDecoded(batch=written.id))
    desk.dispatch.latency.observe_fixed(desk.dispatch.batches[decoded.id].shape, 100.0)
    for job in (decoded, written):
        desk.dispatch.drop(job.id)
    late = overdue(desk.dispatch)
    assert late is not None and late[0] == 0, "who writes a file holds up nobody"


def test_jobs_are_not_blamed_for_ranks_that_the_server_replaced(desk: Desk) -> None:
    job = desk.add()
    for _ in range(5):
        desk.want((0,))
        desk.dispatch.on_ranks_lost(blamed=False)
    kept = desk.store.get(job.id)
    assert kept is not None
    assert (kept.status, kept.attempts) == ("queued", 0)
    for _ in range(3):
        desk.want((0,))
        desk.dispatch.on_ranks_lost()
    failed = desk.store.get(job.id)
    assert failed is not None and failed.failure is not None
    assert failed.failure.code == "rank_lost"


def test_jobs_whose_common_step_would_be_too_long_are_made_one_by_one(desk: Desk) -> None:
    jobs = [desk.add() for _ in range(3)]
    latency = desk.dispatch.latency
    shape = jobs[0].params.shape
    for count in (1, 2, 3):
        latency.observe(shape, 2, count, float(count), steps=20)
    grant = RankAssignment(tuple(job.id for job in jobs), (0, 1))
    desk.dispatch.policy = lambda *_: [grant] if grant.batches[0] in desk.dispatch.waiting else []
    desk.dispatch.admission = Admission(latency, max_step=2.5)
    desk.dispatch.schedule()
    assert [batch.jobs for batch in desk.dispatch.batches.values()] == [[jobs[0].id, jobs[1].id]]
    assert list(desk.dispatch.waiting) == [jobs[2].id]


def test_jobs_share_a_batch_only_where_that_leaves_their_bits(desk: Desk) -> None:
    for batches, members in ((True, 2), (False, 1)):
        desk.dispatch.latency.facts = replace(FACTS, batches=batches)
        one, other = desk.add(), desk.add()
        batch = desk.dispatch._form(RankAssignment((one.id, other.id), (0,)))
        assert len(batch.members) == members
        desk.dispatch.drop(other.id)


def test_client_that_cancels_again_and_again_does_not_restart_ranks_of_others_for_ever(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_replaced() -> bool:
        job = desk.add()
        desk.want((0,), (1,))
        desk.step(job, 1, b"state")
        batch = desk.dispatch.batches[job.id]
        desk.dispatch.drop(job.id)
        assert batch.dropped is not None
        batch.dropped -= 6
        late = overdue(desk.dispatch)
        desk.hear(BatchStopped(batch=job.id))
        return late is not None

    beside = desk.add()
    desk.want((0,))
    assert sum(is_replaced() for _ in range(2 * watchdog.MAX_REPLACEMENTS)) == watchdog.MAX_REPLACEMENTS
    with monkeypatch.context() as later:
        later.setattr(watchdog, "REPLACEMENT_SECONDS", -1.0)
        assert is_replaced()
    assert not all(is_replaced() for _ in range(watchdog.MAX_REPLACEMENTS))
    desk.hear(BatchDone(batch=beside.id))
    assert is_replaced(), "nobody else has these ranks"


def test_states_that_cannot_be_saved_are_logged_once_until_one_can(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise InputError("The disk is full.", hint="Make room.")

    job, save = desk.add(), desk.dispatch.disk.save_state
    desk.want((0,))
    for step, write in enumerate((full, full, full, save, full, full), start=1):
        monkeypatch.setattr(desk.dispatch.disk, "save_state", write)
        desk.step(job, step, b"state")
    assert [record.message for record in caplog.records] == ["states are not saved"] * 2
