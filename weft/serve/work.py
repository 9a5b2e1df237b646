"""Work: what the server asks some ranks for, in the words of the pipeline that they have loaded."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch

from weft.models.request import Request, arguments
from weft.models.video import VideoPipeline
from weft.serve.jobs import Asked

WARM_STEPS = 3
LITTLE = 1e11
"""Floating-point operations of a step that every start may have time for."""


@dataclass(frozen=True)
class Model:
    """What a rank has loaded."""

    folder: Path
    pipe: Any
    facts: dict[str, Any]

    @property
    def makes_videos(self) -> bool:
        return "video" in self.facts["kinds"]

    @property
    def is_own(self) -> bool:
        return isinstance(self.pipe, VideoPipeline)


@dataclass(frozen=True)
class Work:
    """The message: a batch of jobs, from a step on."""

    batch: str
    ids: tuple[str, ...]
    jobs: tuple[Asked, ...]
    images: tuple[bytes, ...] = ()
    state: bytes = b""
    previews: bool = False

    @staticmethod
    def of(said: dict[str, Any], blob: bytes) -> Work:
        """The blob has an image for each job, then the state."""
        images: list[bytes] = []
        for size in said.get("images", ()):
            images.append(blob[:size])
            blob = blob[size:]
        return Work(
            batch=said["batch"], ids=tuple(job["id"] for job in said["jobs"]),
            jobs=tuple(Asked.from_json(job) for job in said["jobs"]), images=tuple(images), state=blob,
            previews=bool(said.get("preview")),
        )  # fmt: skip

    @staticmethod
    def warm(facts: dict[str, Any]) -> list[Work]:
        """To begin with: something small, and what is usual if that is little work."""
        found: list[Work] = []
        for kind in sorted(facts["kinds"]):
            frames = facts["frames"] if kind == "video" else 1
            extent = zip((frames, facts["height"], facts["width"]), facts["patch"], strict=True)
            flops = 2 * facts["params"] * prod(-(-size // part) for size, part in extent)
            if found and flops > LITTLE:
                continue
            asked = Asked(
                kind=kind, model=facts["model"], prompt="", frames=frames, height=facts["height"],
                width=facts["width"], steps=WARM_STEPS, seed=0, guidance=facts["guidance"], format="png",
            )  # fmt: skip
            found.append(Work("", ("",), (asked,)))
        return found

    def given(self, model: Model) -> dict[str, Any]:
        """What the pipeline is called with, each job with a generator of its own."""
        first = self.jobs[0]
        negative = [job.negative or "" for job in self.jobs]
        request = Request(
            model=model.folder, prompt="", out=Path(f"out.{first.format}"), seed=0, steps=first.steps,
            height=first.height, width=first.width, fps=first.fps, more=first.more,
            negative="" if any(negative) else None, guidance=first.guidance,
            frames=self._frames(model.facts) if model.makes_videos else None,
            image=BytesIO(self.images[0]) if any(self.images) else None,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        given, _ = arguments(request)
        given["prompt"] = [job.prompt for job in self.jobs]
        if any(negative):
            given["negative_prompt"] = negative
        if model.is_own and first.guidance is not None:
            given["guidance_scale"] = [job.guidance for job in self.jobs]
        given["generator"] = [torch.Generator().manual_seed(job.seed) for job in self.jobs]
        given.pop("callback_on_step_end", None)
        return given

    def _frames(self, facts: dict[str, Any]) -> int:
        """The least that a model can make is what an image is the first frame of."""
        if self.jobs[0].kind == "video":
            return self.jobs[0].frames
        return int(facts["first"] or facts["multiple"][0])
