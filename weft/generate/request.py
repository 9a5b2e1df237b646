"""Request: the options of `weft generate`, and the arguments of the pipeline they become."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weft.core.errors import InputError
from weft.core.files import read_json
from weft.generate.media import VIDEOS
from weft.generate.pretrained import Kwargs, PretrainedPipeline, pipeline_class

FPS = 16.0
ARGUMENTS = {
    "negative": ("negative_prompt",),
    "width": ("width",),
    "height": ("height",),
    "frames": ("num_frames", "video_length"),
    "steps": ("num_inference_steps",),
    "image": ("image",),
}
"""Names of an option in pipelines."""
Signature = Mapping[str, inspect.Parameter]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate; None is the pipeline's default."""

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
    more: Kwargs = field(default_factory=dict)
    """Further arguments of this pipeline, by its own names."""
    tiling: bool = False
    """Decode in tiles, each on one rank."""
    dtype: str = "float32"
    plan: str = "auto"
    sparse: str | None = None
    cache: str | None = None
    cfg: str = "auto"
    check: str = "first"
    backend: str = "auto"
    quiet: bool = False


def arguments(request: Request, on_step: Callable[..., Kwargs] | None = None) -> tuple[Kwargs, float]:
    """Return the arguments of the pipeline and frames per second; refuse options that it does not take."""
    pipeline = pipeline_class(request.model)
    signature = inspect.signature(pipeline.__call__).parameters
    options = {name: value for name in ARGUMENTS if (value := getattr(request, name)) is not None}
    kwargs: Kwargs = {"prompt": request.prompt, "output_type": "np", "return_dict": True}
    for option, value in options.items():
        name = next((name for name in ARGUMENTS[option] if name in signature), None)
        if name is None:
            raise _unknown(pipeline, f"--{option}", signature)
        kwargs[name] = value
    if unknown := [name for name in request.more if name not in signature]:
        raise _unknown(pipeline, unknown[0], signature)
    kwargs |= request.more
    if request.guidance is not None:
        name = _guidance_argument(request.model, signature)
        if name not in signature:
            raise _unknown(pipeline, "--guidance", signature)
        kwargs[name] = request.guidance
    _check_negative(kwargs, signature)
    _check_output(request, pipeline, signature)
    if request.image is not None:
        from PIL import Image

        kwargs["image"] = Image.open(request.image).convert("RGB")
    if "frame_rate" in signature and request.fps is not None:
        kwargs["frame_rate"] = request.fps
    if "callback_on_step_end" in signature:
        kwargs["callback_on_step_end"] = on_step
    default_fps = signature["frame_rate"].default if "frame_rate" in signature else FPS
    return kwargs, float(request.fps or default_fps)


def _unknown(pipeline: type[PretrainedPipeline], name: str, signature: Signature) -> InputError:
    internal = ("self", "prompt", "generator", "return_dict", "output_type")
    names = [name for name in signature if name not in internal]
    return InputError(f"A {pipeline.__name__} takes no {name}.", hint=f"It takes {', '.join(names)}.")


def _guidance_argument(model: Path, signature: Signature) -> str:
    """Return the name of the argument for guidance, which differs for distilled guidance."""
    config = model / "transformer" / "config.json"
    distilled = config.is_file() and read_json(config).get("guidance_embeds")
    return "true_cfg_scale" if "true_cfg_scale" in signature and not distilled else "guidance_scale"


def _check_negative(kwargs: Kwargs, signature: Signature) -> None:
    """Refuse a negative prompt that a pipeline with distilled guidance would silently ignore."""
    if "negative_prompt" in kwargs and "true_cfg_scale" in signature:
        scale = kwargs.get("true_cfg_scale", signature["true_cfg_scale"].default)
        if scale <= 1:
            raise InputError(
                f"This pipeline uses no negative prompt with true_cfg_scale={scale}.",
                hint="Add --set true_cfg_scale=4, or leave out --negative.",
            )


def _check_output(request: Request, pipeline: type[PretrainedPipeline], signature: Signature) -> None:
    is_video = any(name in signature for name in ARGUMENTS["frames"])
    if not is_video and request.out.suffix.lower() in VIDEOS:
        hint = "It makes images: give --out with .png."
        raise InputError(f"A {pipeline.__name__} cannot make {request.out.name}.", hint=hint)
    needs_image = "image" in signature and signature["image"].default is inspect.Parameter.empty
    if needs_image and request.image is None:
        raise InputError(f"A {pipeline.__name__} needs an image.", hint="Give --image FILE.")
