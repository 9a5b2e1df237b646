"""The store: the state machine against a dict, races, kills, pages while jobs come and go, keys."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from tests.serve.test_jobs import params
from weft.core.errors import InputError
from weft.serve.job_store import JobStore, KeyReused
from weft.serve.jobs import Job, JobFailure, new_id

IMAGE = {"kind": "image", "frames": 1, "format": "png"}
CANCELLED = JobFailure(code="cancelled", message="Somebody \ud800 changed 'their' mind; DROP TABLE jobs;")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    store = JobStore(tmp_path)
    yield store
    store.close()


def create(store: JobStore, **more: Any) -> Job:
    return store.create(params(), deadline=1.0, **more)


class Life(RuleBasedStateMachine):
    """Any order of calls, as a dict has it."""

    ids: Bundle[str] = Bundle("ids")

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = JobStore(Path(self.folder.name))
        self.jobs: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, tuple[object, str]] = {}

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(
        target=ids,
        image=st.booleans(),
        key=st.sampled_from([None, "a", "b"]),
        body=st.sampled_from([b"", b"1"]),
    )
    def create(self, image: bool, key: str | None, body: bytes) -> str:
        said = (image, body)
        made = params(**IMAGE) if image else params()
        if key in self.keys and self.keys[key][0] != said:
            with pytest.raises(KeyReused, match="new key"):
                self.store.create(made, deadline=9.0, key=key, body=body)
            return self.keys[key][1]
        job = self.store.create(made, deadline=9.0, key=key, body=body)
        if key in self.keys:
            assert job.id == self.keys[key][1]
        else:
            assert job.id not in self.jobs
            self.jobs[job.id] = {
                "status": "queued",
                "step": 0,
                "attempts": 0,
                "failure": None,
                "output": None,
            }
            if key is not None:
                self.keys[key] = (said, job.id)
        self.same(job.id, job)
        return job.id

    def move(self, id: str, job: Job | None, *, when: tuple[str, ...], **change: Any) -> None:
        allowed = id in self.jobs and self.jobs[id]["status"] in when
        assert (job is not None) == allowed
        if job is not None:
            self.jobs[id] |= change
            self.same(id, job)

    def same(self, id: str, job: Job) -> None:
        known = {name: getattr(job, name) for name in self.jobs[id]}
        assert known == self.jobs[id]
        assert (job.completed is not None) == (not job.active)

    @rule(id=ids)
    def begin(self, id: str) -> None:
        self.move(id, self.store.begin(id), when=("queued",), status="in_progress")

    @rule(id=ids, step=st.integers(1, 7))
    def step(self, id: str, step: int) -> None:
        before = self.jobs.get(id, {"step": 0, "attempts": 0})
        change = {"step": step, "attempts": 0} if step > before["step"] else {}
        self.move(id, self.store.step(id, step, {"denoise": 0.5 * step}), when=("in_progress",), **change)

    @rule(id=ids)
    def lost(self, id: str) -> None:
        job = self.store.lost(id)
        attempts = self.jobs.get(id, {"attempts": 0})["attempts"] + 1
        change: dict[str, Any] = {"status": "queued", "attempts": attempts}
        if attempts == 3:
            assert job is None or (job.failure is not None and job.failure.code == "rank_lost")
            change |= {"status": "failed", "failure": job and job.failure}
        self.move(id, job, when=("in_progress",), **change)

    @rule(id=ids)
    def complete(self, id: str) -> None:
        job = self.store.complete(id, "video.mp4", 5, {"decode": 1.5}, 20.0)
        self.move(id, job, when=("in_progress",), status="completed", output="video.mp4", attempts=0)

    @rule(id=ids)
    def fail(self, id: str) -> None:
        job = self.store.fail(id, CANCELLED)
        self.move(id, job, when=("queued", "in_progress"), status="failed", failure=CANCELLED)

    @rule(id=ids)
    def delete(self, id: str) -> None:
        self.move(id, self.store.delete(id), when=("queued", "in_progress", "completed", "failed"))
        self.jobs.pop(id, None)
        self.keys = {key: told for key, told in self.keys.items() if told[1] != id}

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = JobStore(Path(self.folder.name))
        for job in self.jobs.values():
            job["status"] = "queued" if job["status"] == "in_progress" else job["status"]

    @invariant()
    def agree(self) -> None:
        made = [*self.store.page("video", limit=99, order="asc")[0], *self.store.page("image", limit=99)[0]]
        assert {job.id for job in made} == set(self.jobs)
        for job in made:
            self.same(job.id, job)
        active = [id for id, job in self.jobs.items() if job["status"] in ("queued", "in_progress")]
        assert [job.id for job in self.store.active()] == active
        ended = [job.id for job in self.store.expired(20.0)]
        assert set(ended) == {id for id, job in self.jobs.items() if job["status"] == "completed"}
        statuses = [job["status"] for job in self.jobs.values()]
        assert all(number == statuses.count(status) for status, number in self.store.counts().items())


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


def race(call: Callable[..., Any], *given: Any, threads: int = 2) -> list[Any]:
    together = threading.Barrier(threads)

    def runner(_: int) -> Any:
        together.wait()
        return call(*given)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(runner, range(threads)))


def test_one_of_two_threads_takes_a_transition(store: JobStore) -> None:
    def end(id: str) -> Job | None:
        return store.complete(id, "video.mp4", 1, {}, None) or store.fail(id, CANCELLED)

    for _ in range(20):
        id = create(store).id
        for call in (store.begin, end, store.delete):
            assert [job is None for job in race(call, id)].count(False) == 1


def test_threads_with_one_key_make_one_job(store: JobStore) -> None:
    jobs = race(lambda: create(store, key="k", body=b"same"), threads=4)
    assert len({job.id for job in jobs}) == 1
    assert store.counts()["queued"] == 1


CREATING = """
import sys
from pathlib import Path
from tests.serve.test_jobs import params
from weft.serve.job_store import JobStore
store = JobStore(Path(sys.argv[1]))
for number in range(10**6):
    job = store.create(params(prompt=str(number)), deadline=1.0, key=str(number))
    if number % 2:
        store.begin(job.id), store.step(job.id, 3, {}), store.complete(job.id, "video.mp4", 5, {}, None)
    print(job.id, "torch" in sys.modules, flush=True)
"""


def test_a_kill_loses_nothing_that_was_told(tmp_path: Path) -> None:
    code = [sys.executable, "-c", CREATING, str(tmp_path)]
    with subprocess.Popen(
        code, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}
    ) as child:
        assert child.stdout
        told = [child.stdout.readline().split() for _ in range(31)]
        child.send_signal(signal.SIGKILL)
        told += [
            line.split() for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")
        ]
    store = JobStore(tmp_path)
    jobs, _ = store.page("video", limit=10**6, order="asc")
    # The last one may have been made and not told of.
    assert [job.id for job in jobs][: len(told)] == [id for id, _ in told]
    assert len(jobs) - len(told) in (0, 1)
    for number, job in enumerate(jobs[: len(told)]):
        assert job.status == ("completed" if number % 2 else "queued")
        assert store.create(job.params, deadline=1.0, key=job.params.prompt).id == job.id
    assert {torch for _, torch in told} == {"False"}
    store.close()


def test_promises_are_synced_and_steps_are_not(store: JobStore) -> None:
    def synced() -> bool:
        """Whether the last transaction was; 1 is NORMAL, 2 is FULL."""
        return store._database.execute("PRAGMA synchronous").fetchone()[0] == 2

    job = create(store)
    assert synced()
    store.begin(job.id)
    assert not synced()
    store.step(job.id, 1, {})
    assert not synced()
    store.complete(job.id, "video.mp4", 1, {}, None)
    assert synced()
    store.delete(job.id)
    assert synced()


def test_a_new_server_has_every_job_as_far_as_it_was(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job = create(store, priority=-3)
    begun = store.begin(job.id)
    assert begun and begun.started
    store.lost(job.id)
    store.begin(job.id)
    store.step(job.id, 5, {"denoise": 2.5})
    store.lost(job.id)
    store.begin(job.id)
    store.close()
    store = JobStore(tmp_path)
    again = store.get(job.id)
    assert again and (again.status, again.step, again.attempts, again.priority) == ("queued", 5, 1, -3)
    assert again.started == begun.started
    assert again.timings == {"queue": pytest.approx(begun.started - job.created), "denoise": 2.5}
    assert again.params == params()
    store.close()


def test_two_servers_cannot_have_one_folder(store: JobStore, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="belongs to another process"):
        JobStore(tmp_path)
    create(store)


def test_jobs_of_another_version_are_left_alone(tmp_path: Path) -> None:
    JobStore(tmp_path).close()
    database = sqlite3.connect(tmp_path / "jobs.db")
    database.execute("PRAGMA user_version = 7")
    database.close()
    with pytest.raises(InputError, match="version 7"):
        JobStore(tmp_path)
    (tmp_path / "jobs.db").write_bytes(b"a video, not a database" * 99)
    with pytest.raises(InputError, match="cannot be read"):
        JobStore(tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        JobStore(tmp_path / "jobs.db")


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_have_each_job_once_while_jobs_come_and_go(
    store: JobStore, order: Literal["asc", "desc"]
) -> None:
    start = [create(store).id for _ in range(11)]
    store.create(params(**IMAGE), deadline=1.0)
    seen: list[str] = []
    more, turn = True, 0
    while more:
        jobs, more = store.page("video", limit=3, order=order, after=seen[-1] if seen else None)
        assert len(jobs) == 3 or not more
        seen += [job.id for job in jobs]
        turn += 1
        if turn < 4:
            start.append(create(store).id)
            store.delete(seen[-1])  # the cursor itself
    expected = start if order == "asc" else start[10::-1]
    assert seen == expected


def test_ids_go_up_when_the_clock_does_not(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([2e9, 2e9, 1e9, 2e9 + 1, *[3.0] * 9])
    monkeypatch.setattr("weft.serve.job_store.time.time", lambda: next(times))
    ids = [create(store).id for _ in range(5)]
    store.close()
    again = JobStore(tmp_path)
    ids += [create(again).id]
    again.close()
    assert ids == sorted(ids)
    assert len({id[:16] for id in ids}) == 6


def test_a_key_is_for_one_request(store: JobStore) -> None:
    job = create(store, key="k", body=b"1")
    store.fail(job.id, CANCELLED)
    assert create(store, key="k", body=b"1") == store.get(job.id)
    with pytest.raises(KeyReused, match="'k'"):
        create(store, key="k", body=b"2")
    with pytest.raises(KeyReused):
        store.create(params(**IMAGE), deadline=1.0, key="k", body=b"1")
    store.delete(job.id)
    assert create(store, key="k", body=b"2").id != job.id


def test_no_job_without_what_it_needs(store: JobStore) -> None:
    called: list[str] = []
    job = create(store, key="k", before=called.append)
    assert called == [job.id]
    create(store, key="k", before=called.append)
    assert called == [job.id]

    def full(_: str) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        create(store, key="other", before=full)
    assert store.counts()["queued"] == 1
    assert create(store, key="other", body=b"new").id != job.id


def test_losses_count_from_the_last_new_step(store: JobStore) -> None:
    id = create(store).id

    def loses(step: int) -> Job:
        store.begin(id)
        store.step(id, step, {})
        job = store.lost(id, expires=7.0)
        assert job
        return job

    assert [loses(step).attempts for step in (1, 1, 2, 2)] == [1, 2, 1, 2]
    last = loses(1)  # began again at an older state and did not come as far
    assert (last.status, last.attempts, last.step, last.expires) == ("failed", 3, 2, 7.0)
    assert last.failure and last.failure.code == "rank_lost" and "3 times" in last.failure.message
    assert store.begin(id) is None
    assert store.step(id, 7, {}) is None


@pytest.mark.parametrize(
    "id", ["", "' OR 1=1 --", "video_%", "../jobs.db", "\0", "\ud800", new_id("video", 1)]
)
def test_unknown_ids_find_nothing(store: JobStore, id: str) -> None:
    create(store)
    assert store.get(id) is store.delete(id) is None
    assert store.counts()["queued"] == 1


def test_prompts_come_back_as_they_were(store: JobStore) -> None:
    for prompt in ("'; DROP TABLE jobs; --", "\0", "\ud800 half", "<script>", "🧵" * 1000, ""):
        job = store.create(params(prompt=prompt), deadline=float("inf"))
        assert store.get(job.id) == job


def test_a_page_says_what_is_wrong_with_its_cursor(store: JobStore) -> None:
    with pytest.raises(InputError, match="'video_~' is not the id"):
        store.page("video", limit=1, after="video_~")
    with pytest.raises(InputError, match="begin with video_"):
        store.page("video", limit=1, after=new_id("image", 1))
    with pytest.raises(InputError, match="asc or desc"):
        store.page("video", limit=1, order="id; DROP TABLE jobs")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["new", "empty", "ours", "shared"])
def test_other_users_cannot_read_the_jobs(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    if kind != "new":
        folder.mkdir()
        folder.chmod(0o755)
    if kind == "ours":
        JobStore(folder).close()
        for path in (folder, *folder.iterdir()):
            path.chmod(path.stat().st_mode | 0o055)
    if kind == "shared":
        (folder / "notes.txt").write_text("of somebody")
    store = JobStore(folder)
    create(store)
    files = [path for path in folder.iterdir() if path.name.startswith("jobs.db")]
    assert len(files) >= 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == (0o755 if kind == "shared" else 0o700)
    assert [record.message for record in caplog.records if "other users" in record.message] == [
        "the folder of the jobs is open to other users; give one of its own"
    ] * (kind == "shared")
    store.close()
    JobStore(folder).close()  # whose database is there by now
    assert folder.stat().st_mode & 0o777 == (0o755 if kind == "shared" else 0o700)
