"""What `bench.serving` holds a server against: the same pipeline in a loop, which serves nobody."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft import __version__
from weft.diffusers.parallelize import parallelize
from weft.generate import media
from weft.serve.load_test import PROMPT
from weft.video.pipeline import VideoPipeline
from weft.video.saved_model import shipped

FPS = 16.0
_pipes: dict[str, Any] = {}


def prepare() -> None:
    """One pipeline for this process alone, and one that it shares with the other ranks."""
    _pipes["alone"] = VideoPipeline.load(shipped())
    _pipes["shared"] = parallelize(VideoPipeline.load(shipped()), check="none")


def each(seeds: Sequence[int], steps: int) -> None:
    """Every rank makes its part of the videos, one after the other, and knows nothing of the others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in seeds[rank::world]:
        _make(_pipes["alone"], seed, steps, write=True)


def shared(seeds: Sequence[int], steps: int) -> None:
    """All ranks make every video together."""
    for seed in seeds:
        _make(_pipes["shared"], seed, steps, write=dist.get_rank() == 0)


def _make(pipe: Any, seed: int, steps: int, *, write: bool) -> None:
    dice = torch.Generator().manual_seed(seed)
    made = pipe(PROMPT, num_inference_steps=steps, generator=dice)
    if write:
        with tempfile.TemporaryDirectory() as folder:
            about = {"prompt": PROMPT, "versions": {"weft": __version__}}
            media.write(Path(folder) / "video.mp4", made.frames[0], about, fps=FPS)
