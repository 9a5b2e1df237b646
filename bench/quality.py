"""Quality: what sparse attention in training costs a small video model, on weft-pan.

    python -m bench.quality [--quick] [--steps N] [--arms dense,dsv] [--seeds 0,1,2] [--out FOLDER] [--table]

The protocol, written down before the runs. Arms have the same recipe, first weights, clips, timesteps and
noise for a seed; they differ in [sparse]. All are judged by the average of their weights, with the attention
that they were trained with, on the same clips that nobody trained on, at the same timesteps and noise. An arm
is as good as dense if its held-out loss is at most MARGIN above, and if its prompts come out as often as
dense's interval says. DSV is dense until its predictors are good, the others are sparse from the first step.
Added after the first runs: the same loss with timesteps by their share in training, see `as_trained`.

A run that is cut off goes on from its checkpoint; one that has ended is in FOLDER/results.jsonl and is not
repeated. Several of these commands may work on different arms or seeds of one folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bench.quality_table import MEAN, Result, density_of, read, show
from weft.train.artifacts import swapped_weights
from weft.train.recipe import DataConfig, ModelConfig, Recipe, SaveConfig, SparseConfig, TrainConfig
from weft.train.trainer import Trainer
from weft.video.checker import accuracy
from weft.video.dataset import HELD_OUT, to_tensor
from weft.video.evaluation import generate_clips, held_out_loss
from weft.video.flow import generator, randn
from weft.video.pan import Pan, texture_mask, track_camera
from weft.video.pipeline import VideoPipeline

SEEDS = (0, 1, 2)
JUDGED = 7001  # the seed of clips that no run sees
LONG = 16384  # tokens for which the dispatcher decides: at a thousand, nothing sparse is fast
NOISY = 0.8  # the share of noise from which the camera has to be recovered
MATCHED = "window=dsv"
FORCED = 0.25


@dataclass(frozen=True)
class QualitySize:
    """Of a run and its evaluation."""

    steps: int = 1000
    batch: int = 1
    frames: int = 8
    pixels: int = 24
    width: int = 96
    depth: int = 4
    heads: int = 4
    clips: int = 48
    prompts: int = 24
    sampling: int = 10


FULL = QualitySize()
QUICK = QualitySize(steps=12, frames=4, width=32, depth=2, heads=2, clips=4, prompts=4, sampling=3)


def arms(steps: int, matched: float | None = None) -> dict[str, SparseConfig | None]:
    """What [sparse] is in each arm; 25 is a forced budget of a quarter of the keys, vsa has pooled scores.

    The dense one is watched: weft's dense kernel answers its attentions, as in the others where they are
    dense, and each is profiled, with a predictor that learns beside it.
    """
    often = max(1, steps // 100)
    dsv = SparseConfig(cost_tokens=LONG, stage1=steps // 4, profile_every=often, profile_rarely=2 * often)
    forced = replace(dsv, budget=FORCED, gate=1.0)
    window = replace(forced, method="window")
    return {
        "dense": replace(dsv, gate=0.0),
        "dsv": dsv,
        "dsv25": forced,
        "dsv25+coarse": replace(forced, coarse=True),
        "dsv25+anneal": replace(forced, anneal=steps // 4),
        "vsa25": replace(forced, method="pooled", coarse=True),
        "window25": window,
        MATCHED: None if matched is None else replace(window, budget=matched),
    }


def recipe_of(sparse: SparseConfig | None, size: QualitySize, seed: int) -> Recipe:
    return Recipe(
        model=ModelConfig(patch=(1, 2, 2), width=size.width, depth=size.depth, heads=size.heads),
        data=DataConfig(set="weft-pan", frames=size.frames, size=size.pixels, max_shapes=1, held_out=1),
        train=TrainConfig(
            steps=size.steps,
            batch=size.batch,
            lr=2e-3,
            warmup=max(1, size.steps // 20),
            floor=0.05,
            logit_mean=MEAN,
            seed=seed,
        ),
        save=SaveConfig(every=max(1, size.steps // 8), keep=1),
        sparse=sparse,
    )


def run(arm: str, sparse: SparseConfig | None, size: QualitySize, seed: int, out: Path) -> None:
    """Train, or go on; evaluate; append the result."""
    folder, began = out / f"{arm}-{seed}", time.process_time()
    resumed = (folder / "checkpoints").exists()
    trainer = Trainer(recipe_of(sparse, size, seed), folder, live=False)
    try:
        if trainer.run() < size.steps:
            sys.exit(1)  # it was told to stop
        trained = time.process_time() - began
        with swapped_weights(trainer.model, trainer.ema):
            judgement = judge(trainer, size, folder)
    finally:
        trainer.close()
    watched = density_of(folder, size.steps)
    cpu = None if resumed else trained  # else what was trained before is not in it
    record = {"arm": arm, "seed": seed, "steps": size.steps, "cpu": cpu, **judgement, **watched}
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


@torch.no_grad()
def judge(trainer: Trainer, size: QualitySize, folder: Path) -> dict[str, Any]:
    """All that is measured of a model; clips that it makes go to a file, for distances among arms."""
    pan = Pan(size.frames, size.pixels, patch=2, max_shapes=1, seed=JUDGED)
    loss = held_out_loss(trainer.model, pan, clips=size.clips)
    _, prompts = pan.batch(range(size.prompts))
    made = generate_clips(VideoPipeline(trainer.model), prompts, num_inference_steps=size.sampling)
    clips = np.round(255 * made).astype(np.uint8)
    np.save(folder / "clips.npy", clips)
    right = accuracy(clips, prompts)
    return {
        "loss": np.round(loss, 7).tolist(),
        "right": right.right,
        "total": right.total,
        "parts": {kind: [each.right, each.total] for kind, each in right.parts.items()},
        "steady": float(np.nanmean([steadiness(clip, track_camera(clip)) for clip in clips])),
        "camera": camera_errors(trainer, pan, size.clips),
    }


def steadiness(frames: np.ndarray, velocity: np.ndarray) -> float:
    """Return the PSNR in dB of each frame's texture against the previous one, shifted by `velocity`."""
    is_ground = texture_mask(frames)
    height, width = frames.shape[1:3]
    errors = []
    for t, (vx, vy) in enumerate(velocity):
        now = (slice(max(0, -vy), height - max(0, vy)), slice(max(0, -vx), width - max(0, vx)))
        then = (slice(max(0, vy), height + min(0, vy)), slice(max(0, vx), width + min(0, vx)))
        both = is_ground[t + 1][now] & is_ground[t][then]
        errors.append((frames[t + 1][now][both] / 255.0 - frames[t][then][both] / 255.0) ** 2)
    error = np.concatenate(errors)
    return float(-10 * np.log10(max(error.mean(), 1e-10))) if error.size else float("nan")


def camera_errors(trainer: Trainer, pan: Pan, clips: int) -> list[float]:
    """By clip, how far the camera's steps are off, in pixels of what a model sees in noise at one glance."""
    errors: list[float] = []
    for index in range(HELD_OUT, HELD_OUT + clips):
        pixels, captions = pan.batch([index])
        video, words = to_tensor(pixels), torch.tensor([trainer.clips.vocabulary.encode(captions[0])])
        noisy = (1 - NOISY) * video + NOISY * randn(video.shape, generator(JUDGED, index), video)
        clean = trainer.model(noisy, torch.tensor([NOISY]), words)[0]
        frames = clean.add(1).mul(127.5).clamp(0, 255).permute(0, 2, 3, 1).numpy()
        errors.append(float(np.abs(track_camera(frames) - pan.velocity(index)).mean()))
    return errors


def experiment(
    size: QualitySize, wanted: Sequence[str], seeds: Sequence[int], out: Path, console: Console
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for arm in wanted:
            done = {(result.arm, result.seed): result for result in read(out, size.steps)}
            dsv: Result | None = done.get(("dsv", seed))
            sparse = arms(size.steps, None if dsv is None else dsv.density)[arm]
            if (arm, seed) in done:
                continue
            if sparse is None:
                console.print(f"{arm}, seed {seed}: waits for dsv of this seed")
                continue
            began = time.process_time()
            run(arm, sparse, size, seed, out)
            last = read(out, size.steps)[-1]
            console.print(
                f"{arm}, seed {seed}: loss {last.loss.mean():.4f}, {time.process_time() - began:.0f} s of CPU"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny, under 50 s: shows that it works, no more")
    parser.add_argument("--steps", type=int, default=FULL.steps)
    parser.add_argument("--arms", default=",".join(arms(1)), help="names, with commas between")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--table", action="store_true", help="only show what has been run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    wanted, seeds = options.arms.split(","), [int(seed) for seed in options.seeds.split(",")]
    if strange := set(wanted) - set(arms(1)):
        parser.error(f"no arm is called {', '.join(sorted(strange))}; there are {', '.join(arms(1))}")
    torch.set_num_threads(1)  # arms and seeds are what there is to share among cores
    console = Console()
    size = replace(QUICK if options.quick else FULL, **({} if options.quick else {"steps": options.steps}))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if options.quick else options.out
        if not options.table:
            experiment(size, wanted, seeds[:1] if options.quick else seeds, out, console)
        holds = show(
            out, size.steps, Pan(size.frames, size.pixels, max_shapes=1, seed=JUDGED), console, options
        )
    sys.exit(0 if holds or options.quick else 1)


if __name__ == "__main__":
    main()
