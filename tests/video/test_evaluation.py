"""Evaluation: likeness and distances as published, losses in pairs, and intervals that hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.diffusers.toys import seeded
from tests.video.clips import render
from weft.cli.main import main
from weft.core.errors import InputError
from weft.video.captions import LENGTH, WORDS
from weft.video.checker import accuracy
from weft.video.dataset import HELD_OUT, to_tensor
from weft.video.evaluation import generate_clips, held_out_loss, paired_difference
from weft.video.metrics import FEATURES, features, frechet, psnr, ssim
from weft.video.pan import Pan
from weft.video.pipeline import VideoPipeline
from weft.video.shapes import Shapes
from weft.video.transformer import DiTConfig, VideoDiT

PINNED = (-1.453274, -1.897723, -1.817434)
SOURCE = Shapes(frames=4, size=24, max_shapes=1, seed=3)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def slow_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """One channel of one frame, window by window."""
    place = np.arange(11) - 5
    window = np.exp(-(place[:, None] ** 2 + place**2) / (2 * 1.5**2))
    window /= window.sum()
    found = []
    for y in range(a.shape[0] - 10):
        for x in range(a.shape[1] - 10):
            p, q = a[y : y + 11, x : x + 11], b[y : y + 11, x : x + 11]
            mp, mq = (window * p).sum(), (window * q).sum()
            vp, vq = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum()
            both = (window * (p - mp) * (q - mq)).sum()
            top = (2 * mp * mq + 0.01**2) * (2 * both + 0.03**2)
            found.append(top / ((mp**2 + mq**2 + 0.01**2) * (vp + vq + 0.03**2)))
    return float(np.mean(found))


def test_likeness_is_as_published() -> None:
    a = np.random.default_rng(0).random((2, 3, 13, 17, 3))
    b = np.clip(a + 0.2 * noise(*a.shape, seed=1), 0, 1)
    slow = [
        np.mean([slow_ssim(x[t, ..., c], y[t, ..., c]) for t in range(3) for c in range(3)])
        for x, y in zip(a, b, strict=True)
    ]
    np.testing.assert_allclose(ssim(a, b), slow, rtol=1e-9)
    np.testing.assert_allclose(
        psnr(a, b), [-10 * np.log10(np.mean((x - y) ** 2)) for x, y in zip(a, b, strict=True)]
    )
    whole = np.round(255 * a).astype(np.uint8)
    np.testing.assert_allclose(psnr(whole, (whole // 2) * 2), psnr(whole / 255, (whole // 2) * 2 / 255))
    assert np.isinf(psnr(whole, whole)).all() and (ssim(whole, whole) == 1).all()
    for wrong in (a[:, :, :10], a[:1]):
        with pytest.raises(InputError):
            ssim(wrong, a[:, :, :10])


def normals(mean: np.ndarray, cov: np.ndarray, seed: int) -> np.ndarray:
    """As many draws as needed, of exactly this mean and covariance."""
    x = noise(60, len(mean), seed=seed)
    x -= x.mean(0)
    white = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x, rowvar=False))).T
    return white @ np.linalg.cholesky(cov).T + mean


def test_frechet_distance_of_known_normals() -> None:
    mean, other = noise(7, seed=2), noise(7, seed=3)
    mix_a, mix_b = noise(7, 7, seed=4), noise(7, 7, seed=5)
    cov_a, cov_b = mix_a @ mix_a.T + np.eye(7) / 9, mix_b @ mix_b.T + np.eye(7) / 9
    roots = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).real).sum()
    expected = ((mean - other) ** 2).sum() + np.trace(cov_a + cov_b) - 2 * roots
    a, b = normals(mean, cov_a, 6), normals(other, cov_b, 7)
    assert frechet(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet(a, a + 2) == pytest.approx(28)
    few = noise(5, 40, seed=8)  # fewer clips than features: no full rank
    assert 0 < frechet(few, noise(5, 40, seed=9)) < np.inf and frechet(few, few) == pytest.approx(0, abs=1e-6)
    with pytest.raises(InputError, match=">= 2 clips"):
        frechet(a[:1], b)


def test_features_are_the_same_everywhere_and_see_motion() -> None:
    ramp = np.arange(4 * 12 * 12 * 3).reshape(1, 4, 12, 12, 3)
    found = features((ramp % 251).astype(np.uint8))
    assert found.shape == (1, FEATURES) and FEATURES == 48
    np.testing.assert_allclose(found[0, [0, 20, 40]], PINNED, rtol=1e-4)
    np.testing.assert_allclose(features(ramp % 251 / 255), found, rtol=1e-5)
    clips = Pan(frames=6, size=24, max_shapes=1, seed=1).batch(range(150))[0]
    a, b = features(clips[:75]), features(clips[75:], batch=7)
    frozen = features(np.repeat(clips[75:, :1], 6, 1))
    assert frechet(a, frozen) > 5 * frechet(a, b)


class Told(nn.Module):
    """Answers with what it was given, times a number."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.tensor(times))
        self.modes: list[bool] = []

    def forward(self, video: Tensor, timestep: Tensor, words: Tensor) -> Tensor:
        assert len(video) == len(timestep) == len(words)
        self.modes.append(self.training)
        return video * self.times


def test_held_out_loss_is_the_flow_loss_in_pairs() -> None:
    nothing, same = Told(0.0), Told(1.0)
    times = (0.05, 0.5, 0.9)
    loss = held_out_loss(nothing, SOURCE, clips=3, timesteps=times)
    clips = to_tensor(SOURCE.batch(range(HELD_OUT, HELD_OUT + 3))[0]).double()
    weight = np.array([0.15, 0.5, 0.9]) ** -2.0
    np.testing.assert_allclose(loss, clips.square().mean((1, 2, 3, 4))[:, None].numpy() * weight, rtol=1e-5)
    # Who takes all for clean is off by t (noise - clean); the noise of a clip does not depend on how many.
    again = held_out_loss(same, SOURCE, clips=3, timesteps=times)
    np.testing.assert_array_equal(held_out_loss(same, SOURCE, clips=2, timesteps=times), again[:2])
    expected = (1 + clips.square().mean((1, 2, 3, 4)))[:, None].numpy() * weight * np.square(times)
    np.testing.assert_allclose(again, expected, rtol=0.06)
    assert (held_out_loss(same, SOURCE, clips=2, timesteps=times, seed=1) != again[:2]).all()
    assert same.training and not any(same.modes)


class Few:
    num_clips = 3

    def batch(self, indices: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        return np.stack([np.full((4, 24, 24, 3), 100 * i, np.uint8) for i in indices]), [
            "a red circle"
        ] * len(indices)


def test_a_set_that_ends_gives_its_last_clips() -> None:
    black = held_out_loss(Told(0.0), Few(), clips=3, timesteps=(1.0,))
    np.testing.assert_allclose(black[:, 0], (np.array([0, 100, 200]) / 127.5 - 1) ** 2, rtol=1e-5)
    np.testing.assert_array_equal(held_out_loss(Told(0.0), Few(), clips=2, timesteps=(1.0,)), black[1:])
    with pytest.raises(InputError, match="got 4"):
        held_out_loss(Told(0.0), Few(), clips=4)


@pytest.fixture(scope="module")
def pipe() -> VideoPipeline:
    sizes: dict[str, Any] = {"video": (4, 24, 24), "patch": (2, 4, 4), "width": 24, "depth": 1, "heads": 2}
    model: Any = seeded(VideoDiT(DiTConfig(words=len(WORDS), length=LENGTH, **sizes)), dtype=torch.float32)
    return VideoPipeline(model)


def test_generated_clips_follow_seed_and_place(pipe: VideoPipeline) -> None:
    asked = ["a red circle", "a blue star moving up", "a white square"]
    how: dict[str, Any] = {"batch": 2, "num_inference_steps": 2}
    made = generate_clips(pipe, asked, **how)
    assert made.shape == (3, 4, 24, 24, 3) and pipe.transformer.training
    np.testing.assert_array_equal(generate_clips(pipe, asked[:2], **how), made[:2])
    assert (generate_clips(pipe, asked[:2], seed=1, **how) != made[:2]).any()


def test_accuracy_of_a_pipe_that_paints_what_it_is_told() -> None:
    def paints(prompts: Sequence[str], **_: Any) -> SimpleNamespace:
        told = [prompt.replace("star", "square") for prompt in prompts]  # it knows no stars
        return SimpleNamespace(frames=np.stack([render(p, 8, 32) for p in told]))

    paints.transformer = nn.Identity()  # type: ignore[attr-defined]
    asked = ["a red circle", "a blue star moving up", "a white square moving left"]
    found = accuracy(generate_clips(paints, asked, batch=2), asked)
    assert (found.right, found.total) == (2, 3)
    assert {part: each.right for part, each in found.parts.items()} == {
        "count": 3, "color": 3, "kind": 2, "motion": 3,
    }  # fmt: skip


def test_paired_differences() -> None:
    clip = np.exp(noise(64, 1, seed=10))  # some clips are much harder than others
    a = clip * np.exp(0.01 * noise(1, 64, 8, seed=11))
    exact = paired_difference(a, 1.02 * a)
    assert exact.mean == pytest.approx(0.02) and exact.low == pytest.approx(exact.high)
    worse = paired_difference(a, 1.02 * clip * np.exp(0.01 * noise(1, 64, 8, seed=12)))
    assert 0.01 < worse.low < 0.02 < worse.high < 0.03, "pairs cancel what is hard"
    assert str(paired_difference(a, a)) == "+0.00% (+0.00% to +0.00%)"
    with pytest.raises(InputError, match="same clips"):
        paired_difference(a, a[:, :3])


def test_intervals_hold_as_often_as_they_say() -> None:
    inside = 0
    for trial in range(30):
        a, b = 1 + 0.3 * noise(2, 1, 40, seed=100 + trial)
        inside += (found := paired_difference(a, b * 1.1, seed=trial)).low < 0.1 < found.high
    assert inside >= 25


def test_seeds_are_drawn_too() -> None:
    a = 1 + 0.01 * noise(3, 64, 2, seed=13)
    b = a * np.array([1.0, 1.05, 0.95])[:, None, None]  # runs differ, clips hardly
    over = paired_difference(a, b)
    assert over.low < -0.03 and over.high > 0.03 and abs(over.mean) < 0.01
    assert paired_difference(*(x.swapaxes(0, 1).reshape(1, 64, -1) for x in (a, b))).high < 0.01


def test_the_verb(pipe: VideoPipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe.save(tmp_path)
    told = ["evaluate", str(tmp_path), "--against", str(tmp_path), "--prompts", "3", "--steps", "1"]
    with pytest.raises(SystemExit, match="0"):
        main([*told, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"]["total"] == 3 and set(found["accuracy"]["parts"]) >= {
        "count",
        "color",
        "motion",
    }
    assert found["likeness"]["ssim"] == 1 and found["loss against"]["mean"] == 0
    assert found["loss"] > 0 and found["frechet"] > found["frechet of real clips"] > 0
    with pytest.raises(SystemExit, match="0"):
        main(told)
    assert "direction" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", str(tmp_path.parent)])
