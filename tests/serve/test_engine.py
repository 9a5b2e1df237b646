"""The engine with ranks that are threads: elasticity, losses, restarts, cancels."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.fake import serving
from tests.serve.ranks import FACTS, ThreadRanks, _Rank, made
from weft.core.topology import Topology
from weft.serve import engine as engines
from weft.serve import watchdog
from weft.serve.api_error import APIError
from weft.serve.engine import Engine
from weft.serve.jobs import GenerationParams
from weft.serve.latency import Latency
from weft.serve.messages import FromRank, RankFailed
from weft.serve.settings import ServerSettings


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "RankSupervisor", ThreadRanks)
    monkeypatch.setattr(engines, "CHECK_SECONDS", 0.02)


@contextmanager
def running(folder: Path, *, ready: bool = True, **options: Any) -> Iterator[Engine]:
    engine = Engine(
        ServerSettings(model=folder, folder=folder / "data", name="toy", **{"ranks": 2, **options})
    )
    engine.start()
    try:
        if ready:
            until(lambda: engine.status() == "ok")
        yield engine
    finally:
        engine.close()


def until(holds: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def params(kind: Any = "video", prompt: str = "a loom", *, seed: int = 0, **how: Any) -> GenerationParams:
    rest: dict[str, Any] = {"frames": 16 if kind == "video" else 1, "height": 64, "width": 64, "steps": 10}
    return GenerationParams(
        kind=kind, model="toy", prompt=prompt, seed=seed, format="mp4" if kind == "video" else "png",
        **{**rest, **how},
    )  # fmt: skip


def ended(engine: Engine, *ids: str) -> bool:
    return all((job := engine.store.get(id)) is not None and not job.active for id in ids)


def test_a_job_is_made_and_its_result_is_in_its_folder(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        job = engine.submit(params(seed=3))
        until(lambda: ended(engine, job.id))
        done, found = engine.store.get(job.id), engine.content(job.id)
        assert done is not None and found is not None
        assert (done.status, done.progress, done.step) == ("completed", 100, 10)
        assert found[0].read_bytes() == made(params(seed=3))
        assert found[1] == "video/mp4"
        assert done.expires is not None and done.expires > time.time() + 3600
        until(lambda: engine.live(job.id) is None)


def test_news_come_at_every_step_and_end_with_the_job(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        job = engine.submit(params())

        async def follow() -> list[int]:
            return [each.step async for each in engine.changes(job.id)]

        steps = asyncio.run(follow())
        assert steps == sorted(steps)
        assert steps[-1] == 10
        assert len(set(steps)) > 3


def test_images_pass_between_two_steps_of_a_video(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        engine.ranks.pace = 0.05  # type: ignore[attr-defined]
        video = engine.submit(params(steps=60), deadline=1000)
        until(lambda: engine.store.get(video.id).step > 2)  # type: ignore[union-attr]
        images = [engine.submit(params("image", seed=at), deadline=0.5) for at in range(2)]
        until(lambda: ended(engine, *(job.id for job in images)))
        assert engine.store.get(video.id).status == "in_progress"  # type: ignore[union-attr]
        assert engine.store.get(video.id).progress < 99  # type: ignore[union-attr]
        until(lambda: ended(engine, video.id))
        began = [first for batch, _, first in engine.ranks.segments if batch == video.id]  # type: ignore[attr-defined]
        assert began[0] == 0
        assert len(began) > 1
        assert began == sorted(began)


@pytest.mark.parametrize("who", [0, 1])
def test_a_lost_rank_costs_nothing_but_time(tmp_path: Path, who: int) -> None:
    with running(tmp_path) as engine:
        engine.ranks.pace = 0.02  # type: ignore[attr-defined]
        jobs = [engine.submit(params(seed=at, steps=20)) for at in range(4)]
        for losses in (1, 2):
            until(lambda: any(job.step > 3 for job in engine.store.active()))
            engine.ranks.fail(who)  # type: ignore[attr-defined]
            # Not until it is "starting": that may be over before this thread looks.
            until(lambda losses=losses: engine.restarts == losses and engine.status() == "ok")
        until(lambda: ended(engine, *(job.id for job in jobs)))
        for at, job in enumerate(jobs):
            found = engine.content(job.id)
            assert found is not None
            assert found[0].read_bytes() == made(params(seed=at))
        assert engine.restarts == 2


def test_a_job_that_kills_its_ranks_three_times_fails_and_others_do_not(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        engine.ranks.poison = "poison"  # type: ignore[attr-defined]
        bad, good = engine.submit(params(prompt="poison")), engine.submit(params(prompt="a loom", steps=11))
        until(lambda: ended(engine, bad.id, good.id))
        failed = engine.store.get(bad.id)
        assert failed is not None and failed.failure is not None
        assert failed.failure.code == "rank_lost"
        assert engine.store.get(good.id).status == "completed"  # type: ignore[union-attr]


def test_a_server_that_starts_again_goes_on_with_all_its_jobs(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        engine.ranks.pace = 0.05  # type: ignore[attr-defined]
        jobs = [engine.submit(params(seed=at, steps=30)) for at in range(5)]
        until(lambda: any(job.step > 4 for job in engine.store.active()))
        before = {job.id: job.step for job in engine.store.active()}
    with running(tmp_path) as engine:
        until(lambda: ended(engine, *(job.id for job in jobs)))
        assert all(engine.store.get(job.id).status == "completed" for job in jobs)  # type: ignore[union-attr]
        first = {batch: step for batch, _, step in reversed(engine.ranks.segments)}  # type: ignore[attr-defined]
        far = max(before, key=lambda id: before[id])
        assert first[far] > 0, "it began anew"


def test_cancel_frees_the_ranks_at_the_next_step(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        engine.ranks.pace = 0.02  # type: ignore[attr-defined]
        job = engine.submit(params(steps=500), deadline=1000)
        until(lambda: engine.store.get(job.id).step > 1)  # type: ignore[union-attr]
        engine.cancel(job.id)
        until(lambda: not engine.dispatch.batches)
        assert engine.store.get(job.id).failure.code == "cancelled"  # type: ignore[union-attr]
        assert engine.cancel_and_delete(job.id)
        assert engine.store.get(job.id) is None
        assert not engine.cancel_and_delete(job.id)
        other = engine.submit(params())
        until(lambda: ended(engine, other.id))


def test_a_full_queue_is_refused_with_a_time_to_wait(tmp_path: Path) -> None:
    with running(tmp_path, queue=2, policy="all") as engine:
        engine.ranks.pace = 0.2  # type: ignore[attr-defined]
        engine.submit(params(steps=50))
        until(lambda: engine.store.counts()["in_progress"] == 1)
        for at in range(2):
            engine.submit(params(seed=at))
        with pytest.raises(APIError) as refused:
            engine.submit(params(seed=9))
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        assert refused.value.retry is not None and refused.value.retry >= 1


def memory(monkeypatch: pytest.MonkeyPatch, ranks: int, **how: Any) -> None:
    """Ranks from now on may have no more than a video needs on so many."""
    needs = Latency(FACTS, Topology.local(2)).memory(params(**how).shape, ranks)
    monkeypatch.setattr("tests.serve.ranks.FACTS", replace(FACTS, memory=needs))


def test_what_fits_on_two_ranks_only_gets_two_and_what_fits_on_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(monkeypatch, 2)
    with running(tmp_path, policy="one") as engine:
        jobs = [engine.submit(params(seed=at)) for at in range(2)]
        until(lambda: ended(engine, *(job.id for job in jobs)))
        assert {ranks for _, ranks, _ in engine.ranks.segments} == {(0, 1)}  # type: ignore[attr-defined]
        assert list(engine.explain(params())["seconds_by_ranks"]) == ["2"]
        with pytest.raises(APIError, match="32 frames of 64x64 need .* GiB per rank") as refused:
            engine.submit(params(frames=32))
        assert (refused.value.status, refused.value.code) == (400, "out_of_memory")
        said = json.loads(json.dumps(engine.explain(params(frames=32)), allow_nan=False))
        assert (said["seconds"], said["seconds_by_ranks"]) == (None, {})


def test_a_job_of_a_server_that_had_more_memory_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as engine:
        engine.ranks.pace = 0.05  # type: ignore[attr-defined]
        begun, waits = engine.submit(params(steps=500)), engine.submit(params(steps=501))
        small = engine.submit(params(frames=4, height=8, width=8))
        until(lambda: any(job.step > 2 for job in engine.store.active()))
    memory(monkeypatch, 1, frames=4, height=8, width=8)
    with running(tmp_path) as engine:
        until(lambda: ended(engine, begun.id, waits.id, small.id))
        jobs = [engine.store.get(each.id) for each in (begun, waits, small)]
        assert [job.failure and job.failure.code for job in jobs] == ["out_of_memory", "out_of_memory", None]  # type: ignore[union-attr]


def test_a_key_makes_one_job(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        first, again = (engine.submit(params(), key="k", body=b"x") for _ in range(2))
        assert first.id == again.id
        with pytest.raises(APIError, match="was sent before"):
            engine.submit(params(), key="k", body=b"y")
        until(lambda: ended(engine, first.id))
        assert len([s for s in engine.ranks.segments if s[0] == first.id and s[2] == 0]) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("when", ["before", "after"])
def test_ranks_that_cannot_start_make_a_server_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(ThreadRanks, "broken", when)  # before the first of them has begun
    with running(tmp_path, ready=False) as engine:
        until(lambda: engine.status() == "failed")
        assert engine.trouble == engine.snapshot()["trouble"] == "The toy is broken."
        monkeypatch.setattr(ThreadRanks, "broken", "")
        until(lambda: engine.status() == "ok")  # who hosts it gives up; but it could go on
        assert engine.trouble == ""


def test_draining_takes_nothing_new_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as engine:
        add = engine.dispatch.outcomes.add
        # A slow disk: draining waits for it.
        monkeypatch.setattr(engine.dispatch.outcomes, "add", lambda one: (time.sleep(0.3), add(one)))
        job = engine.submit(params())
        until(lambda: engine.store.get(job.id).step > 0)  # type: ignore[union-attr]
        engine.drain(10)
        assert engine.store.get(job.id).status == "completed"  # type: ignore[union-attr]
        with pytest.raises(APIError, match="draining"):
            engine.submit(params())


def test_what_there_is_to_see(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        assert engine.facts == FACTS
        engine.ranks.pace = 0.05  # type: ignore[attr-defined]
        job = engine.submit(params(steps=30))
        until(lambda: engine.live(job.id) is not None and engine.live(job.id).preview is not None)  # type: ignore[union-attr]
        seen = engine.snapshot()
        assert [rank["rank"] for rank in seen["ranks"]] == [0, 1]
        assert seen["running"][0]["batch"] == job.id
        assert engine.live(job.id).eta > 0  # type: ignore[union-attr]


def cancel_in_a_step(engine: Engine, id: str, beside: str) -> None:
    """Until its ranks are free, and all of them are there again."""
    until(lambda: {id, beside} <= {batch["batch"] for batch in engine.snapshot()["running"]})
    engine.cancel_and_delete(id)
    until(lambda: id not in engine.dispatch.batches)
    until(lambda: engine.status() == "ok")


def test_a_cancelled_step_that_takes_for_ever_is_ended_and_others_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More often than a job may lose its ranks; the job beside never makes one whole step between."""
    monkeypatch.setattr(watchdog, "CANCEL_SECONDS", 0.2)
    with running(tmp_path, policy="one") as engine:
        engine.ranks.paces = {"slow": 600.0, "beside": 600.0}  # type: ignore[attr-defined]
        beside = engine.submit(params(prompt="beside", seed=4))
        for at in range(4):
            cancel_in_a_step(engine, engine.submit(params(prompt="slow", seed=at)).id, beside.id)
            assert engine.restarts == at + 1
        kept = engine.store.get(beside.id)
        assert kept is not None
        assert (kept.active, kept.attempts) == (True, 0)
        engine.ranks.paces = {}  # type: ignore[attr-defined]
        engine.ranks.fail(0)  # type: ignore[attr-defined] - so that it begins anew, and fast
        until(lambda: ended(engine, beside.id))
        found = engine.content(beside.id)
        assert found is not None
        assert found[0].read_bytes() == made(params(prompt="beside", seed=4))


def test_after_a_cancel_the_status_tells_what_ranks_still_do_and_a_drain_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "CANCEL_SECONDS", 1e9)
    with running(tmp_path) as engine:
        engine.ranks.paces = {"slow": 600.0}  # type: ignore[attr-defined]
        job = engine.submit(params(prompt="slow"))
        until(lambda: engine.snapshot()["running"])
        engine.cancel_and_delete(job.id)
        until(lambda: engine.snapshot()["running"][0]["cancelled"])
        seen = engine.snapshot()
        assert seen["running"][0]["stopping"]
        assert seen["running"][0]["jobs"] == []
        assert [rank["job"] for rank in seen["ranks"]].count(job.id) == len(seen["running"][0]["ranks"])
        began = time.monotonic()
        engine.drain(70)
        assert time.monotonic() - began < 60


def test_a_request_beyond_the_limits_is_refused_and_explained(tmp_path: Path) -> None:
    with running(tmp_path, max_time=60.0, max_step=10.0) as engine:
        large = params(height=1280, width=720, frames=32)
        with pytest.raises(APIError, match="admits 60 s") as refused:
            engine.submit(large)
        assert (refused.value.status, refused.value.code) == (400, "too_long")
        assert not engine.store.active()
        plan = engine.explain(large)
        assert (plan["admitted"], plan["refusal"]) == (False, refused.value.message)
        about = engine.about()
        assert about["limits"]["max_time_seconds"] == 60
        assert about["default"]["num_frames"] == 16
        assert engine.submit(params()).status == "queued"
        hurried = engine.submit(params(), deadline=1e-9)
        assert hurried.deadline > hurried.created, "no less than it takes: it would pass all others"


def test_images_of_one_request_are_refused_if_they_take_too_long_together(tmp_path: Path) -> None:
    alone = Latency(FACTS, Topology.local(2)).alone(params("image", guidance=2.0).shape)
    with running(tmp_path, max_time=3 * alone) as engine, serving(engine) as url:
        request = {"prompt": "a loom", "n": 8}
        refused = httpx.post(f"{url}/v1/images/generations", json=request)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert not engine.store.active()
        assert httpx.post(f"{url}/v1/images/generations", json={**request, "n": 1}).status_code == 200


def test_jobs_of_a_server_with_other_limits_are_refused_and_those_of_the_same_are_kept(
    tmp_path: Path,
) -> None:
    slow = {"max_time": 3600.0, "max_step": 3600.0}
    with running(tmp_path, **slow) as engine:
        engine.ranks.pace = 600.0  # type: ignore[attr-defined]
        long, short = engine.submit(params(height=256, width=256)), engine.submit(params(steps=1))
        until(lambda: engine.store.counts()["in_progress"])
    with running(tmp_path, **slow) as engine:
        engine.ranks.pace = 600.0  # type: ignore[attr-defined]
        latency = engine.dispatch.latency
        assert {job.id for job in engine.store.active()} == {long.id, short.id}
        between = (latency.alone(long.params.shape) + latency.alone(short.params.shape)) / 2
    with running(tmp_path, max_time=between) as engine:
        until(lambda: ended(engine, long.id, short.id))
        jobs = [engine.store.get(each.id) for each in (long, short)]
        assert [job.failure and job.failure.code for job in jobs] == ["too_long", None]  # type: ignore[union-attr]


@pytest.mark.parametrize("when", ["before", "after"])
def test_ranks_that_name_a_path_do_not_tell_it_to_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    emit = _Rank._emit

    def named(self: Any, message: FromRank) -> None:
        if isinstance(message, RankFailed):
            text = f"{tmp_path}/weights of mine.bin cannot be read, says /opt/venv/lib/torch.py"
            message = replace(message, message=text)
        emit(self, message)

    monkeypatch.setattr(ThreadRanks, "broken", when)
    monkeypatch.setattr(_Rank, "_emit", named)
    with running(tmp_path, ready=False) as engine, serving(engine) as url:
        until(lambda: engine.status() == "failed")
        said = httpx.get(f"{url}/health").json()["reason"]
        assert said.endswith("weights of mine.bin cannot be read, says torch.py")
        for path in ("/health", "/v1/status", "/v1/models"):
            text = httpx.get(f"{url}{path}").text
            assert not [root for root in ("/opt", "/tmp", str(tmp_path)) if root in text]


def test_a_result_that_cannot_be_written_tells_no_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path) as engine, serving(engine) as url:
        engine.ranks.pace = 0.02  # type: ignore[attr-defined]
        job = engine.submit(params())
        (tmp_path / "data" / "jobs" / job.id).write_text("in the place of its folder")
        until(lambda: ended(engine, job.id))
        error = httpx.get(f"{url}/v1/videos/{job.id}").json()["error"]
        assert (error["code"], "/" in error["message"]) == ("internal_error", False)
        assert "log of the server" in error["message"]
    assert [record for record in caplog.records if record.exc_info]
