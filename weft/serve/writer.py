"""ResultWriter: encode the frames of a batch into files, while its ranks run the next batch.

On GPUs the cores that encode are idle; on CPUs it fills the time until the server sends the next batch.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from weft import __version__
from weft.generate import media
from weft.generate.resume import FinishedCall
from weft.serve.api_error import one_line
from weft.serve.jobs import GenerationParams, JsonObject
from weft.serve.messages import BatchDecoded, BatchDone, BatchFailed, FromRank, ResultMade, RunBatch

Emit = Callable[[FromRank], None]


class ResultWriter:
    """Write one batch at a time: the next waits for the last, so that frames do not pile up."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "weft-writer")
        self._last: Future[None] | None = None

    def write(self, batch: RunBatch, made: FinishedCall, emit: Emit) -> None:
        """Write the files of a batch in the background.

        The ranks become free only when the last batch is written: others would wait for this one meanwhile.
        """
        if self._last is not None:
            self._last.result()
        emit(BatchDecoded(batch=batch.batch))
        self._last = self._thread.submit(_write, batch, made, emit)


def _write(batch: RunBatch, made: FinishedCall, emit: Emit) -> None:
    try:
        for job, id, frames in zip(batch.jobs, batch.ids, made.frames, strict=False):
            began = time.monotonic()
            frames = frames[:1] if job.kind == "image" else frames
            data = media.encoded(job.format, frames, _metadata(job), fps=job.fps)
            timings = {**made.spent, "media": time.monotonic() - began}
            name = f"{job.kind}.{job.format}"
            emit(ResultMade(batch=batch.batch, job=id, name=name, timings=timings, data=data))
        emit(BatchDone(batch=batch.batch))
    except Exception as error:
        traceback.print_exc()
        emit(BatchFailed(batch=batch.batch, code="internal_error", message=one_line(error)))


def _metadata(job: GenerationParams) -> JsonObject:
    """Return the metadata of a file; nothing in it depends on the ranks."""
    return {
        "prompt": job.prompt, "seed": job.seed, "model": job.model, "steps": job.steps,
        **({"negative": job.negative} if job.negative else {}),
        **({"guidance": job.guidance} if job.guidance is not None else {}),
        **({"more": job.more} if job.more else {}),
        "versions": {"weft": __version__, "torch": str(torch.__version__)},
    }  # fmt: skip
