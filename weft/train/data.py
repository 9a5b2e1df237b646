"""Data: the clips of a recipe, as tensors; which clips a step has depends on nothing but its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Generator, Tensor

from weft.core.errors import InputError
from weft.models import words
from weft.models.upscale import shrunk
from weft.train.pan import Pan
from weft.train.recipe import Recipe
from weft.train.shapes import Shapes

Encode = Callable[[str], list[int]]
HELD_OUT = 1 << 40
"""Clips of endless sets from here on are never trained on."""


class Source(Protocol):
    """Clips by index."""

    @property
    def size(self) -> int | None:
        """How many there are; None is no end of them."""
        ...

    def batch(self, indices: Sequence[int]) -> tuple[Any, list[str]]:
        """Pixels uint8 [B, T, H, W, 3] or latents float32 [B, T, C, H, W], and captions."""
        ...


class Endless:
    """A procedural set as a source."""

    size = None

    def __init__(self, clips: Shapes | Pan) -> None:
        self.clips = clips

    def batch(self, indices: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        return self.clips.batch(indices)


def source_of(recipe: Recipe) -> Source:
    part = recipe.data
    if part.set == "weft-shapes":
        return Endless(Shapes(part.frames, part.size, part.most, recipe.train.seed))
    if part.set == "weft-pan":
        most, patch = min(3, part.most), recipe.model.patch[2]
        return Endless(Pan(part.frames, part.size, patch, most, recipe.train.seed))
    if part.set == "folder":
        from weft.train.folder import Folder

        return Folder(Path(part.path), frames=part.frames, size=part.size)
    from weft.train.latents import Latents

    return Latents(Path(part.path))


class Clips:
    """Batches of a source, the next one made ready while the last is trained on."""

    def __init__(
        self, source: Source, *, batch: int, held_out: int, seed: int, encode: Encode, shrink: int = 1
    ) -> None:
        """`shrink`: clips have a fraction of their height and width."""
        self.source, self.count, self.seed, self.encode = source, batch, seed, encode
        self.shrink = shrink
        if source.size is not None and source.size <= held_out:
            raise InputError(
                f"There are {source.size} clips, and {held_out} of them are held out.",
                hint="Set data.held_out lower, or give more clips.",
            )
        self.trained = None if source.size is None else source.size - held_out
        first = HELD_OUT if self.trained is None else self.trained
        if hasattr(source, "border"):
            source.border = first  # type: ignore[attr-defined]
        self.held_out = range(first, first + held_out)
        self._order: tuple[int, list[int]] = -1, []
        """Of an epoch."""
        self._ahead: dict[tuple[int, ...], Future[tuple[Tensor, Tensor]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-data")

    def indices(self, step: int) -> list[int]:
        """The clips of a step; of a set that ends, each epoch has them all in an order of its own."""
        places = range((step - 1) * self.count, step * self.count)
        if self.trained is None:
            return list(places)
        return [self._shuffled(place // self.trained)[place % self.trained] for place in places]

    def of_step(self, step: int, mine: slice) -> tuple[Tensor, Tensor]:
        """Videos [B, T, C, H, W] from -1 to 1 and words [B, length]: this rank's part of a step's clips."""
        wanted = tuple(self.indices(step)[mine])
        ahead = self._ahead.pop(wanted, None)
        found = self.load(wanted) if ahead is None else ahead.result()
        following = tuple(self.indices(step + 1)[mine])
        self._ahead[following] = self._thread.submit(self.load, following)
        return found

    def load(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        clips, captions = self.source.batch(list(indices))
        return to_tensor(clips, self.shrink), torch.tensor([self.encode(caption) for caption in captions])

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _shuffled(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self._order = epoch, rng.permutation(self.trained or 0).tolist()
        return self._order[1]


def generator(*numbers: int) -> Generator:
    """Of these numbers, and no others: those that are near make noise that is not."""
    mixed = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return Generator().manual_seed(int(mixed) >> 1)


def to_tensor(clips: Any, shrink: int = 1) -> Tensor:
    """Pixels as [B, T, C, H, W] from -1 to 1; latents as they are."""
    if isinstance(clips, np.ndarray) and clips.dtype == np.uint8:
        pixels = torch.from_numpy(clips).permute(0, 1, 4, 2, 3).float().div_(127.5).sub_(1).contiguous()
        return shrunk(pixels, shrink)
    return torch.as_tensor(clips).float()


@dataclass(frozen=True)
class Captions:
    """How captions become words: those of weft, or a vocabulary that a source has of its own."""

    encode: Encode
    size: int
    length: int
    own: Any = None

    @staticmethod
    def of(source: Source) -> Captions:
        own = getattr(source, "vocabulary", None)
        if own is None:
            return Captions(words.encode, len(words.WORDS), words.LENGTH)
        return Captions(own.encode, len(own.words), own.length, own)
