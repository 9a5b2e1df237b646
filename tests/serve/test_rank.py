"""Ranks as the server sees them: one in a thread of this process, and two that are real."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import av
import pytest
import torch
from PIL import Image

from tests.models.toys import seeded
from tests.serve.hosting import until
from tests.worlds import world
from weft.core.errors import CommError
from weft.models import checkpoint, media
from weft.models.dit import DiTConfig, VideoDiT
from weft.models.resume import State
from weft.models.video import VideoPipeline
from weft.models.words import LENGTH, WORDS
from weft.run.channel import Channel, Closed
from weft.run.listener import listen
from weft.run.scratch import scratch
from weft.run.secure import Credentials, accept
from weft.serve import segment
from weft.serve.facts import facts_of
from weft.serve.jobs import Asked
from weft.serve.rank import Inbox, Worker, main
from weft.serve.work import Model, Work

TOKEN = "secret"
STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = DiTConfig(
        words=len(WORDS), length=LENGTH, video=(4, 16, 24), patch=(2, 4, 4), width=48, depth=2, heads=3
    )
    folder = tmp_path_factory.mktemp("model")
    model: Any = seeded(VideoDiT(config), dtype=torch.float32)
    VideoPipeline(model).save(folder, torch.float32)
    return folder


def job(number: int, kind: str = "video", **more: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "kind": kind, "model": "tiny", "prompt": "a red circle", "frames": 4 if kind == "video" else 1,
        "height": 16, "width": 24, "steps": STEPS, "seed": number, "guidance": 2.0, "fps": 8.0,
        "format": "mp4" if kind == "video" else "png",
    }  # fmt: skip
    return {**Asked(**(asked | more)).to_json(), "id": f"{kind}_{number}"}


class Server:
    """The other end of some ranks."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.address = str(self._stack.enter_context(scratch("test")) / "ranks")
        self.listener = self._stack.enter_context(listen(Path(self.address)))
        self.channels: dict[int, Channel] = {}
        self.listener.settimeout(60)
        self.facts: dict[str, Any] = {}

    def welcome(self, ranks: int) -> None:
        for _ in range(ranks):
            channel, purpose = accept(self.listener.accept()[0], Credentials(TOKEN))
            assert purpose == "rank"
            hello, _ = channel.receive()
            assert hello["told"] == "hello"
            assert hello["world"] == ranks
            self.channels[hello["rank"]] = channel
        for channel in self.channels.values():
            channel.send({"do": "join", "generation": 1})
        for rank in self.channels:
            self.facts = self.hear(rank, "ready")[0]["facts"]

    def hear(self, rank: int, *wanted: str) -> tuple[dict[str, Any], bytes]:
        """The next message of some kind; all that a segment says ends with one of a few."""
        while True:
            said, blob = self.channels[rank].receive()
            if said["told"] in wanted:
                return said, blob

    def run(self, ranks: list[int], jobs: list[dict[str, Any]], state: bytes = b"", **more: Any) -> None:
        said = {"do": "run", "batch": jobs[0]["id"], "ranks": ranks, "jobs": jobs, "step": 0, "preview": True}
        for rank in ranks:
            self.channels[rank].send({**said, "images": [0] * len(jobs), **more}, state)

    def told(self, rank: int) -> list[tuple[dict[str, Any], bytes]]:
        """Everything until the segment has ended."""
        found: list[tuple[dict[str, Any], bytes]] = []
        while not found or found[-1][0]["told"] not in ("done", "stopped", "failed"):
            message = self.channels[rank].receive()
            if message[0]["told"] != "beat":
                found.append(message)
        return found

    def made(self, ranks: list[int], jobs: list[dict[str, Any]], state: bytes = b"") -> dict[str, bytes]:
        self.run(ranks, jobs, state)
        told = self.told(ranks[0])
        assert told[-1][0]["told"] == "done", told[-1]
        return {said["job"]: blob for said, blob in told if said["told"] == "made"}

    def end(self) -> None:
        for channel in self.channels.values():
            channel.send({"do": "end"})

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self._stack.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone(folder: Path) -> Iterator[Server]:
    """One rank, in a thread."""
    server, left = Server(), []
    thread = threading.Thread(
        target=main, args=(server.address, TOKEN, str(folder), {"name": "tiny"}, left.append)
    )
    thread.start()
    server.welcome(1)
    yield server
    with suppress(Closed):
        server.end()
    thread.join(30)
    server.close()
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Server]:
    """Two real ranks."""
    server, pool = Server(), world(2)
    pool.start(main, server.address, TOKEN, str(folder), {"name": "tiny"})
    server.welcome(2)
    yield server
    server.end()
    pool.finish()
    server.close()


def test_a_rank_tells_what_it_does(alone: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(segment, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(segment, "SHOW_SECONDS", 0.0)
    alone.run([0], [job(1)])
    told = alone.told(0)
    kinds = [said["told"] for said, _ in told]
    assert kinds == ["step", "preview"] * STEPS + ["decoded", "made", "done"]
    assert all(said["batch"] == "video_1" for said, _ in told)
    steps = [(said, blob) for said, blob in told if said["told"] == "step"]
    assert [said["step"] for said, _ in steps] == [1, 2, 3, 4, 5]
    assert [State.from_bytes(blob).step for _, blob in steps] == [1, 2, 3, 4, 5]
    assert all(len(said["attend"]) == 1 and said["seconds"] > 0 for said, _ in steps)
    assert all(blob.startswith(b"\x89PNG") for said, blob in told if said["told"] == "preview")
    made, video = told[-2]
    assert made["name"] == "video.mp4"
    assert {"encode", "denoise", "decode", "media"} == set(made["timings"])
    assert made["about"]["frames"] == 4
    (tmp_path / "x.mp4").write_bytes(video)
    with av.open(str(tmp_path / "x.mp4")) as container:
        assert len(list(container.decode(video=0))) == 4
        assert '"seed": 1' in container.metadata["comment"]


def test_an_image_is_a_first_frame(alone: Server, tmp_path: Path) -> None:
    for kind in ("png", "webp", "jpeg"):
        (made,) = alone.made([0], [job(2, "image", format=kind)]).values()
        (tmp_path / "x").write_bytes(made)
        with Image.open(tmp_path / "x") as picture:
            assert picture.format == kind.upper()
            assert picture.size == (24, 16)


def test_a_stopped_job_goes_on(alone: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone.made([0], [job(3)])

    def wants_stop(inbox: Inbox, batch: str) -> bool:
        until(lambda: inbox._stops == batch)  # or the job could be done before it is read
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Inbox, "wants_stop", wants_stop)
        alone.run([0], [job(3)])
        alone.channels[0].send({"do": "stop", "batch": "video_3"})
        said, state = alone.told(0)[-1]
    assert said["told"] == "stopped"
    assert said["step"] < STEPS
    assert alone.made([0], [job(3)], state) == expected  # a stop is of one run only


def test_what_is_refused_leaves_the_rank_alive(alone: Server) -> None:
    for wrong in (job(4, height=17), job(4, more={"nonsense": 1})):
        alone.run([0], [wrong])
        said, _ = alone.told(0)[-1]
        assert (said["told"], said["code"]) == ("failed", "refused")
    alone.run([0], [job(4)], b"no state")
    said, _ = alone.told(0)[-1]
    assert said["code"] == "refused"
    assert "no state" in said["message"]
    assert alone.made([0], [job(4)])


def test_a_rank_without_memory_lives_on(alone: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(VideoDiT, "_patches", full)
        alone.run([0], [job(5)])
        said, _ = alone.told(0)[-1]
    assert said["code"] == "out_of_memory"
    assert "fewer frames" in said["message"]
    assert alone.made([0], [job(5)])


def test_beats(alone: Server) -> None:
    said, _ = alone.hear(0, "beat")
    assert said["rank"] == 0
    assert 0 < said["memory"] < said["limit"]
    assert 0 <= said["busy"] < 60


def test_a_rank_leaves_with_its_server(folder: Path) -> None:
    for farewell in ("exit", "close"):
        server, left = Server(), threading.Event()
        thread = threading.Thread(target=_until_left, args=(server.address, str(folder), left), daemon=True)
        thread.start()
        server.welcome(1)
        if farewell == "exit":
            server.channels[0].send({"do": "exit"})
        else:
            server.channels[0].close()
        assert left.wait(20)
        server.close()


def _until_left(address: Any, folder: str, left: threading.Event) -> None:
    main(address, TOKEN, folder, {}, lambda code: left.set() if code == 1 else None)


def test_anything_else_ends_the_process_and_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise CommError("a peer is lost")

    server, errors = Server(), []

    def live() -> None:
        try:
            main(server.address, TOKEN, str(folder), {}, lambda _: None)
        except CommError as error:
            errors.append(error)

    thread = threading.Thread(target=live)
    thread.start()
    server.welcome(1)
    monkeypatch.setattr(VideoDiT, "_patches", lost)
    server.run([0], [job(6)])
    said, _ = server.hear(0, "failed")
    assert said["batch"] is None
    assert "a peer is lost" in said["message"]
    thread.join(20)
    assert errors
    server.close()


def test_facts_of_the_model(alone: Server) -> None:
    assert alone.facts["model"] == "tiny"
    assert alone.facts["kinds"] == ["video", "image"]
    assert alone.facts["memory"] == alone.hear(0, "beat")[0]["limit"] > 0


def test_two_ranks_alone_together_and_in_turn_make_the_same(pair: Server) -> None:
    jobs = [job(1, prompt="a red circle moving left"), job(2, prompt="a blue square", guidance=3.0)]
    alone = [pair.made([rank], [each]) for rank, each in zip((0, 1), jobs, strict=True)]
    expected = alone[0] | alone[1]
    assert pair.made([0, 1], jobs) == expected
    pair.run([0], [jobs[0]])  # side by side
    pair.run([1], [jobs[1]])
    told = [*pair.told(0), *pair.told(1)]
    assert {said["job"]: blob for said, blob in told if said["told"] == "made"} == expected
    state = b""
    for step in range(1, STEPS):
        ranks = [[0, 1], [0], [1]][step % 3]
        pair.run(ranks, jobs, state)
        pair.channels[ranks[0]].send({"do": "stop", "batch": jobs[0]["id"]})
        said, blob = pair.told(ranks[0])[-1]
        if said["told"] == "done":
            break  # the stop came too late
        state = blob
    assert pair.made([0, 1], jobs, state) == expected


def test_two_ranks_show_their_attention(pair: Server) -> None:
    pair.run([0, 1], [job(7, guidance=1.0)])
    told = pair.told(0)
    timeline = next(said for said, _ in told if said["told"] == "timeline")
    assert timeline["label"] == "ulysses"
    assert {(span["rank"], span["lane"]) for span in timeline["spans"]} >= {
        (rank, lane) for rank in (0, 1) for lane in ("compute", "send", "wait")
    }
    assert min(span["start"] for span in timeline["spans"]) == 0.0
    assert all(span["start"] <= span["end"] < 10 for span in timeline["spans"])
    steps = [said for said, _ in told if said["told"] == "step"]
    assert all(len(said["attend"]) == 2 and said["imbalance"] >= 1 for said in steps)


def test_two_ranks_refuse_together(pair: Server) -> None:
    pair.run([0, 1], [job(8, width=25)])
    said, _ = pair.told(0)[-1]
    assert said["code"] == "refused"
    assert pair.made([0, 1], [job(8)])


def test_guidance_is_what_was_asked_for_also_if_it_is_none_at_all(folder: Path) -> None:
    pipe = checkpoint.load_pipeline(folder, dtype=torch.float32)
    jobs = tuple(Asked.from_json(job(at, guidance=scale)) for at, scale in enumerate((0.0, 2.5)))
    given = Work("", ("", ""), jobs).given(Model(folder, pipe, facts_of(pipe, "tiny")))
    assert given["guidance_scale"] == [0.0, 2.5]


@pytest.mark.parametrize(("gpus", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_a_dtype_that_is_not_given_is_that_of_the_device(
    gpus: bool,  # noqa: FBT001
    dtype: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Loaded(Exception):  # noqa: N818 - nothing went wrong
        pass

    def load(_: Path, dtype: torch.dtype) -> None:
        raise Loaded(str(dtype))

    monkeypatch.setattr(checkpoint, "load_pipeline", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    for given, expected in (("", dtype), ("float16", "float16")):
        with pytest.raises(Loaded, match=expected):
            Worker.load(cast("Any", SimpleNamespace(options={"dtype": given})), folder, "tiny")


def test_a_backend_that_is_given_is_used() -> None:
    own = SimpleNamespace(is_own=True, facts={"heads": 2})
    for given, (plan, backend) in {"auto": ("ulysses", "exact"), "reference": ("auto", "reference")}.items():
        how = Worker._how(cast("Any", SimpleNamespace(options={"backend": given}, model=own)), (0, 1))
        assert (how["plan"], how["backend"]) == (plan, backend)


def test_a_stop_that_came_too_late_is_forgotten_with_the_next_run() -> None:
    here, there = map(Channel, socket.socketpair())
    inbox = Inbox(here, lambda _: None)
    for said in ({"do": "stop", "batch": "a"}, {"do": "run", "batch": "b"}):
        there.send(said)
    assert inbox.next()[0]["batch"] == "b"
    assert not inbox.wants_stop("a")
    there.close()
    here.close()


def test_short_steps_are_told_of_together(alone: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "TELL_SECONDS", 1e9)
    monkeypatch.setattr(segment, "SAVE_SECONDS", 1e9)
    alone.run([0], [job(1)])
    steps = [said for said, _ in alone.told(0) if said["told"] == "step"]
    assert [(said["step"], said["steps"]) for said in steps] == [(STEPS, STEPS)]


def test_a_file_that_cannot_be_written_fails_its_batch_and_the_next_is_made(
    alone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any, **__: Any) -> bytes:
        raise RuntimeError("no codec")

    with monkeypatch.context() as broken:
        broken.setattr("weft.models.media.encoded", breaks)
        alone.run([0], [job(1)])
        said = alone.told(0)[-1][0]
        assert (said["told"], said["batch"], said["code"]) == ("failed", "video_1", "internal_error")
        assert "no codec" in said["message"]
    assert alone.made([0], [job(2)]).keys() == {"video_2"}


def test_the_next_batch_begins_while_the_last_is_written(
    alone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, begun, go = media.encoded, threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> bytes:
        begun.set()
        assert go.wait(30)
        return plain(*args, **kwargs)

    monkeypatch.setattr("weft.models.media.encoded", slow)
    alone.run([0], [job(1)])
    alone.run([0], [job(2)])
    assert begun.wait(30)
    while alone.hear(0, "step")[0]["batch"] != "video_2":
        pass  # its steps are made although nothing was written yet
    go.set()
    written = [alone.hear(0, "made")[0]["job"] for _ in range(2)]
    assert written == ["video_1", "video_2"]
    assert alone.hear(0, "done")[0]["batch"] == "video_2"
