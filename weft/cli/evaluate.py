"""`weft evaluate`: evaluate a VideoPipeline on weft's own data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from weft.cli.options import Json
from weft.cli.packages import need
from weft.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from weft.video.checker import Accuracy
    from weft.video.dataset import ClipSource
    from weft.video.evaluation import RelativeDifference
    from weft.video.pipeline import VideoPipeline

Evaluation = TypedDict(
    "Evaluation",
    {
        "accuracy": "Accuracy",
        "loss": float,
        "frechet": float,
        "frechet of real clips": float,
        "likeness": "dict[str, float] | None",
        "loss against": "RelativeDifference | None",
    },
)


def run(
    model_dir: Annotated[Path, typer.Argument(help="The model/ of a run of weft train.")],
    *,
    against: Annotated[Path | None, typer.Option(help="Another one, for the same prompts and seeds.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts to generate, and held-out clips.")] = 64,
    data: Annotated[
        str, typer.Option(help="weft-shapes or weft-pan: what it was trained on.")
    ] = "weft-shapes",
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 30,
    as_json: Json = False,
) -> None:
    """Evaluate a model: prompt accuracy, held-out loss, distance to real clips, similarity to another model.

    weft evaluate runs/shapes/model --against runs/dense/model
    """
    from weft.video.saved_model import is_own

    for folder in (model_dir, against):
        if folder is not None and not is_own(folder):
            raise InputError(f"{folder} has no model of weft's own.", hint="Give the model/ of a run.")
    if prompts < 2 or steps < 1 or data not in ("weft-shapes", "weft-pan"):
        raise InputError(
            f"--prompts={prompts}, --steps={steps}, --data={data}.",
            hint="--prompts must be >= 2, --steps >= 1, and --data weft-shapes or weft-pan.",
        )
    need("torch", "safetensors")
    evaluation = _evaluate(model_dir, against, prompts, data, steps)
    typer.echo(json.dumps(_to_json(evaluation), indent=2) if as_json else _summary(evaluation))


def _evaluate(model_dir: Path, against: Path | None, count: int, data: str, steps: int) -> Evaluation:
    from weft.video.checker import accuracy
    from weft.video.dataset import HELD_OUT
    from weft.video.evaluation import generate_clips, paired_difference
    from weft.video.metrics import features, frechet, psnr, ssim
    from weft.video.pan import Pan
    from weft.video.pipeline import VideoPipeline
    from weft.video.shapes import Shapes

    pipe = VideoPipeline.load(model_dir)
    if pipe.vocabulary is not None:
        raise InputError(
            f"{model_dir} was trained on captions of its own.",
            hint="Only models of weft-shapes and weft-pan can be evaluated.",
        )
    (frames, size, _), patch = pipe.transformer.config.video, pipe.transformer.config.patch[2]
    source = Shapes(frames, size) if data == "weft-shapes" else Pan(frames, size, patch)
    real, captions = source.batch(range(HELD_OUT, HELD_OUT + 2 * count))
    # The distance of two sets of real clips: the least that so few clips can have.
    reference, others = (features(clips) for clips in (real[:count], real[count:]))
    prompts = captions[:count]
    clips, loss = generate_clips(pipe, prompts, num_inference_steps=steps), _loss(pipe, source, count)
    likeness, difference = None, None
    if against is not None:
        other = VideoPipeline.load(against)
        counterparts = generate_clips(other, prompts, num_inference_steps=steps)
        decibels = psnr(clips, counterparts).clip(max=100)
        likeness = {"psnr": float(decibels.mean()), "ssim": float(ssim(clips, counterparts).mean())}
        difference = paired_difference(_loss(other, source, count)[None], loss[None])
    return {
        "accuracy": accuracy(clips, prompts),
        "loss": float(loss.mean()),
        "frechet": frechet(features(clips), reference),
        "frechet of real clips": frechet(others, reference),
        "likeness": likeness,
        "loss against": difference,
    }


def _loss(pipe: VideoPipeline, source: ClipSource, clips: int) -> np.ndarray:
    from weft.video.evaluation import held_out_loss

    return held_out_loss(pipe.transformer, source, clips=clips, downscale=pipe.transformer.config.upscale)


def _to_json(evaluation: Evaluation) -> dict[str, object]:
    def plain(each: Accuracy) -> dict[str, float]:
        return {"right": each.right, "total": each.total, "low": each.low, "high": each.high}

    right = evaluation["accuracy"]
    parts = {name: plain(each) for name, each in right.parts.items()}
    others = {name: getattr(x, "__dict__", x) for name, x in evaluation.items() if x is not None}
    return {**others, "accuracy": {**plain(right), "parts": parts}}


def _summary(evaluation: Evaluation) -> str:
    right = evaluation["accuracy"]
    named = {"shows its prompt": right, **{f"  {name}": each for name, each in right.parts.items()}}
    lines = [
        f"{name.replace('motion', 'direction'):<18}{each.right / each.total:.1%} "
        f"({each.low:.1%} to {each.high:.1%}) of {each.total}"
        for name, each in named.items()
    ]
    real = evaluation["frechet of real clips"]
    lines.append(f"held-out loss     {evaluation['loss']:.4f}")
    lines.append(f"Fréchet distance  {evaluation['frechet']:.3f}; real clips {real:.3f}")
    if (likeness := evaluation["likeness"]) is not None:
        text = f"PSNR {likeness['psnr']:.1f} dB, SSIM {likeness['ssim']:.3f}"
        lines.append(f"against the other loss {evaluation['loss against']}, {text}")
    return "\n".join(lines)
