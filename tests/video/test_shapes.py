"""weft-shapes: the same clip for the same number, and every word in fair measure."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.video.clips import clip_of
from weft.core.errors import InputError
from weft.video.captions import COLORS, JOINTS, KINDS, parse, spell
from weft.video.scenes import STEPS
from weft.video.shapes import Shapes, draw


def test_alone_or_in_a_batch_a_clip_is_the_same() -> None:
    data, order = Shapes(frames=7, size=37, seed=5), [11, 2, 5, 2]
    clips, captions = data.batch(order)
    assert clips.shape == (4, 7, 37, 37, 3) and clips.dtype == np.uint8
    for index, clip, caption in zip(order, clips, captions, strict=True):
        alone, told = clip_of(data, index)
        np.testing.assert_array_equal(alone, clip)
        assert told == caption == spell(parse(caption))
    assert (clips[0] != clips[2]).any()
    assert (clip_of(Shapes(frames=7, size=37, seed=6), 2)[0] != clips[1]).any()


def test_every_word_is_as_likely_as_its_peers() -> None:
    rng = np.random.default_rng(0)
    told = [draw(rng, 2) for _ in range(2000)]
    for part, words in (("color", COLORS), ("kind", KINDS), ("motion", tuple(STEPS))):
        counts = Counter(getattr(phrase, part) for phrases in told for phrase in phrases)
        assert set(counts) == set(words)
        assert max(counts.values()) < 1.25 * min(counts.values())
    assert 900 < sum(len(phrases) == 2 for phrases in told) < 1100
    assert {phrases[0].joint for phrases in told} == {"", *JOINTS}


def test_one_shape_if_one_is_asked_for() -> None:
    assert all(" and " not in c and " over " not in c for c in Shapes(4, 24, 1).batch(range(30))[1])
    with pytest.raises(InputError, match="max_shapes .* got 3"):
        Shapes(max_shapes=3)
