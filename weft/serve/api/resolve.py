"""Validate a request against the model and resolve its defaults into `GenerationParams`."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from weft.core.errors import InputError
from weft.serve.api.schemas import ImageRequest, VideoRequest
from weft.serve.api_error import APIError, not_ready, quote_input
from weft.serve.jobs import Format, GenerationParams, Kind
from weft.serve.model_facts import ModelFacts
from weft.video.captions import parse

if TYPE_CHECKING:
    from weft.serve.engine import Engine

REQUIRED_ARGUMENTS = {
    "negative_prompt": {"negative_prompt"},
    "guidance_scale": {"guidance_scale", "true_cfg_scale"},
    "input_reference": {"image"},
}
"""The pipeline must take one of these arguments for a field to have an effect."""


def model_facts(engine: Engine) -> ModelFacts:
    """Return the facts of the loaded model."""
    if (state := engine.status()) in ("draining", "failed") or engine.facts is None:
        raise not_ready(state)
    return engine.facts


def resolve_video(request: VideoRequest, engine: Engine, *, needs_image: bool = True) -> GenerationParams:
    """Resolve a video; without `needs_image`, one that is only planned."""
    facts = model_facts(engine)
    if needs_image and facts.needs_image and request.input_reference is None:
        message = f"{engine.name} requires a first image. Send it as input_reference, a file or a data URL."
        raise APIError(400, "image_required", message, param="input_reference")
    fps = request.fps or facts.fps
    frames = _frames(request, facts, fps)
    return _resolve("video", request, engine, frames=frames, fps=fps, format="mp4")


def resolve_image(request: ImageRequest, engine: Engine) -> GenerationParams:
    fps = model_facts(engine).fps
    return _resolve("image", request, engine, frames=1, fps=fps, format=request.output_format or "png")


def _resolve(
    kind: Kind, request: VideoRequest | ImageRequest, engine: Engine, *, frames: int, fps: float,
    format: Format,
) -> GenerationParams:  # fmt: skip
    facts = model_facts(engine)
    if request.model is not None and request.model != engine.name:
        raise model_not_found(request.model, engine, param="model")
    if kind not in facts.kinds:
        message = f"{engine.name} makes no {kind}s. It makes {' and '.join(facts.kinds)}s."
        raise APIError(400, "unsupported_combination", message, param="model")
    for field, names in REQUIRED_ARGUMENTS.items():
        if getattr(request, field, None) is not None and names.isdisjoint(facts.takes):
            message = f"{engine.name} takes no {field}. Leave it out."
            raise APIError(400, "unsupported_combination", message, param=field)
    if facts.closed_vocabulary:
        _check_vocabulary(request)
    width, height = _size(request.size, facts)
    return GenerationParams(
        kind=kind, model=engine.name, prompt=request.prompt, negative=request.negative_prompt,
        height=height, width=width, steps=request.num_inference_steps or facts.steps,
        seed=secrets.randbelow(2**32) if request.seed is None else request.seed,
        guidance=facts.guidance if request.guidance_scale is None else request.guidance_scale,
        image=None, frames=frames, fps=fps, format=format,
    )  # fmt: skip


def model_not_found(name: str, engine: Engine, *, param: str) -> APIError:
    message = f"Unknown model {quote_input(name)!r}. This server has {engine.name!r}."
    return APIError(404, "model_not_found", message, param=param)


def _check_vocabulary(request: VideoRequest | ImageRequest) -> None:
    """Reject what the tokenizer of weft's own model would: unknown words, and more than two shapes."""
    for field, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt)):
        try:
            parse(text or "")
        except InputError as error:
            raise APIError(400, "invalid_prompt", str(error), param=field) from error


def _size(size: str | None, facts: ModelFacts) -> tuple[int, int]:
    if size is None or size == "auto":
        return facts.width, facts.height
    width, height = map(int, size.split("x"))
    _, multiple_y, multiple_x = facts.multiple
    if width % multiple_x or height % multiple_y:
        valid = f"{nearest(width, multiple_x)}x{nearest(height, multiple_y)}"
        rule = f"width must be a multiple of {multiple_x} and height of {multiple_y}"
        message = f"size '{size}' is invalid for {facts.model}: {rule}. Nearest: {valid}."
        raise APIError(400, "invalid_size", message, param="size")
    return width, height


def _frames(request: VideoRequest, facts: ModelFacts, fps: float) -> int:
    every, first = facts.multiple[0], facts.first
    if request.seconds is not None:
        if request.num_frames is not None:
            message = "seconds and num_frames are both set. Set one: frames are seconds times fps."
            raise APIError(400, "unsupported_combination", message, param="num_frames")
        return nearest(float(request.seconds) * fps, every, first)
    frames = request.num_frames or facts.frames
    if request.num_frames and (frames - first) % every:
        rule = f"frames must be a multiple of {every}" + (f" plus {first}" if first else "")
        message = f"num_frames {frames} is invalid for {facts.model}: {rule}."
        message += f" Nearest: {nearest(frames, every, first)}."
        raise APIError(400, "invalid_num_frames", message, param="num_frames")
    return frames


def nearest(value: float, every: int, first: int = 0) -> int:
    """Return the multiple of `every`, plus `first`, that is nearest to `value`; at least one frame or pixel.

    >>> nearest(700, 16), nearest(3, 16), nearest(80, 4, 1), nearest(0, 4, 1)
    (704, 16, 81, 1)
    """
    steps = int((value - first) / every + 0.5) if value > first else 0
    return max(steps, 0 if first else 1) * every + first
