"""`weft evaluate`: how well a video model of weft's own shows what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.options import Json
from weft.cli.packages import need
from weft.core.errors import InputError

if TYPE_CHECKING:
    from weft.train.checker import Accuracy


def run(
    model_dir: Annotated[Path, typer.Argument(help="A model that weft train has made.")],
    *,
    against: Annotated[Path | None, typer.Option(help="Another one, for the same prompts and seeds.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts to make clips of, and clips held out.")] = 64,
    data: Annotated[
        str, typer.Option(help="weft-shapes or weft-pan: what it was trained on.")
    ] = "weft-shapes",
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 30,
    as_json: Json = False,
) -> None:
    """Evaluate a model: prompt accuracy, held-out loss, distance to real clips, likeness to another model.

    weft evaluate runs/shapes/model --against runs/dense/model
    """
    from weft.models.checkpoint import is_own

    for folder in (model_dir, against):
        if folder is not None and not is_own(folder):
            raise InputError(f"{folder} has no model of weft's own.", hint="Give the model/ of a run.")
    if prompts < 2 or steps < 1 or data not in ("weft-shapes", "weft-pan"):
        raise InputError(
            f"prompts={prompts}, steps={steps}, data={data}.",
            hint="Prompts are 2 or more, steps 1 or more, data is weft-shapes or weft-pan.",
        )
    need("torch", "safetensors")
    found = _measure(model_dir, against, prompts, data, steps)
    typer.echo(json.dumps(_plain(found), indent=2) if as_json else _words(found))


def _measure(model_dir: Path, against: Path | None, count: int, data: str, steps: int) -> dict[str, Any]:
    from weft.models.video import VideoPipeline
    from weft.train.checker import accuracy
    from weft.train.data import HELD_OUT, Endless
    from weft.train.evaluate import compare, generated, paired
    from weft.train.features import features, frechet
    from weft.train.pan import Pan
    from weft.train.shapes import Shapes

    pipe = VideoPipeline.load(model_dir)
    if pipe.vocabulary is not None:
        raise InputError(
            f"{model_dir} was trained on captions of its own.",
            hint="What weft-shapes and weft-pan show can be checked; other clips have to be looked at.",
        )
    (frames, size, _), patch = pipe.transformer.config.video, pipe.transformer.config.patch[2]
    source = Endless(Shapes(frames, size) if data == "weft-shapes" else Pan(frames, size, patch))
    real, captions = source.batch(range(HELD_OUT, HELD_OUT + 2 * count))
    # Two sets of real clips are as far apart as clips so few always are.
    known, others = (features(some) for some in (real[:count], real[count:]))
    asked, how = captions[:count], {"num_inference_steps": steps}
    made, loss = generated(pipe, asked, **how), _loss(pipe, source, count)
    found = {
        "accuracy": accuracy(made, asked),
        "loss": float(loss.mean()),
        "frechet": frechet(features(made), known),
        "frechet of real clips": frechet(others, known),
    }
    if against is not None:
        other = VideoPipeline.load(against)
        psnr, ssim = compare(made, generated(other, asked, **how))
        found["likeness"] = {"psnr": float(psnr.clip(max=100).mean()), "ssim": float(ssim.mean())}
        found["loss against"] = paired(_loss(other, source, count), loss)
    return found


def _loss(pipe: Any, source: Any, clips: int) -> Any:
    from weft.train.evaluate import held_out_loss

    return held_out_loss(pipe.transformer, source, clips=clips, shrink=pipe.transformer.config.upscale)


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    def one(each: Accuracy) -> dict[str, Any]:
        return {"right": each.right, "total": each.total, "low": each.low, "high": each.high}

    right, parts = found["accuracy"], {part: one(each) for part, each in found["accuracy"].parts.items()}
    others = {name: vars(x) if name == "loss against" else x for name, x in found.items()}
    return {**others, "accuracy": {**one(right), "parts": parts}}


def _words(found: dict[str, Any]) -> str:
    right: Accuracy = found["accuracy"]
    named = {"shows its prompt": right, **{f"  {part}": each for part, each in right.parts.items()}}
    lines = [
        f"{name.replace('motion', 'direction'):<18}{each.right / each.total:.1%} "
        f"({each.low:.1%} to {each.high:.1%}) of {each.total}"
        for name, each in named.items()
    ]
    lines.append(f"held-out loss     {found['loss']:.4f}")
    lines.append(f"Fréchet distance  {found['frechet']:.3f}; real clips {found['frechet of real clips']:.3f}")
    if "likeness" in found:
        near = found["likeness"]
        likeness = f"PSNR {near['psnr']:.1f} dB, SSIM {near['ssim']:.3f}"
        lines.append(f"against the other loss {found['loss against']}, {likeness}")
    return "\n".join(lines)
