"""Request: what `weft generate` is asked for, in the words of the pipeline that is to make it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.core.errors import InputError
from weft.core.files import read_json
from weft.models.checkpoint import pipeline_class
from weft.models.media import VIDEOS

FPS = 16.0
NAMES = {
    "negative": ("negative_prompt",),
    "width": ("width",),
    "height": ("height",),
    "frames": ("num_frames", "video_length"),
    "steps": ("num_inference_steps",),
    "image": ("image",),
}
"""What pipelines call an option."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate; None is the pipeline's own default."""

    model: Path
    prompt: str
    out: Path
    seed: int
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    steps: int | None = None
    negative: str | None = None
    guidance: float | None = None
    image: Path | None = None
    fps: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of this pipeline only, by its own names."""
    tiling: bool = False
    """Decode in tiles, each on one rank."""
    dtype: str = "float32"
    plan: str = "auto"
    sparse: str | None = None
    cfg: str = "auto"
    check: str = "first"
    backend: str = "auto"
    quiet: bool = False


def arguments(request: Request, on_step: Any = None) -> tuple[dict[str, Any], float]:
    """What the pipeline is to be called with, and frames per second; refuses what it does not take."""
    pipeline = pipeline_class(request.model)
    takes = inspect.signature(pipeline.__call__).parameters
    asked = {name: value for name in NAMES if (value := getattr(request, name)) is not None}
    given: dict[str, Any] = {"prompt": request.prompt, "output_type": "np", "return_dict": True}
    for option, value in asked.items():
        name = next((name for name in NAMES[option] if name in takes), None)
        if name is None:
            raise _unknown(pipeline, f"--{option}", takes)
        given[name] = value
    if unknown := [name for name in request.more if name not in takes]:
        raise _unknown(pipeline, unknown[0], takes)
    given |= request.more
    if request.guidance is not None:
        name = _guidance(request.model, takes)
        if name not in takes:
            raise _unknown(pipeline, "--guidance", takes)
        given[name] = request.guidance
    _check_negative(given, takes)
    _check_kind(request, pipeline, takes)
    if request.image is not None:
        from PIL import Image

        given["image"] = Image.open(request.image).convert("RGB")
    if "frame_rate" in takes and request.fps is not None:
        given["frame_rate"] = request.fps
    if "callback_on_step_end" in takes:
        given["callback_on_step_end"] = on_step
    own = takes["frame_rate"].default if "frame_rate" in takes else FPS
    return given, float(request.fps or own)


def _unknown(pipeline: Any, name: str, takes: Mapping[str, Any]) -> InputError:
    own = [
        name for name in takes if name not in ("self", "prompt", "generator", "return_dict", "output_type")
    ]
    return InputError(f"A {pipeline.__name__} takes no {name}.", hint=f"It takes {', '.join(own)}.")


def _guidance(model: Path, takes: Mapping[str, Any]) -> str:
    """Guidance that was distilled into a model is another argument than that of two branches."""
    config = model / "transformer" / "config.json"
    distilled = config.is_file() and read_json(config).get("guidance_embeds")
    return "true_cfg_scale" if "true_cfg_scale" in takes and not distilled else "guidance_scale"


def _check_negative(given: Mapping[str, Any], takes: Mapping[str, Any]) -> None:
    """A pipeline with distilled guidance leaves out the negative prompt without a word."""
    if "negative_prompt" in given and "true_cfg_scale" in takes:
        scale = given.get("true_cfg_scale", takes["true_cfg_scale"].default)
        if scale <= 1:
            raise InputError(
                f"This pipeline uses no negative prompt with true_cfg_scale={scale}.",
                hint="Add --set true_cfg_scale=4, or leave out --negative.",
            )


def _check_kind(request: Request, pipeline: Any, takes: Mapping[str, Any]) -> None:
    is_video = any(name in takes for name in NAMES["frames"])
    if not is_video and request.out.suffix.lower() in VIDEOS:
        hint = "It makes images: give --out with .png."
        raise InputError(f"A {pipeline.__name__} cannot make {request.out.name}.", hint=hint)
    needs = "image" in takes and takes["image"].default is inspect.Parameter.empty
    if needs and request.image is None:
        raise InputError(f"A {pipeline.__name__} begins with an image.", hint="Give --image FILE.")
