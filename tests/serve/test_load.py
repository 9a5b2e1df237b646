"""Load on a server: arrivals from a seed, times from when they were due, and what becomes of failures."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.serve.fake import Fake  # noqa: E402
from tests.serve.hosting import in_thread  # noqa: E402
from weft.cli.main import main  # noqa: E402
from weft.core.errors import CommError, InputError  # noqa: E402
from weft.serve.load_test import (  # noqa: E402
    LoadTestResult,
    RequestArrival,
    RequestSample,
    RequestTemplate,
    ServerClient,
    poisson_arrivals,
    read_trace,
    run_load_test,
)

MIX = {"image": 0.75, "video": 0.25}
TEMPLATE = RequestTemplate(steps=2, size="16x16", frames=4)


def test_a_seed_brings_the_same_requests_at_random_times() -> None:
    work = poisson_arrivals(50.0, 100.0, MIX, seed=3)
    assert work == poisson_arrivals(50.0, 100.0, MIX, seed=3)
    assert work != poisson_arrivals(50.0, 100.0, MIX, seed=4)
    assert 0 < work[0].at < work[-1].at < 100.0
    # Bounds of five deviations: of a count, of a share, and of gaps whose deviation is their mean.
    assert abs(len(work) - 5000) < 5 * 5000**0.5
    share = sum(each.kind == "image" for each in work) / len(work)
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / 5000) ** 0.5
    gaps = [b.at - a.at for a, b in zip(work, work[1:], strict=False)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)


@pytest.mark.parametrize(
    ("rate", "duration", "mix"),
    [(0, 1, MIX), (1, -1, MIX), (1, 1, {}), (1, 1, {"image": 0}), (1, 1, {"gif": 1})],
)
def test_arrivals_that_cannot_be_are_refused(rate, duration, mix) -> None:
    with pytest.raises(InputError):
        poisson_arrivals(rate, duration, mix)


def test_a_trace_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 2, "kind": "video"}\n\n{"at": 0.5, "kind": "image", "seed": 9}\n')
    assert read_trace(path) == [RequestArrival(0.5, "image", 9), RequestArrival(2.0, "video", 0)]
    for bad in ("", "[]", '{"at": 1}', '{"at": -1, "kind": "image"}', '{"at": 1, "kind": "gif"}', "{"):
        path.write_text(bad)
        with pytest.raises(InputError, match=r"trace\.jsonl"):
            read_trace(path)
    with pytest.raises(InputError, match="none"):
        read_trace(tmp_path / "none")


def sample(
    kind: str, at: float, seconds: float, code: str = "ok", queue: float | None = 0.5
) -> RequestSample:
    return RequestSample(kind=kind, at=at, seconds=seconds, code=code, queue=queue)


def test_what_failed_was_not_in_time_and_has_no_latency() -> None:
    samples = [
        sample("image", 0.0, 3.0),  # just in time
        sample("image", 1.0, 3.1),
        sample("image", 2.0, 0.1, "queue_full", None),
        sample("video", 0.5, 9.5),
    ]
    result = LoadTestResult(samples=samples, alone={"image": 1.0, "video": 4.0}, slo=3.0)
    assert (result.attained("image"), result.attained("video"), result.attained()) == (1 / 3, 1.0, 0.5)
    assert result.percentile("image", 50) == pytest.approx(3.05)
    assert result.percentile("image", 100, "queue") == 0.5
    assert result.percentile("video", 99) == 9.5
    assert result.errors == {"queue_full": 1}
    assert result.throughput == pytest.approx(3 / 10.0)
    assert result.depth("image") == [(0, 0), (0, 1), (1, 2), (2, 3), (2.1, 2), (3, 1), (4.1, 0)]
    messages = json.loads(json.dumps(result.to_json()))
    assert messages["kinds"]["image"]["sent"] == 3
    assert len(messages["samples"]) == 4
    nothing = LoadTestResult(samples=[sample("video", 0, 1, "connection")], alone={"video": 1.0}, slo=3.0)
    assert (nothing.throughput, nothing.attained(), nothing.percentile("video", 50)) == (0.0, 0.0, None)


def test_requests_come_when_they_are_due_and_leave_nothing(tmp_path: Path) -> None:
    engine = Fake(tmp_path, pace=0.1)  # two at once, 0.3 s each: eight wait for each other
    created: list[float] = []
    submit = engine.submit

    def watched(asked, **more):
        job = submit(asked, **more)
        created.append(job.created)
        deadlines.append(round(more["deadline"], 3) if more["deadline"] else None)
        return job

    engine.submit, deadlines = watched, []  # type: ignore[method-assign]
    work = [RequestArrival(0.05 * i, "video" if i % 2 else "image", i) for i in range(8)]
    with in_thread(engine) as url:
        alone = {"image": 0.4, "video": 0.4}
        result = asyncio.run(run_load_test(url, work, template=TEMPLATE, slo=2.0, alone=alone))
        left = [engine.store.page(kind, limit=100)[0] for kind in ("image", "video")]
    assert [s.code for s in result.samples] == ["ok"] * 8
    assert [(s.at, s.kind) for s in result.samples] == [(each.at, each.kind) for each in work]
    assert deadlines == [0.8] * 8
    # The last was asked for before the first half was made.
    ends = sorted(s.at + s.seconds for s in result.samples)
    assert max(created) - min(created) < ends[4]
    assert ends[-1] > ends[0] + 0.5
    assert all(s.queue == 0.01 for s in result.samples)
    assert left == [[], []]


def test_a_request_that_is_sent_late_has_waited(tmp_path: Path) -> None:
    async def late(url: str) -> RequestSample:
        async with ServerClient(url) as client:
            return await client.sample(
                RequestArrival(1.0, "image", 0), TEMPLATE.body("image", 0), time.monotonic() - 100
            )

    with in_thread(Fake(tmp_path)) as url:
        result = asyncio.run(late(url))
    assert (result.code, result.at) == ("ok", 1.0)
    assert result.seconds > 99.0


def test_each_kind_is_made_alone_first_and_failures_are_counted(tmp_path: Path) -> None:
    engine = Fake(tmp_path, pace=0.05, limit=1)
    messages: list[str] = []
    work = [RequestArrival(0.0, "image", i) for i in range(3)]
    with in_thread(engine) as url:
        result = asyncio.run(run_load_test(url, work, template=TEMPLATE, on_progress=messages.append))
        assert set(result.alone) == {"image"}
        assert result.alone["image"] > 0
        assert result.errors.keys() <= {"queue_full"}
        assert sum(result.errors.values()) == 3 - sum(s.code == "ok" for s in result.samples) > 0
        broken = RequestTemplate(steps=5, size="16x16", frames=4, prompt="fail")
        result = asyncio.run(
            run_load_test(url, [RequestArrival(0, "video", 0)], template=broken, alone={"video": 1.0})
        )
        assert result.errors == {"internal_error": 1}
        with pytest.raises(CommError, match="failed to make one video alone: internal_error"):
            asyncio.run(run_load_test(url, [RequestArrival(0, "video", 0)], template=broken))
        result = asyncio.run(
            run_load_test(
                url, [RequestArrival(0, "image", 0)], template=RequestTemplate(size="9x9"), alone={"image": 1}
            )
        )
        assert result.errors == {"invalid_size": 1}
        engine.state = "draining"
        with pytest.raises(CommError, match="No server is ready"):
            asyncio.run(run_load_test(url, work))
    assert messages[0] == "each kind alone …"
    assert messages[-1].startswith("3 of 3 ended")


def test_a_server_that_goes_away_is_a_code(tmp_path: Path) -> None:
    async def gone(url: str) -> LoadTestResult:
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, setattr, server, "should_exit", True)
        return await run_load_test(url, [RequestArrival(1.5, "image", 0)], alone={"image": 1.0})

    import uvicorn

    real, server = uvicorn.Server, None

    class Seen(real):
        def __init__(self, config):
            nonlocal server
            super().__init__(config)
            server = self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn, "Server", Seen)
        with in_thread(Fake(tmp_path)) as url:
            result = asyncio.run(gone(url))
    assert result.errors == {"connection": 1}


def test_the_command_shows_writes_and_draws(tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    out, plot = tmp_path / "load.json", tmp_path / "load.png"
    words = [
        "--rate",
        "20",
        "--duration",
        "0.5",
        "--steps",
        "2",
        "--size",
        "16x16",
        "--frames",
        "4",
        "--seed",
        "1",
    ]
    with in_thread(Fake(tmp_path / "data", pace=0.005)) as url, pytest.raises(SystemExit) as end:
        main(["bench", "serve", url, *words, "--json", str(out), "--plot", str(plot)])
    assert end.value.code in (0, None)
    shown = capfd.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[1:4]] == ["image", "video", "all"]
    assert "done per second; in time is within 3 × the time alone" in shown
    messages = json.loads(out.read_text())
    assert messages["errors"] == {}
    assert len(messages["samples"]) == len(poisson_arrivals(20.0, 0.5, {"image": 0.8, "video": 0.2}, seed=1))
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("attention", "http://127.0.0.1:9"), 2, "weft bench serve URL"),
        (("serve", "http://127.0.0.1:9", "--mix", "image:much"), 2, "mix='image:much'"),
        (("serve", "http://127.0.0.1:9", "--rate", "0"), 2, "rate=0"),
        (("serve", "http://127.0.0.1:9", "--slo", "0"), 2, "--slo must be > 0"),
        (("serve", "http://127.0.0.1:9", "--json", "/no/folder/x.json"), 2, "/no/folder"),
        (("serve", "http://127.0.0.1:9", "--rate", "9"), 4, "No server is ready at http://127.0.0.1:9"),
        (("serve", "ftp//x", "--rate", "9"), 4, "No server is ready"),
    ],
)
def test_the_command_refuses(words, code, says, capfd) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words])
    assert end.value.code == code
    assert says in capfd.readouterr().err
