"""Ranks as the server sees them: one in a thread of this process, and two that are real."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import av
import pytest
import torch
from PIL import Image

from tests.diffusers.toys import seeded
from tests.serve.hosting import until
from tests.worlds import world
from weft.core.errors import CommError
from weft.generate import media, pretrained
from weft.generate.resume import PipelineState
from weft.run.net.channel import Channel, Closed
from weft.run.net.listener import listen
from weft.run.net.scratch import scratch
from weft.run.net.secure import Credentials, accept
from weft.serve import executor
from weft.serve.agent import RankOptions
from weft.serve.facts import facts_of
from weft.serve.jobs import GenerationParams
from weft.serve.loaded_model import LoadedModel, pipeline_kwargs
from weft.serve.messages import (
    AttentionTimeline,
    BatchDecoded,
    BatchDone,
    BatchFailed,
    BatchMessage,
    BatchStopped,
    Beat,
    FromRank,
    Hello,
    Join,
    PreviewMade,
    RankFailed,
    Ready,
    ResultMade,
    RunBatch,
    Shutdown,
    StepDone,
    StopBatch,
    ToRank,
    decode,
    encode,
)
from weft.serve.model_facts import ModelFacts
from weft.serve.worker import Inbox, RankWorker, main
from weft.video.captions import LENGTH, WORDS
from weft.video.pipeline import VideoPipeline
from weft.video.transformer import DiTConfig, VideoDiT

TOKEN = "secret"
M = TypeVar("M", bound=FromRank)
Job = tuple[str, GenerationParams]
"""Its id, and what to make."""
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


def job(number: int, kind: str = "video", **more: Any) -> Job:
    params: dict[str, Any] = {
        "kind": kind, "model": "tiny", "prompt": "a red circle", "frames": 4 if kind == "video" else 1,
        "height": 16, "width": 24, "steps": STEPS, "seed": number, "guidance": 2.0, "fps": 8.0,
        "format": "mp4" if kind == "video" else "png",
    }  # fmt: skip
    return f"{kind}_{number}", GenerationParams(**(params | more))


class Server:
    """The other end of some ranks."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.address = str(self._stack.enter_context(scratch("test")) / "ranks")
        self.listener = self._stack.enter_context(listen(Path(self.address)))
        self.channels: dict[int, Channel] = {}
        self.listener.settimeout(60)
        self.facts: ModelFacts

    def welcome(self, ranks: int) -> None:
        for _ in range(ranks):
            channel, purpose = accept(self.listener.accept()[0], Credentials(TOKEN))
            assert purpose == "rank"
            hello = decode(*channel.receive())
            assert isinstance(hello, Hello)
            assert hello.world == ranks
            self.channels[hello.rank] = channel
        self.send([*self.channels], Join(generation=1))
        for rank in self.channels:
            self.facts = self.hear(rank, Ready).facts

    def send(self, ranks: Sequence[int], message: ToRank) -> None:
        for rank in ranks:
            self.channels[rank].send(*encode(message))

    def hear(self, rank: int, wanted: type[M]) -> M:
        """The next message of some type."""
        while not isinstance(message := decode(*self.channels[rank].receive()), wanted):
            pass
        return message

    def run(self, ranks: Sequence[int], jobs: Sequence[Job], state: bytes = b"") -> None:
        ids, params = zip(*jobs, strict=True)
        self.send(ranks, RunBatch(
            batch=ids[0], ids=ids, jobs=params, ranks=tuple(ranks), previews=True, state=state,
        ))  # fmt: skip

    def messages(self, rank: int) -> list[BatchMessage]:
        """Everything until the segment has ended."""
        received: list[BatchMessage] = []
        while not received or not isinstance(received[-1], BatchDone | BatchStopped | BatchFailed):
            received.append(self.hear(rank, BatchMessage))
        return received

    def failure(self, rank: int) -> BatchFailed:
        last = self.messages(rank)[-1]
        assert isinstance(last, BatchFailed)
        return last

    def made(self, ranks: Sequence[int], jobs: Sequence[Job], state: bytes = b"") -> dict[str, bytes]:
        self.run(ranks, jobs, state)
        received = self.messages(ranks[0])
        assert isinstance(received[-1], BatchDone), received[-1]
        return results(received)

    def end(self) -> None:
        self.send([*self.channels], Shutdown())

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self._stack.close()


def results(received: Sequence[BatchMessage]) -> dict[str, bytes]:
    return {each.job: each.data for each in received if isinstance(each, ResultMade)}


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
        target=main, args=(server.address, TOKEN, str(folder), RankOptions(name="tiny"), left.append)
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
    pool.start(main, server.address, TOKEN, str(folder), RankOptions(name="tiny"))
    server.welcome(2)
    yield server
    server.end()
    pool.finish()
    server.close()


def test_a_rank_tells_what_it_does(alone: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(executor, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(executor, "PREVIEW_SECONDS", 0.0)
    alone.run([0], [job(1)])
    received = alone.messages(0)
    kinds = [type(each) for each in received]
    assert kinds == [StepDone, PreviewMade] * STEPS + [BatchDecoded, ResultMade, BatchDone]
    assert all(each.batch == "video_1" for each in received)
    steps = [each for each in received if isinstance(each, StepDone)]
    assert [each.step for each in steps] == [1, 2, 3, 4, 5]
    assert [PipelineState.from_bytes(each.state).step for each in steps] == [1, 2, 3, 4, 5]
    assert all(len(each.attend) == 1 and each.seconds > 0 for each in steps)
    assert all(each.png.startswith(b"\x89PNG") for each in received if isinstance(each, PreviewMade))
    made = received[-2]
    assert isinstance(made, ResultMade)
    assert made.name == "video.mp4"
    assert {"encode", "denoise", "decode", "media"} == set(made.timings)
    (tmp_path / "x.mp4").write_bytes(made.data)
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
        alone.send([0], StopBatch(batch="video_3"))
        *_, step, stopped = (each for each in alone.messages(0) if isinstance(each, StepDone | BatchStopped))
    assert isinstance(stopped, BatchStopped)
    assert isinstance(step, StepDone)
    assert step.step < STEPS
    assert alone.made([0], [job(3)], step.state) == expected  # a stop is of one run only


def test_what_is_refused_leaves_the_rank_alive(alone: Server) -> None:
    for wrong in (job(4, height=17), job(4, more={"nonsense": 1})):
        alone.run([0], [wrong])
        assert alone.failure(0).code == "refused"
    alone.run([0], [job(4)], b"no state")
    failure = alone.failure(0)
    assert failure.code == "refused"
    assert "not a state" in failure.message
    assert alone.made([0], [job(4)])


def test_a_rank_without_memory_lives_on(alone: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(VideoDiT, "_patchify", full)
        alone.run([0], [job(5)])
        failure = alone.failure(0)
    assert failure.code == "out_of_memory"
    assert "fewer frames" in failure.message
    assert alone.made([0], [job(5)])


def test_beats(alone: Server) -> None:
    beat = alone.hear(0, Beat)
    assert 0 < beat.memory < beat.limit
    assert 0 <= beat.busy < 60


def test_a_rank_leaves_with_its_server(folder: Path) -> None:
    server, left = Server(), threading.Event()
    thread = threading.Thread(target=_until_left, args=(server.address, str(folder), left), daemon=True)
    thread.start()
    server.welcome(1)
    server.channels[0].close()
    assert left.wait(20)
    server.close()


def _until_left(address: Any, folder: str, left: threading.Event) -> None:
    main(address, TOKEN, folder, RankOptions(), lambda code: left.set() if code == 1 else None)


def test_anything_else_ends_the_process_and_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise CommError("a peer is lost")

    server, errors = Server(), []

    def live() -> None:
        try:
            main(server.address, TOKEN, str(folder), RankOptions(), lambda _: None)
        except CommError as error:
            errors.append(error)

    thread = threading.Thread(target=live)
    thread.start()
    server.welcome(1)
    monkeypatch.setattr(VideoDiT, "_patchify", lost)
    server.run([0], [job(6)])
    failure = server.hear(0, RankFailed)
    assert failure.rank == 0
    assert "a peer is lost" in failure.message
    thread.join(20)
    assert errors
    server.close()


def test_facts_of_the_model(alone: Server) -> None:
    assert alone.facts.model == "tiny"
    assert alone.facts.kinds == ("video", "image")
    assert alone.facts.memory == alone.hear(0, Beat).limit > 0


def test_two_ranks_alone_together_and_in_turn_make_the_same(pair: Server) -> None:
    jobs = [job(1, prompt="a red circle moving left"), job(2, prompt="a blue square", guidance=3.0)]
    alone = [pair.made([rank], [each]) for rank, each in zip((0, 1), jobs, strict=True)]
    expected = alone[0] | alone[1]
    assert pair.made([0, 1], jobs) == expected
    pair.run([0], [jobs[0]])  # side by side
    pair.run([1], [jobs[1]])
    assert results([*pair.messages(0), *pair.messages(1)]) == expected
    state = b""
    for step in range(1, STEPS):
        ranks = [[0, 1], [0], [1]][step % 3]
        pair.run(ranks, jobs, state)
        pair.send(ranks[:1], StopBatch(batch=jobs[0][0]))
        received = pair.messages(ranks[0])
        if not isinstance(received[-1], BatchStopped):
            break  # the stop came too late
        state = [each.state for each in received if isinstance(each, StepDone)][-1]
    assert pair.made([0, 1], jobs, state) == expected


def test_two_ranks_show_their_attention(pair: Server) -> None:
    pair.run([0, 1], [job(7, guidance=1.0)])
    received = pair.messages(0)
    timeline = next(each for each in received if isinstance(each, AttentionTimeline))
    assert timeline.label == "ulysses"
    assert {(span.rank, span.lane) for span in timeline.spans} >= {
        (rank, lane) for rank in (0, 1) for lane in ("compute", "send", "wait")
    }
    assert min(span.start for span in timeline.spans) == 0.0
    assert all(span.start <= span.end < 10 for span in timeline.spans)
    steps = [each for each in received if isinstance(each, StepDone)]
    assert all(len(each.attend) == 2 and each.imbalance and each.imbalance >= 1 for each in steps)


def test_attention_of_one_rank_is_shown_without_that_of_the_other_half(pair: Server) -> None:
    pair.run([0, 1], [job(7, guidance=2.0)])  # each rank has one branch of guidance, and no messages
    timeline = next(each for each in pair.messages(0) if isinstance(each, AttentionTimeline))
    assert timeline.label == "alone"
    assert {span.rank for span in timeline.spans} == {0}


def test_two_ranks_refuse_together(pair: Server) -> None:
    pair.run([0, 1], [job(8, width=25)])
    assert pair.failure(0).code == "refused"
    assert pair.made([0, 1], [job(8)])


def test_guidance_is_what_was_asked_for_also_if_it_is_none_at_all(folder: Path) -> None:
    pipe = pretrained.load_pipeline(folder, dtype=torch.float32)
    jobs = tuple(job(at, guidance=scale)[1] for at, scale in enumerate((0.0, 2.5)))
    batch = RunBatch(batch="", ids=("", ""), jobs=jobs)
    kwargs = pipeline_kwargs(batch, LoadedModel(folder, pipe, facts_of(pipe, "tiny")))
    assert kwargs["guidance_scale"] == [0.0, 2.5]


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

    monkeypatch.setattr(pretrained, "load_pipeline", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    for given, expected in (("", dtype), ("float16", "float16")):
        with pytest.raises(Loaded, match=expected):
            RankWorker.load(cast("Any", SimpleNamespace(options=RankOptions(dtype=given))), folder, "tiny")


def test_a_backend_that_is_given_is_used() -> None:
    own = SimpleNamespace(is_own=True, facts=SimpleNamespace(heads=2))
    for given, (plan, backend) in {"auto": ("ulysses", "exact"), "reference": ("auto", "reference")}.items():
        worker = cast("Any", SimpleNamespace(options=RankOptions(backend=given), model=own))
        assert RankWorker._plan(worker, (0, 1)) == (plan, backend)


def test_a_stop_that_came_too_late_is_forgotten_with_the_next_run() -> None:
    here, there = map(Channel, socket.socketpair())
    inbox = Inbox(here, lambda _: None)
    run = RunBatch(batch="b", ids=(), jobs=())
    for message in (StopBatch(batch="a"), run):
        there.send(*encode(message))
    assert inbox.next() == run
    assert not inbox.wants_stop("a")
    there.close()
    here.close()


def test_short_steps_are_told_of_together(alone: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "REPORT_SECONDS", 1e9)
    monkeypatch.setattr(executor, "SAVE_SECONDS", 1e9)
    alone.run([0], [job(1)])
    steps = [each for each in alone.messages(0) if isinstance(each, StepDone)]
    assert [(each.step, each.steps) for each in steps] == [(STEPS, STEPS)]


def test_a_file_that_cannot_be_written_fails_its_batch_and_the_next_is_made(
    alone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any, **__: Any) -> bytes:
        raise RuntimeError("no codec")

    with monkeypatch.context() as broken:
        broken.setattr("weft.generate.media.encoded", breaks)
        alone.run([0], [job(1)])
        failure = alone.failure(0)
        assert (failure.batch, failure.code) == ("video_1", "internal_error")
        assert "no codec" in failure.message
    assert alone.made([0], [job(2)]).keys() == {"video_2"}


def test_the_next_batch_begins_while_the_last_is_written(
    alone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, begun, go = media.encoded, threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> bytes:
        begun.set()
        assert go.wait(30)
        return plain(*args, **kwargs)

    monkeypatch.setattr("weft.generate.media.encoded", slow)
    alone.run([0], [job(1)])
    alone.run([0], [job(2)])
    assert begun.wait(30)
    while alone.hear(0, StepDone).batch != "video_2":
        pass  # its steps are made although nothing was written yet
    go.set()
    written = [alone.hear(0, ResultMade).job for _ in range(2)]
    assert written == ["video_1", "video_2"]
    assert alone.hear(0, BatchDone).batch == "video_2"
