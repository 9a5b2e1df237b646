"""Scenes: words and pixels that say the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.video.clips import render
from weft.core.errors import InputError
from weft.video.captions import COLORS, JOINTS, KINDS, LENGTH, Phrase, encode, parse, spell
from weft.video.scenes import (
    BACKGROUND,
    PALETTE,
    STEPS,
    Sprite,
    blank,
    coverage,
    paint,
    place,
    unmix,
)

shapes = st.builds(Phrase, *map(st.sampled_from, (COLORS, KINDS, tuple(STEPS))))


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Phrase, ...]:
    first, *others = draw(st.lists(shapes, min_size=1, max_size=2, unique_by=lambda shape: shape.color))
    joint = draw(st.sampled_from(JOINTS)) if others else ""
    assume(joint != "over" or first.motion != others[0].motion)
    return replace(first, joint=joint), *others


@given(scenes())
def test_a_caption_says_all_of_a_scene(scene: tuple[Phrase, ...]) -> None:
    assert parse(spell(scene)) == scene
    assert parse(spell(scene).upper() + "!") == scene
    assert len(encode(spell(scene))) == LENGTH


def test_captions_are_english() -> None:
    scene = Phrase("orange", "star", "up", "over"), Phrase("blue", "square", "still")
    assert spell(scene) == "an orange star moving up over a blue square"


@settings(max_examples=60)
@given(scenes(), st.sampled_from([(16, 64), (4, 24), (7, 37)]), st.integers(0, 2**32))
def test_what_moves_moves_as_told_and_stays_in_sight(
    scene: tuple[Phrase, ...], form: tuple[int, int], seed: int
) -> None:
    frames, size = form
    sprites = place(scene, frames, size, np.random.default_rng(seed))
    assert tuple(sprite.shape for sprite in sprites) == scene
    for sprite in sprites:
        assert sprite.path.shape == (frames, 2)
        assert sprite.path.min() >= sprite.reach + 0.99 and sprite.path.max() <= size - sprite.reach - 0.99
        steps = np.diff(sprite.path, axis=0) / size * (frames - 1)
        np.testing.assert_allclose(steps, np.broadcast_to(steps[0], steps.shape), atol=1e-9)
        np.testing.assert_array_equal(np.sign(np.round(steps[0], 9)), STEPS[sprite.shape.motion])
        assert sprite.shape.motion == "still" or np.abs(steps).max() > 0.29
    if len(sprites) == 2:
        gap = np.linalg.norm(sprites[0].path - sprites[1].path, axis=1)
        apart = sum(sprite.reach for sprite in sprites)
        if scene[0].joint == "and":
            assert gap.min() > apart
        else:
            assert gap.min() < apart / 2 and (gap > apart).mean() >= 0.25


def test_over_puts_the_first_in_front() -> None:
    path = np.full((4, 2), 32.0)
    red, blue = (Sprite(Phrase(c, "circle"), r, path) for c, r in (("red", 6.0), ("blue", 12.0)))
    for order, middle in (((red, blue), "red"), ((blue, red), "blue")):
        canvas = blank(1, 4, 64)
        paint(canvas, [order])
        assert tuple(canvas[0, 2, 32, 32]) == PALETTE[middle]
        assert tuple(canvas[0, 2, 32, 41]) == PALETTE["blue"]
        assert tuple(canvas[0, 2, 0, 0]) == BACKGROUND


AREAS = {"circle": np.pi, "square": 1.8**2, "triangle": 0.69**2 * 27**0.5, "star": 1.1226 * 1.4886**2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [0.0, 0.37])
def test_edges_are_smooth_and_areas_exact(kind: str, shift: float) -> None:
    x = np.arange(-40, 41) + shift
    cover = coverage(kind, x, x[:, None] - 2 * shift, 17.0)
    assert cover.sum() == pytest.approx(AREAS[kind] * 17**2, rel=0.01)
    assert ((cover > 0.1) & (cover < 0.9)).sum() > (20 if kind != "square" or shift else -1)
    # Upright: symmetric from left to right; the tip of a triangle and of a star is above.
    if not shift:
        np.testing.assert_allclose(cover, cover[:, ::-1], atol=1e-4)
        top, bottom = cover[: 40 - 20].sum(), cover[41 + 20 :].sum()
        assert (top > bottom) == (kind in ("triangle", "star"))


def test_a_seed_is_a_clip() -> None:
    caption = "a red circle moving left over a blue square"
    first, again, other = (render(caption, 5, 32, seed) for seed in (3, 3, 4))
    assert first.shape == (5, 32, 32, 3) and first.dtype == np.uint8
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("form", [(3, 64), (16, 23)])
def test_too_small_to_show(form: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="A scene needs"):
        render("a red star", *form)


def test_unmix_undoes_a_mixture() -> None:
    for index, color in enumerate(COLORS):
        for share in (0.3, 0.5, 1.0):
            pixel = np.array(BACKGROUND) + share * (np.array(PALETTE[color]) - BACKGROUND)
            found, cover = unmix(pixel[None])
            assert found[0] == index and cover[0] == pytest.approx(share, abs=1e-5)
