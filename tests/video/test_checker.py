"""The checker: right about what was rendered, in noise too, and not to be fooled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.video.clips import render
from weft.core.errors import InputError
from weft.video.captions import COLORS, Phrase
from weft.video.checker import Accuracy, Judgment, accuracy, detect, judge
from weft.video.pan import Pan
from weft.video.scenes import PALETTE, Sprite, blank, paint
from weft.video.shapes import Shapes


def worn(frames: np.ndarray, seed: int) -> np.ndarray:
    """Blurred by a binomial of five pixels, with noise, from 0 to 1."""
    x = frames / 255.0
    for axis in (1, 2):
        x = sum(w / 16 * np.roll(x, k - 2, axis) for k, w in enumerate((1, 4, 6, 4, 1)))
    return x + np.random.default_rng(seed).normal(0, 0.05, x.shape)


@pytest.mark.parametrize(
    "data",
    [Shapes(max_shapes=1, seed=1), Shapes(seed=2), Shapes(frames=7, size=37, seed=3), Pan(seed=4)],
    ids=["one", "two", "small", "pan"],
)
def test_rendered_clips_show_what_their_captions_tell(data: Shapes | Pan) -> None:
    found = accuracy(*data.batch(range(60)))
    assert found.right == 60, found.mistakes


@pytest.mark.parametrize(
    "data", [Shapes(max_shapes=1, seed=5), Shapes(seed=6), Pan(size=64, patch=4, seed=7)], ids=str
)
def test_noise_and_blur_are_forgiven(data: Shapes | Pan) -> None:
    clips, captions = data.batch(range(25))
    found = accuracy([worn(clip, i) for i, clip in enumerate(clips)], captions)
    assert found.right == 25, found.mistakes


SCENE = "a red circle moving left over a blue square moving up"
WRONG = {
    "a red circle moving left": {"count": "2"},
    "a white circle moving left over a blue square moving up": {"color": "red"},
    "a red star moving left over a blue square moving up": {"kind": "circle"},
    "a red circle moving left over a blue triangle moving up": {"kind": "square"},
    "a red circle moving right over a blue square moving up": {"motion": "left"},
    "a red circle over a blue square moving up": {"motion": "left"},
    "a red circle moving left over a blue square": {"motion": "up"},
    "a red circle moving left and a blue square moving up": {"joint": "over"},
    "a blue square moving up over a red circle moving left": {"joint": "under"},
}


@pytest.mark.parametrize("caption", WRONG)
def test_one_wrong_word_is_found_and_no_other(caption: str) -> None:
    clip = render(SCENE, seed=8)
    assert all(judgement.right for judgement in judge(clip, SCENE))
    assert {j.attribute: j.detected for j in judge(clip, caption) if not j.right} == WRONG[caption]


def test_captions_of_other_clips_are_wrong() -> None:
    clips, captions = Shapes(seed=9).batch(range(60))
    found = accuracy(clips, captions[1:] + captions[:1])
    assert found.right <= 1 and found.parts["motion"].right < 40


MISMADE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "empty": np.zeros_like,
    "noise": lambda clip: np.random.default_rng(0).integers(0, 256, clip.shape).astype(np.uint8),
    "not a number": lambda clip: np.full(clip.shape, np.nan),
    "backwards": lambda clip: clip[::-1],
    "frozen": lambda clip: np.repeat(clip[:1], len(clip), 0),
    "mirrored": lambda clip: clip[:, :, ::-1],
    "turned": lambda clip: clip.swapaxes(1, 2),
    "recoloured": lambda clip: clip[..., ::-1],
    "shuffled": lambda clip: clip[np.random.default_rng(0).permutation(len(clip))],
    "gone after a third": lambda clip: np.where(np.arange(len(clip))[:, None, None, None] < 5, clip, 22),
    "stretched": lambda clip: np.repeat(clip[:, 16:48], 2, 1),
}


@pytest.mark.parametrize("how", MISMADE)
def test_mismade_clips_are_wrong(how: str) -> None:
    caption = "a red square moving left"
    shape = Sprite(Phrase("red", "square", "left"), 10.0, np.linspace([45, 33], [18, 33], 16))
    canvas = blank(1, 16, 64)
    paint(canvas, [[shape]])
    assert accuracy(canvas, [caption]).right == 1
    assert accuracy([MISMADE[how](canvas[0])], [caption]).right == 0


def moving(kind: str, path: np.ndarray) -> np.ndarray:
    canvas = blank(1, len(path), 64)
    paint(canvas, [[Sprite(Phrase("red", kind), 9.0, path)]])
    return canvas[0]


def test_what_has_no_name_gets_none() -> None:
    left = np.linspace([48, 32], [16, 32], 16)
    assert detect(moving("star", left)) == (Phrase("red", "star", "left"),)
    assert detect(moving("star", np.linspace([48, 48], [16, 16], 16)))[0].motion == ""
    assert detect(moving("star", left + np.outer([1, -1] * 8, [0, 8])))[0].motion == ""
    bar = blank(1, 16, 64)[0]
    bar[:, 8:56, 20:28] = PALETTE["red"]
    assert detect(bar) == (Phrase("red", "", "still"),)


def test_small_shapes_may_be_blurred() -> None:
    clips, captions = Shapes(frames=8, size=32, seed=16).batch(range(60))
    found = accuracy([worn(clip, i) for i, clip in enumerate(clips)], captions)
    assert found.parts["kind"].right == found.parts["kind"].total, found.mistakes


def test_two_of_one_colour_are_two() -> None:
    red = Phrase("red", "circle")
    canvas = blank(1, 4, 64)
    paint(canvas, [[Sprite(red, 7.0, np.full((4, 2), at)) for at in (16.0, 48.0)]])
    assert [phrase.color for phrase in detect(canvas[0])] == ["red", "red"]
    assert accuracy(canvas, ["a red circle"]).parts["count"].right == 0


@pytest.mark.parametrize("color", COLORS)
def test_dim_colours_keep_their_names(color: str) -> None:
    frame = render(f"a {color} circle", seed=1)
    assert [p.color for p in detect(frame * 0.7)] == [color]
    assert (
        np.linalg.norm([np.subtract(PALETTE[color], PALETTE[c]) for c in COLORS if c != color], axis=1).min()
        > 80
    )


def test_what_is_not_told_is_not_judged() -> None:
    clip = render("a red circle moving left", seed=1)
    assert [j.attribute for j in judge(clip, "a circle moving left")] == ["count", "kind", "motion"]
    with pytest.raises(InputError, match="empty caption"):
        judge(clip, "")
    with pytest.raises(InputError, match="A clip must be"):
        judge(clip[0], "a red circle")


def test_accuracy_counts_parts_and_mistakes() -> None:
    clips = [render("a red circle moving left", 8, 32, seed) for seed in range(3)]
    found = accuracy(clips, ["a red circle moving left", "a red circle moving up", "a red star moving up"])
    assert (found.right, found.total) == (1, 3)
    assert {part: each.right for part, each in found.parts.items()} == {
        "count": 3,
        "color": 3,
        "kind": 2,
        "motion": 1,
    }
    assert found.mistakes == {Judgment("motion", "up", "left"): 2, Judgment("kind", "star", "circle"): 1}
    assert str(found).startswith("33.3% (6.1% to 79.2%) of 3; count 100.0%")


def test_wilson() -> None:
    # Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for right, total, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = Accuracy(right, total)
        assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert (Accuracy(0, 0).low, Accuracy(0, 0).high) == (0, 1)
