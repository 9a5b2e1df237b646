"""Fit: what a client asks for, against what the model can make; what they left out is the model's default."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from weft.core.errors import InputError
from weft.models.words import parse
from weft.serve.errors import Refused, shown
from weft.serve.jobs import Asked, Kind
from weft.serve.wire import ImageAsks, VideoAsks

NEEDS = {
    "negative_prompt": ("negative_prompt",),
    "guidance_scale": ("guidance_scale", "true_cfg_scale"),
    "input_reference": ("image",),
}
"""The arguments of a pipeline of which it must take one for a field to mean something."""


def ready(engine: Any) -> Mapping[str, Any]:
    """The facts of a model that is loaded."""
    if (state := engine.status()) == "draining":
        raise Refused(
            503, "draining", "The server is stopping and takes no new work. Try again later.", retry=30
        )
    if state == "failed":
        raise Refused(503, "failed", "The ranks do not start; the log of the server says why.", retry=30)
    if engine.facts is None:
        raise Refused(503, "starting", "The model is still loading. GET /health says when it is ready.")
    return engine.facts


def video(asks: VideoAsks, engine: Any, *, image: bool | None = None) -> Asked:
    """`image` is whether one came with it; None if it is only to be planned."""
    facts = ready(engine)
    if facts.get("needs_image") and image is False:
        message = f"{engine.name} begins with an image. Send it as input_reference, a file or a data URL."
        raise Refused(400, "image_required", message, param="input_reference")
    fps = asks.fps or float(facts["fps"])
    frames = _frames(asks, facts, fps)
    fields = _given(asks) | ({"input_reference"} if image else set())
    return _asked("video", asks, engine, given=fields, frames=frames, fps=fps, format="mp4")


def image(asks: ImageAsks, engine: Any) -> Asked:
    facts = ready(engine)
    rest = {"frames": 1, "fps": float(facts["fps"]), "format": asks.output_format or "png"}
    return _asked("image", asks, engine, given=_given(asks), **rest)


def _given(asks: VideoAsks | ImageAsks) -> set[str]:
    return {field for field in asks.model_fields_set if getattr(asks, field) is not None}


def _check_words(asks: VideoAsks | ImageAsks) -> None:
    """Refuse what the tokenizer of weft's own model would: unknown words, and more than two shapes."""
    for field in ("prompt", "negative_prompt"):
        try:
            parse(getattr(asks, field) or "")
        except InputError as error:
            raise Refused(400, "invalid_prompt", str(error), param=field) from error


def _asked(kind: Kind, asks: VideoAsks | ImageAsks, engine: Any, *, given: set[str], **rest: Any) -> Asked:
    facts = ready(engine)
    if asks.model is not None and asks.model != engine.name:
        message = f"There is no model {shown(asks.model)!r} here. This server has {engine.name!r}."
        raise Refused(404, "model_not_found", message, param="model")
    if kind not in facts["kinds"]:
        message = f"{engine.name} makes no {kind}s. It makes {' and '.join(facts['kinds'])}s."
        raise Refused(400, "unsupported_combination", message, param="model")
    for field, names in NEEDS.items():
        if field in given and not {*names} & {*facts["takes"]}:
            message = f"{engine.name} takes no {field}. Leave it out."
            raise Refused(400, "unsupported_combination", message, param=field)
    if facts.get("closed_vocabulary"):
        _check_words(asks)
    width, height = _size(asks.size, facts)
    return Asked(
        kind=kind, model=engine.name, prompt=asks.prompt, negative=asks.negative_prompt,
        height=height, width=width, steps=asks.num_inference_steps or facts["steps"],
        seed=secrets.randbelow(2**32) if asks.seed is None else asks.seed,
        guidance=facts["guidance"] if asks.guidance_scale is None else asks.guidance_scale,
        image=None, **rest,
    )  # fmt: skip


def _size(size: str | None, facts: Mapping[str, Any]) -> tuple[int, int]:
    if size in (None, "auto"):
        return facts["width"], facts["height"]
    width, height = map(int, size.split("x"))
    _, tall, wide = facts["multiple"]
    if width % wide or height % tall:
        near = f"{nearest(width, wide)}x{nearest(height, tall)}"
        rule = f"width must be a multiple of {wide} and height of {tall}"
        raise Refused(
            400, "invalid_size", f"size '{size}' is not legal for {facts['model']}: {rule}. Nearest: {near}.",
            param="size",
        )  # fmt: skip
    return width, height


def _frames(asks: VideoAsks, facts: Mapping[str, Any], fps: float) -> int:
    every, first = facts["multiple"][0], facts.get("first", 0)
    if asks.seconds is not None:
        if asks.num_frames is not None:
            message = "seconds and num_frames are both given. Give one: frames are seconds times fps."
            raise Refused(400, "unsupported_combination", message, param="num_frames")
        return nearest(float(asks.seconds) * fps, every, first)
    frames = asks.num_frames or facts["frames"]
    if asks.num_frames and (frames - first) % every:
        rule = f"frames must be a multiple of {every}" + (f" plus {first}" if first else "")
        message = f"num_frames {frames} is not legal for {facts['model']}: {rule}."
        message += f" Nearest: {nearest(frames, every, first)}."
        raise Refused(400, "invalid_num_frames", message, param="num_frames")
    return frames


def nearest(value: float, every: int, first: int = 0) -> int:
    """The multiple of `every`, and `first` more, that is nearest to a value, and at least one frame or pixel.

    >>> nearest(700, 16), nearest(3, 16), nearest(80, 4, 1), nearest(0, 4, 1)
    (704, 16, 81, 1)
    """
    steps = int((value - first) / every + 0.5) if value > first else 0
    return max(steps, 0 if first else 1) * every + first
