"""A full disk loses no job, takes nothing new, says so, and can be emptied."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.fake import made as making
from tests.serve.fake import serving
from tests.serve.full_disk import Filler, Injected, mounted
from tests.serve.hostile import PICTURE
from tests.serve.ranks import ThreadRanks
from tests.serve.test_engine import ended, params, running, until
from weft.serve import engine as engines
from weft.serve import outcomes
from weft.serve.api_error import APIError
from weft.serve.engine import Engine
from weft.serve.job_store import JobStore
from weft.serve.messages import BatchProgress, EngineEvent
from weft.serve.reserve import RESERVE_BYTES, DiskFull

RESULT = bytes(range(256)) * 400


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "RankSupervisor", ThreadRanks)
    monkeypatch.setattr(engines, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr("tests.serve.ranks.made", lambda _: RESULT)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small") as folder:
        yield folder


def told(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.message for record in caplog.records)


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each change, and no traceback."""
    assert told(caplog, "the disk is full") == told(caplog, "the disk has room again") == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert told(caplog, "states are not saved") <= 1


def begun(engine: Engine, count: int = 1) -> list[str]:
    """Jobs that run, one rank each."""
    engine.ranks.pace = 0.05  # type: ignore[attr-defined]
    ids = [engine.submit(params(seed=at)).id for at in range(count)]
    until(lambda: any(job.step > 2 for job in engine.store.active()))
    return ids


def completed(engine: Engine, ids: list[str]) -> bool:
    assert all(engine.store.get(id).status != "failed" for id in ids)  # type: ignore[union-attr]
    return all(engine.store.get(id).status == "completed" for id in ids)  # type: ignore[union-attr]


@pytest.mark.parametrize("left", [0, 16 * 2**10, 24 * 2**10, 2**17])
def test_jobs_that_end_on_a_full_disk_are_completed_when_there_is_room(
    small: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    filler = Filler(small)
    with running(small, policy="one") as engine, serving(engine) as url:
        ids = begun(engine, 3)
        filler.fill(left)
        # With 128 KiB one result fits, and not the others: then the disk is full as well.
        until(lambda: engine.store.reserve.is_full and len(engine.dispatch.outcomes) > 0)
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "disk_full")
        assert "disk of the server is full" in health.json()["reason"]
        assert str(small) not in health.text
        refused = httpx.post(f"{url}/v1/videos", json={"prompt": "a", "num_inference_steps": 10})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_full")
        assert int(refused.headers["retry-after"]) > 0
        assert not any(engine.store.get(id).status == "failed" for id in ids)  # type: ignore[union-attr]
        filler.empty()
        until(lambda: completed(engine, ids))
        assert all(engine.content(id)[0].read_bytes() == RESULT for id in ids)  # type: ignore[index]
        until(lambda: httpx.get(f"{url}/health").json() == {"status": "ok"})
        assert httpx.post(f"{url}/v1/videos", json={"prompt": "a"}).status_code == 200
    check_log(caplog)


def test_a_server_that_ends_on_a_full_disk_leaves_its_jobs_to_the_next(small: Path) -> None:
    filler = Filler(small)
    with running(small, policy="one") as engine:
        ids = begun(engine)
        filler.fill()
        until(lambda: len(engine.dispatch.outcomes) == 1)
    with running(small, policy="one") as engine:
        filler.empty()
        until(lambda: completed(engine, ids))


def test_everything_can_be_deleted_from_a_disk_of_0_bytes(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filler = Filler(small)
    with running(small, policy="one") as engine, serving(engine) as url:
        ids = [engine.submit(params(seed=at)).id for at in range(12)]
        until(lambda: ended(engine, *ids))
        engine.store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # or its space is room enough
        filler.fill()
        used = engine.disk.used()
        for id in ids:
            assert httpx.delete(f"{url}/v1/videos/{id}").status_code == 200
            filler.fill()  # another program takes all that is freed
        assert (used, engine.disk.used()) == (12 * len(RESULT), 0)
        assert httpx.get(f"{url}/v1/videos").json()["data"] == []
        filler.empty()
        until(lambda: not engine.store.reserve.is_full)
    check_log(caplog)


def test_the_database_writes_in_its_reserve_and_takes_nothing_new(small: Path) -> None:
    filler = Filler(small)
    store = JobStore(small)
    ids = [store.create(params(seed=at), deadline=1.0).id for at in range(8)]
    store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    filler.fill()
    assert store.fail(ids[0], outcomes.NO_ROOM) is not None
    assert store.reserve.is_full
    assert all(store.delete(id) for id in ids)
    with pytest.raises(DiskFull):
        store.create(params(), deadline=1.0)
    filler.empty()
    store.reserve.restore()
    assert store.create(params(), deadline=1.0)
    store.close()


def test_a_result_that_finds_no_room_for_long_fails_and_says_why(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outcomes, "MAX_HELD_SECONDS", 0.1)
    filler = Filler(small)
    with running(small, policy="one") as engine, serving(engine) as url:
        ids = begun(engine)
        filler.fill()
        until(lambda: ended(engine, *ids))
        error = httpx.get(f"{url}/v1/videos/{ids[0]}").json()["error"]
        assert error["code"] == "disk_full"
        assert "had no room for the result" in error["message"]
        filler.empty()
        until(lambda: not engine.store.reserve.is_full)
        assert len(engine.dispatch.outcomes) == 0
    check_log(caplog)


def test_who_waits_for_an_image_has_it_when_there_is_room(small: Path) -> None:
    filler = Filler(small)
    with running(small, policy="one") as engine, serving(engine) as url, httpx.Client(timeout=60) as http:
        engine.ranks.pace = 0.05  # type: ignore[attr-defined]

        def free(event: EngineEvent) -> None:
            step = event.step.step if isinstance(event, BatchProgress) else 0
            if step == 2:
                filler.fill()
            elif step == 9:
                engine.events.put(filler.empty)

        engine.on_event.append(free)
        answer = http.post(f"{url}/v1/images/generations", json={"prompt": "a", "num_inference_steps": 10})
        assert answer.status_code == 200


def test_pictures_of_results_come_also_from_a_full_disk(small: Path) -> None:
    filler = Filler(small)
    with making(small) as engine, serving(engine) as url, httpx.Client(timeout=60) as http:
        done = http.post(f"{url}/v1/videos/sync", json={"prompt": "a", "num_inference_steps": 2})
        filler.fill()
        for variant in ("thumbnail", "spritesheet"):
            for _ in range(2):
                answer = http.get(f"{url}/v1/videos/{done.headers['x-job-id']}/content?variant={variant}")
                assert (answer.status_code, answer.headers["content-type"]) == (200, "image/webp")
                assert answer.content[8:12] == b"WEBP"


def test_a_server_starts_on_a_full_disk(small: Path) -> None:
    filler = Filler(small)
    with running(small, policy="one") as engine:
        done = engine.submit(params())
        until(lambda: ended(engine, done.id))
    filler.fill()
    with running(small, policy="one") as engine:
        assert engine.content(done.id)[0].read_bytes() == RESULT  # type: ignore[index]
        with pytest.raises(APIError, match="disk"):
            for _ in range(200):
                engine.submit(params())
        assert engine.cancel_and_delete(done.id)


def test_idle_server_notices_that_the_disk_is_full(small: Path) -> None:
    """Before a write has failed; the file of the reserve stays."""
    with running(small) as engine:
        filler = Filler(small)
        filler.fill(left=20_000)
        until(lambda: engine.store.reserve.is_full)
        assert (small / "data" / "jobs.db-reserve").stat().st_size == RESERVE_BYTES
        with pytest.raises(APIError, match="disk_full"):
            engine.submit(params())
        filler.empty()
        until(lambda: not engine.store.reserve.is_full)


def test_the_reserve_is_there_and_only_for_this_user(tmp_path: Path) -> None:
    store, file = JobStore(tmp_path), tmp_path / "jobs.db-reserve"
    assert (file.stat().st_size, file.stat().st_mode & 0o777) == (RESERVE_BYTES, 0o600)
    assert file.stat().st_blocks * 512 >= RESERVE_BYTES
    store.reserve.release()
    assert not file.exists()
    store.reserve.restore(needed=2**62)
    assert store.reserve.is_full
    store.reserve.restore()
    assert file.exists()
    store.close()


def test_outcomes_wait_for_a_database_that_takes_nothing_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path) as engine:
        disk = Injected(engine.store, monkeypatch)
        ids = begun(engine, 2)
        cancelled = engine.submit(params(seed=9)).id
        disk.is_full = True
        engine.cancel(cancelled)
        engine.ranks.fail(0)  # type: ignore[attr-defined]  # and what is lost meanwhile goes on
        until(lambda: engine.store.reserve.is_full and cancelled in engine.dispatch.outcomes)
        with pytest.raises(APIError) as refused:
            engine.submit(params())
        assert refused.value.code == "disk_full"
        disk.is_full = False
        until(lambda: completed(engine, ids) and ended(engine, cancelled))
        assert engine.store.get(cancelled).failure.code == "cancelled"  # type: ignore[union-attr]
        assert disk.refused > 2
    assert told(caplog, "the disk is full") == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_results_wait_for_a_descriptor_in_a_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No job fails for it, and the disk is not called full."""

    def out(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with running(tmp_path, policy="one") as engine:
        ids = begun(engine)
        with monkeypatch.context() as patch:
            patch.setattr("weft.serve.disk._replace", out)
            until(lambda: len(engine.dispatch.outcomes) == 1 or ended(engine, *ids))
            assert not engine.store.reserve.is_full
        until(lambda: completed(engine, ids))
        assert engine.content(ids[0])[0].read_bytes() == RESULT  # type: ignore[index]
    assert not [record for record in caplog.records if record.exc_info]


def test_a_job_waits_for_a_descriptor_to_read_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as engine, engine.disk.spool() as upload:
        read, tries = engine.disk.read, list[str]()

        def out(id: str, name: str) -> bytes:
            tries.append(id)
            if len(tries) < 3:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return read(id, name)

        monkeypatch.setattr(engine.disk, "read", out)
        upload.write(PICTURE)
        job = engine.submit(params(), image=upload)
        until(lambda: completed(engine, [job.id]))


def test_a_picture_is_synced_before_the_database_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or every other request waits for the disk."""
    synced, fsync = list[bool](), os.fsync
    with running(tmp_path) as engine, serving(engine) as url, ThreadPoolExecutor(1) as other:
        lock = engine.store._database.lock

        def is_free() -> bool:
            if is_free := lock.acquire(timeout=2):
                lock.release()
            return is_free

        def note(descriptor: int) -> None:
            if Path(f"/proc/self/fd/{descriptor}").resolve().name.startswith(".upload."):
                synced.append(other.submit(is_free).result())
            fsync(descriptor)

        monkeypatch.setattr("os.fsync", note)
        fields = {"prompt": (None, "a"), "input_reference": ("a.png", PICTURE)}
        assert httpx.post(f"{url}/v1/videos", files=fields, timeout=60).status_code == 200
    assert synced == [True]


def test_what_is_no_want_of_space_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with making(tmp_path) as engine:

        def broken(*_: Any) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(engine.store._database, "execute", broken)
        with pytest.raises(sqlite3.OperationalError, match="I/O"):
            engine.store.fail("video_" + "0" * 26, outcomes.NO_ROOM)
        assert not engine.store.reserve.is_full
        monkeypatch.undo()
