"""weft-pan: the texture moves as the camera does, and only so."""

from __future__ import annotations

import numpy as np
import pytest

from bench.quality import steadiness
from tests.video.clips import clip_of
from weft.core.errors import InputError
from weft.video.captions import SHAKING, STILL, encode, parse
from weft.video.pan import DIM, Pan, camera_motion, texture, track_camera

FORMS = [Pan(), Pan(frames=7, size=61, patch=3, seed=1), Pan(size=64, patch=4, max_shapes=1, seed=2)]


@pytest.mark.parametrize("pan", FORMS, ids=str)
def test_frames_are_the_texture_as_the_camera_sees_it(pan: Pan) -> None:
    for index in range(8):
        frames, caption = clip_of(pan, index)
        velocity = pan.velocity(index)
        assert frames.shape == (pan.frames, pan.size, pan.size, 3) and frames.dtype == np.uint8
        assert velocity.shape == (pan.frames - 1, 2)
        tokens = np.abs(velocity).max(1) / pan.patch
        assert tokens.min() >= 2 and tokens.max() <= 4
        # Noise of one in a thousand is an edge of a shape; a pixel off is a fifth of the range.
        assert steadiness(frames, velocity) > 45
        assert steadiness(frames, velocity + [1, 0]) < 35
        assert camera_motion(velocity) == parse(caption)[0].motion
        assert encode(caption)


@pytest.mark.parametrize("pan", FORMS, ids=str)
def test_the_camera_is_recovered_in_noise_too(pan: Pan) -> None:
    rng = np.random.default_rng(0)
    for index in range(8, 14):
        frames, _ = clip_of(pan, index)
        noisy = np.clip(frames + rng.normal(0, 0.05 * 255, frames.shape), 0, 255)
        for seen in (frames, noisy):
            np.testing.assert_array_equal(track_camera(seen), pan.velocity(index))


def test_some_cameras_turn_back() -> None:
    told = [parse(clip_of(Pan(), index)[1])[0].motion for index in range(40)]
    assert len(set(told)) == 5 and 5 < told.count(SHAKING) < 25
    shaken = Pan().velocity(told.index(SHAKING))
    assert (np.sign(shaken[:-1]) * np.sign(shaken[1:])).min() == -1


@pytest.mark.parametrize(
    ("velocity", "word"),
    [
        ([[0, 0]] * 5, STILL),
        ([[-4, 1]] * 5, "left"),
        ([[1, -4]] * 5, "up"),
        ([[0, 5]] * 9 + [[0, -5]], "down"),
        ([[4, 0], [-4, 0]] * 3, SHAKING),
        ([[4, 4]] * 5, SHAKING),
    ],
)
def test_the_word_for_a_way(velocity: list[list[int]], word: str) -> None:
    assert camera_motion(np.array(velocity)) == word


def test_a_batch_is_its_clips() -> None:
    pan = Pan(frames=5, size=33, seed=9)
    clips, captions = pan.batch([4, 1])
    np.testing.assert_array_equal(clips[1], clip_of(pan, 1)[0])
    assert captions == [clip_of(pan, index)[1] for index in (4, 1)]
    assert (clips[0] != clips[1]).any()


def test_the_texture_has_its_octaves_and_no_more() -> None:
    grey = texture(np.random.default_rng(0), 128, longest=32, shortest=4).mean(-1)
    assert grey.max() <= DIM and grey.std() > 10
    power = np.abs(np.fft.fft2(grey - grey.mean())) ** 2
    frequency = np.hypot(np.fft.fftfreq(128)[:, None], np.fft.fftfreq(128))
    inside = (frequency >= 1 / 33) & (frequency <= 1 / 3.9)
    assert power[inside].sum() > 0.97 * power.sum()


@pytest.mark.parametrize("wrong", [{"patch": 5}, {"patch": 0}, {"max_shapes": 4}, {"max_shapes": 0}])
def test_pans_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="frames overlap"):
        Pan(**wrong)
