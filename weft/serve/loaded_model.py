"""LoadedModel: what a rank has loaded, and how a batch becomes a call of its pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch

from weft.generate.request import Request, arguments
from weft.serve.jobs import GenerationParams
from weft.serve.messages import RunBatch
from weft.serve.model_facts import ModelFacts
from weft.video.pipeline import VideoPipeline

Pipeline = Any
"""A pipeline of Diffusers, or weft's `VideoPipeline`; they have no common class."""
WARMUP_STEPS = 3
MAX_WARMUP_FLOPS = 1e11
"""Of a step; a larger default request of a model with several kinds is not warmed up."""


@dataclass(frozen=True)
class LoadedModel:
    folder: Path
    pipe: Pipeline
    facts: ModelFacts

    @property
    def makes_videos(self) -> bool:
        return "video" in self.facts.kinds

    @property
    def is_own(self) -> bool:
        """Whether it is weft's own video model."""
        return isinstance(self.pipe, VideoPipeline)


def warmup_batches(facts: ModelFacts) -> list[RunBatch]:
    """Return batches of the default request of each kind, few enough steps of it, to run at the start."""
    batches: list[RunBatch] = []
    for kind in ("image", "video"):
        frames = facts.frames if kind == "video" else 1
        flops = 2 * facts.params * prod(facts.grid(frames, facts.height, facts.width))
        if kind not in facts.kinds or (batches and flops > MAX_WARMUP_FLOPS):
            continue
        params = GenerationParams(
            kind=kind, model=facts.model, prompt="", frames=frames, height=facts.height,
            width=facts.width, steps=WARMUP_STEPS, seed=0, guidance=facts.guidance, format="png",
        )  # fmt: skip
        batches.append(RunBatch(batch="", ids=("",), jobs=(params,)))
    return batches


def pipeline_kwargs(batch: RunBatch, model: LoadedModel) -> dict[str, Any]:
    """Return the arguments of the pipeline, with a generator for each job."""
    jobs, first = batch.jobs, batch.jobs[0]
    negative = [job.negative or "" for job in jobs]
    request = Request(
        model=model.folder, prompt="", out=Path(f"out.{first.format}"), seed=0, steps=first.steps,
        height=first.height, width=first.width, fps=first.fps, more=first.more,
        negative="" if any(negative) else None, guidance=first.guidance,
        frames=_frames(first, model.facts) if model.makes_videos else None,
        image=BytesIO(batch.images[0]) if any(batch.images) else None,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    kwargs, _ = arguments(request)
    kwargs["prompt"] = [job.prompt for job in jobs]
    if any(negative):
        kwargs["negative_prompt"] = negative
    if model.is_own and first.guidance is not None:
        kwargs["guidance_scale"] = [job.guidance for job in jobs]
    kwargs["generator"] = [torch.Generator().manual_seed(job.seed) for job in jobs]
    kwargs.pop("callback_on_step_end", None)
    return kwargs


def _frames(params: GenerationParams, facts: ModelFacts) -> int:
    """Return the frames to make: an image is the first frame of the shortest video."""
    if params.kind == "video":
        return params.frames
    return facts.first or facts.multiple[0]
