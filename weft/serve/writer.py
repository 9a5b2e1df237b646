"""Writer: files of what a rank has made, written beside the next batch that it runs.

On GPUs the cores that do it are idle; on CPUs it fills the time until the server has said what comes next.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from weft import __version__
from weft.models import media
from weft.models.resume import Made
from weft.serve.errors import words
from weft.serve.jobs import Asked
from weft.serve.work import Work

Tell = Callable[..., None]
"""(message, blob) to the server."""


class Writer:
    """One batch at a time: who brings the next one waits for the last, so that frames do not pile up."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "weft-writer")
        self._last: Future[None] | None = None

    def take(self, work: Work, made: Made, about: dict[str, Any], tell: Tell) -> None:
        """`about` is of the run, which the job's document tells and its file does not.

        The ranks are free only when the last batch is written: others would wait for this one meanwhile.
        """
        if self._last is not None:
            self._last.result()
        tell({"told": "decoded", "batch": work.batch})
        self._last = self._thread.submit(_write, work, made, about, tell)


def _write(work: Work, made: Made, run: dict[str, Any], tell: Tell) -> None:
    """Each job as a file that says how it was made, but nothing that depends on the ranks."""
    try:
        for job, id, frames in zip(work.jobs, work.ids, made.frames, strict=False):
            began = time.monotonic()
            shown = frames[:1] if job.kind == "image" else frames
            data = media.encoded(job.format, shown, _about(job), fps=job.fps)
            said = {
                "told": "made", "batch": work.batch, "job": id, "name": f"{job.kind}.{job.format}",
                "timings": {**made.spent, "media": time.monotonic() - began},
                "about": {
                    "frames": len(shown), "size": f"{shown.shape[2]}x{shown.shape[1]}", "fps": job.fps, **run,
                },
            }  # fmt: skip
            tell(said, data)
        tell({"told": "done", "batch": work.batch})
    except Exception as error:
        traceback.print_exc()
        tell({"told": "failed", "batch": work.batch, "code": "internal_error", "message": words(error)})


def _about(job: Asked) -> dict[str, Any]:
    return {
        "prompt": job.prompt, "seed": job.seed, "model": job.model, "steps": job.steps,
        **({"negative": job.negative} if job.negative else {}),
        **({"guidance": job.guidance} if job.guidance is not None else {}),
        **({"more": job.more} if job.more else {}),
        "versions": {"weft": __version__, "torch": str(torch.__version__)},
    }  # fmt: skip
