"""What is written can be read back, is large enough to be seen, and says how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.video.clips import render
from weft.generate import media

av = pytest.importorskip("av")
Image: Any = pytest.importorskip("PIL.Image")

ABOUT = {"prompt": "a löom", "seed": 7, "versions": {"weft": "1"}}
CLIP = render("a red circle moving left over a blue square", frames=5, seed=1)


def shown(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def decibels(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / np.mean((found.astype(float) - wanted) ** 2)))


@pytest.mark.parametrize(("name", "least"), [("ball.mp4", 42), ("ball.GIF", 55)])
def test_small_videos_are_enlarged_and_keep_their_colours(tmp_path, name, least) -> None:
    media.write(tmp_path / name, CLIP / 255, ABOUT, fps=16)
    found = shown(tmp_path / name)
    assert found.shape == (5, 256, 256, 3)
    # Without enlarging, the MP4 has 33.
    assert decibels(found, CLIP.repeat(4, 1).repeat(4, 2)) > least


@pytest.mark.parametrize("shape", [(2, 131, 257), (1, 7, 9)])
def test_sizes_need_not_be_even(tmp_path, shape) -> None:
    path, tone = tmp_path / "odd.mp4", np.full((*shape, 3), 0.5)
    media.write(path, tone, ABOUT, fps=8)
    found, times = shown(path), max(1, 256 // shape[1])
    assert [size - times * own for size, own in zip(found.shape[1:3], shape[1:], strict=True)] == [
        times * own % 2 for own in shape[1:]
    ]
    assert len(found) == len(tone) and np.abs(found - 128.0).max() <= 3


def test_a_gif_keeps_its_pace_and_its_comment(tmp_path) -> None:
    path, lengths = tmp_path / "ball.gif", []
    media.write(path, CLIP / 255, ABOUT, fps=16)
    with Image.open(path) as image:
        assert json.loads(image.info["comment"]) == ABOUT
        assert image.info["loop"] == 0
        for i in range(image.n_frames):
            image.seek(i)
            lengths.append(image.info["duration"])
    assert lengths == [60, 60, 70, 60, 60]  # 5 frames at 16 a second are 312 ms
    media.write(path, CLIP / 255, ABOUT, fps=90)
    with Image.open(path) as image:
        assert image.info["duration"] == 20


def test_an_mp4_says_which_colours_it_has(tmp_path) -> None:
    media.write(tmp_path / "ball.mp4", CLIP / 255, ABOUT, fps=16)
    with av.open(str(tmp_path / "ball.mp4")) as container:
        assert next(container.decode(video=0)).colorspace == 6
        assert json.loads(container.metadata["comment"]) == ABOUT


def test_a_png_of_one_frame_is_that_frame(tmp_path) -> None:
    media.write(tmp_path / "a.png", CLIP[:1] / 255, ABOUT, fps=16)
    with Image.open(tmp_path / "a.png") as image:
        assert np.array_equal(np.asarray(image), CLIP[0])


def test_a_png_of_a_video_is_a_sheet(tmp_path) -> None:
    media.write(tmp_path / "a.png", CLIP / 255, ABOUT, fps=16)
    with Image.open(tmp_path / "a.png") as image:
        assert json.loads(image.text["Comment"]) == ABOUT
        page = np.asarray(image)
    assert page.shape == (2 * 132 + 4, 3 * 132 + 4, 3)
    assert np.array_equal(page[136:264:2, 136:264:2], CLIP[4]) and np.array_equal(
        page[5:132:2, 5:132:2], CLIP[0]
    )
    assert (page[134:, 266:] == 255).all()  # there is no sixth


def test_a_sheet_of_many_has_the_first_and_the_last(tmp_path) -> None:
    frames = np.arange(101)[:, None, None, None] * np.ones((2, 3, 3)) / 255
    media.write(tmp_path / "a.png", frames, ABOUT, fps=16)
    with Image.open(tmp_path / "a.png") as image:
        page = np.asarray(image)
    tones = np.unique(page[page != 255])
    assert len(tones) == 16 and tones[[0, -1]].tolist() == [0, 100]
    assert set(np.diff(tones.astype(int))) == {6, 7}
