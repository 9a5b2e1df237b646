"""ClipLoader: batches of captioned clips; which clips a step gets depends only on its number and the seed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.train.recipe import Recipe
from weft.video.dataset import HELD_OUT, ClipSource, to_tensor, vocabulary_of
from weft.video.pan import Pan
from weft.video.shapes import Shapes


def source_of(recipe: Recipe) -> ClipSource:
    config = recipe.data
    if config.set == "weft-shapes":
        return Shapes(config.frames, config.size, config.max_shapes, recipe.train.seed)
    if config.set == "weft-pan":
        max_shapes, patch = min(3, config.max_shapes), recipe.model.patch[2]
        return Pan(config.frames, config.size, patch, max_shapes, recipe.train.seed)
    folder = Path(config.path)
    if config.set == "folder":
        from weft.train.video_folder import VideoFolder

        return VideoFolder(folder, config.frames, config.size, held_out=config.held_out)
    from weft.train.latent_folder import LatentFolder

    return LatentFolder(folder, held_out=config.held_out)


class ClipLoader:
    """Batches of a source; a thread loads the next batch while the current one is trained on."""

    def __init__(
        self, source: ClipSource, *, batch: int, held_out: int, seed: int, downscale: int = 1
    ) -> None:
        self.source, self.batch, self.seed, self.downscale = source, batch, seed, downscale
        self.vocabulary, size = vocabulary_of(source), source.num_clips
        if size is not None and size <= held_out:
            raise InputError(
                f"data.held_out must be less than the number of clips, got {held_out} of {size}.",
                hint="Lower data.held_out, or add clips.",
            )
        self.num_trained = None if size is None else size - held_out  # None: the source is endless
        first = HELD_OUT if self.num_trained is None else self.num_trained
        self.held_out = range(first, first + held_out)
        self._epoch_order: tuple[int, list[int]] = -1, []
        self._prefetched: dict[tuple[int, ...], Future[tuple[Tensor, Tensor]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-data")

    def indices(self, step: int) -> list[int]:
        """Return the clip indices of a step, from step 1 on; a finite set is reshuffled every epoch."""
        samples = range((step - 1) * self.batch, step * self.batch)
        if self.num_trained is None:
            return list(samples)
        return [self._order(i // self.num_trained)[i % self.num_trained] for i in samples]

    def of_step(self, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the clips `rows` of a step: videos [B, T, C, H, W] in [-1, 1] and word ids [B, length]."""
        wanted = tuple(self.indices(step)[rows])
        prefetched = self._prefetched.pop(wanted, None)
        batch = self.load(wanted) if prefetched is None else prefetched.result()
        following = tuple(self.indices(step + 1)[rows])
        self._prefetched[following] = self._thread.submit(self.load, following)
        return batch

    def load(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        clips, captions = self.source.batch(list(indices))
        words = torch.tensor([self.vocabulary.encode(caption) for caption in captions])
        return to_tensor(clips, self.downscale), words

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _order(self, epoch: int) -> list[int]:
        if self._epoch_order[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self._epoch_order = epoch, rng.permutation(self.num_trained or 0).tolist()
        return self._epoch_order[1]
