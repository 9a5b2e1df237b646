"""Sources of captioned clips: the protocol, their vocabularies, and clips as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.video.captions import SCENE_VOCABULARY
from weft.video.vocabulary import Vocabulary

HELD_OUT = 1 << 40
"""Generated sets are endless: their clips from this index on are never trained on."""


class ClipSource(Protocol):
    """Captioned clips by index. A source with a vocabulary of its own has it as `vocabulary`."""

    @property
    def num_clips(self) -> int | None:
        """None for an endless set."""
        ...

    def batch(self, indices: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        """Return pixels uint8 [B, T, H, W, 3] or latents float32 [B, T, C, H, W], and captions."""
        ...


def vocabulary_of(source: ClipSource) -> Vocabulary:
    """Return the vocabulary of a source, or weft's own."""
    return getattr(source, "vocabulary", None) or SCENE_VOCABULARY


def to_tensor(clips: np.ndarray, downscale: int = 1) -> Tensor:
    """Return pixels as [B, T, C, H, W] from -1 to 1, downscaled; latents as they are."""
    if clips.dtype != np.uint8:
        return torch.as_tensor(clips).float()
    pixels = torch.from_numpy(clips).permute(0, 1, 4, 2, 3).float().div_(127.5).sub_(1).contiguous()
    return downscaled(pixels, downscale)


def downscaled(videos: Tensor, factor: int) -> Tensor:
    """Average squares of pixels of videos [B, T, C, H, W]: what the model makes before upscaling."""
    if factor == 1:
        return videos
    return F.avg_pool2d(videos.flatten(0, 1), factor).unflatten(0, videos.shape[:2])
