"""Ranks that are threads and make nothing: what the engine's tests talk to instead of torch's processes."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from contextlib import suppress
from typing import Any

from weft.core.errors import CommError
from weft.run.net.secure import connect
from weft.serve.jobs import GenerationParams
from weft.serve.messages import (
    BatchDone,
    BatchStopped,
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
from weft.serve.supervisor import RankSupervisor

FACTS = ModelFacts(
    model="toy", pipeline="Toy", kinds=("video", "image"), frames=16, height=64, width=64,
    multiple=(4, 8, 8), steps=10, guidance=2.0, fps=8.0, heads=8, head_dim=32, depth=6, width_model=256,
    patch=(4, 8, 8), text_tokens=8, params=5_700_000,
    takes=("prompt", "negative_prompt", "guidance_scale", "image"),
)  # fmt: skip


class ThreadRanks(RankSupervisor):
    """Starts threads where `Ranks` starts an agent; `fail(number)` is what SIGKILL is to a process."""

    broken = ""
    """They cannot be imported (before `hello`), or not load the model (after `join`)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.threads: dict[int, _Rank] = {}
        self.pace, self.poison = 0.002, ""
        self.paces: dict[str, float] = {}
        """Seconds of a step, of jobs of this prompt."""
        self.segments: list[tuple[str, tuple[int, ...], int]] = []
        """(batch, ranks, first step) of each that began."""

    def _start_agent(self) -> None:
        for number in range(self.world):
            self._start(number)

    def _start(self, number: int) -> None:
        self.threads[number] = _Rank(self, number)

    def check(self) -> None:
        for number, rank in list(self.threads.items()):
            if not rank.is_alive() and not self._closing:
                self._start(number)

    def fail(self, number: int) -> None:
        self.threads[number].end()


class _Rank(threading.Thread):
    def __init__(self, ranks: ThreadRanks, number: int) -> None:
        super().__init__(daemon=True)
        self.ranks, self.number, self.stops = ranks, number, set()
        self.gone = threading.Event()
        self.commands: queue.Queue[FromRank | ToRank] = queue.Queue()
        self.channel = connect(ranks.address, ranks._token, "rank")
        self.start()

    def end(self) -> None:
        self.gone.set()
        self.channel.close()
        self.commands.put(Shutdown())

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        failed = RankFailed(rank=self.number, message="The toy is broken.")
        with suppress(CommError, OSError):
            if self.ranks.broken == "before":
                self._emit(failed)
                return
            self._emit(Hello(rank=self.number, world=self.ranks.world, pid=0, host="threads"))
            while not isinstance(message := self.commands.get(), Shutdown):
                if isinstance(message, Join):
                    if self.ranks.broken:
                        self._emit(failed)
                        break
                    self._emit(Ready(facts=FACTS))
                elif isinstance(message, RunBatch):
                    self._run_batch(message)
        self.channel.close()

    def _read(self) -> None:
        try:
            while True:
                message = decode(*self.channel.receive())
                if isinstance(message, StopBatch):
                    self.stops.add(message.batch)
                else:
                    self.commands.put(message)
        except (CommError, OSError):
            pass
        self.end()

    def _emit(self, message: FromRank) -> None:
        self.channel.send(*encode(message))

    def _run_batch(self, run: RunBatch) -> None:
        """Only the leader works: the others are taken by nobody else as long as it does."""
        batch, ids, jobs, steps = run.batch, run.ids, run.jobs, run.jobs[0].steps
        if self.number != run.ranks[0]:
            return
        self.ranks.segments.append((batch, run.ranks, run.step))
        assert not run.step or json.loads(run.state) == [*ids, run.step], "another state than its own"
        for step in range(run.step + 1, steps + 1):
            pace = self.ranks.paces.get(jobs[0].prompt, self.ranks.pace)
            if self.gone.wait(pace / len(run.ranks)):
                raise CommError("ended in a step")
            if self.ranks.poison and self.ranks.poison in jobs[0].prompt:
                self.end()
                raise CommError("poison")
            state = json.dumps([*ids, step]).encode()
            self._emit(StepDone(batch=batch, step=step, seconds=pace, imbalance=1.0, state=state))
            for id in ids:
                self._emit(PreviewMade(batch=batch, job=id, step=step, png=b"png%d" % step))
            if batch in self.stops and step < steps:
                self.stops.discard(batch)
                self._emit(BatchStopped(batch=batch))
                return
        for id, job in zip(ids, jobs, strict=True):
            timings = {"encode": 0.0, "denoise": 0.1, "decode": 0.0}
            name = "video.mp4" if job.kind == "video" else "image.png"
            self._emit(ResultMade(batch=batch, job=id, name=name, timings=timings, data=made(job)))
        self.stops.discard(batch)
        self._emit(BatchDone(batch=batch))


def made(params: GenerationParams) -> bytes:
    """What comes of a request: it depends on that alone."""
    return hashlib.sha256(json.dumps([params.prompt, params.seed]).encode()).digest()
