"""Wire: the JSON that comes in and goes out, as OpenAI's clients have it; what is ours is under `weft`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from weft.serve.jobs import Job, Status

PROMPT = 4000
IMAGES = 8
STAGES = Literal["queued", "encode", "denoise", "decode", "done", "failed"]

Text = Annotated[str, Field(max_length=PROMPT)]
# Not \d, which has the digits of all scripts.
Size = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$", examples=["64x64"])]
FRACTION = r"(?:[1-9][0-9]{0,2}|0[1-9][0-9]?|00[1-9])"
Seconds = Annotated[
    str, Field(pattern=rf"^(?:[1-9][0-9]{{0,3}}(?:\.[0-9]{{1,3}})?|0\.{FRACTION})$", examples=["2"])
]


def _plain(given: Any) -> Any:
    """Text in a form or a query that is a number: not as Python writes them (1_000, spaces)."""
    if isinstance(given, str) and not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", given):
        raise ValueError("a number is written as 7, -7, 0.5 or 5e-1")
    return given


PLAIN = BeforeValidator(_plain)
"""After the bounds of a number: before them, the document would not have the bounds."""
Number = Annotated[float, Field(allow_inf_nan=False)]


class Sent(BaseModel):
    """What a client sends. A field that we do not know is a mistake of theirs that we do not hide."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=False)


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Reference(Sent):
    image_url: Annotated[str, Field(pattern=r"^data:image/(png|jpeg|webp);base64,")]
    """A data URL with a PNG, JPEG or WebP; nothing is fetched."""


class Asks(Sent):
    """What videos and images have in common; all but the prompt has a default of the model's."""

    prompt: Annotated[str, Field(min_length=1, max_length=PROMPT, pattern=r"\S")]
    model: Annotated[str, Field(max_length=200)] | None = None
    negative_prompt: Text | None = None
    seed: Annotated[int, Field(ge=0, lt=2**53 - IMAGES), PLAIN] | None = None
    num_inference_steps: Annotated[int, Field(ge=1, le=1000), PLAIN] | None = None
    guidance_scale: Annotated[Number, Field(ge=0, le=100), PLAIN] | None = None
    priority: Annotated[int, Field(ge=-10, le=10), PLAIN] | None = None
    deadline_seconds: Annotated[Number, Field(gt=0, le=7 * 86400), PLAIN] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None


class VideoAsks(Asks):
    """POST /v1/videos. A multipart form has the same fields, and `input_reference` may be a file in it."""

    size: Size | None = None
    seconds: Seconds | Annotated[Number, Field(gt=0, lt=10_000), PLAIN] | None = None
    num_frames: Annotated[int, Field(ge=1, le=100_000), PLAIN] | None = None
    fps: Annotated[Number, Field(ge=1, le=240), PLAIN] | None = None
    input_reference: Reference | None = None


class ImageAsks(Asks):
    """POST /v1/images/generations."""

    size: Size | Literal["auto"] | None = None
    n: Annotated[int, Field(ge=1, le=IMAGES), PLAIN] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3), PLAIN] | None = None
    quality: Literal["auto", "standard"] | None = None
    background: Literal["auto", "opaque"] | None = None


class Detail(Answer):
    message: str
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "rate_limit_error",
        "server_error",
    ]
    param: str | None
    code: str


class Error(Answer):
    """Every answer with a status of 400 or more."""

    error: Detail


class Failed(Answer):
    code: str
    message: str


class Progress(Answer):
    """What weft adds to a job."""

    stage: STAGES
    step: int
    num_steps: int
    num_frames: int
    fps: float
    seed: int
    guidance_scale: float | None
    negative_prompt: str | None
    output_format: str
    bytes: int
    queue_position: int | None = None
    eta_seconds: float | None = None
    ranks: list[int] = []
    plan: str | None = None
    preview_step: int | None = None
    timings: dict[str, float | None]


class Made(Answer):
    id: str
    model: str
    status: Status
    progress: Annotated[int, Field(ge=0, le=100)]
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str
    size: str
    error: Failed | None
    weft: Progress


class Video(Made):
    object: Literal["video"] = "video"
    seconds: str
    remixed_from_video_id: None = None


class Image(Made):
    object: Literal["image"] = "image"


class Listed(Answer):
    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class Videos(Listed):
    data: list[Video]


class Images(Listed):
    data: list[Image]


class Deleted(Answer):
    id: str
    object: Literal["video.deleted", "image.deleted"]
    deleted: Literal[True] = True


class Picture(Answer):
    b64_json: str | None = None
    url: str | None = None
    revised_prompt: None = None


class Generation(Answer):
    id: str
    seed: int
    timings: dict[str, float | None]


class Generated(Answer):
    """The answer of POST /v1/images/generations; `weft` has an entry for each picture."""

    created: int
    data: list[Picture]
    output_format: Literal["png", "jpeg", "webp"]
    size: str
    weft: list[Generation]


class Model(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["weft"] = "weft"
    weft: dict[str, Any]
    """What the model makes: kinds, sizes, defaults; empty until a rank is ready."""


class Models(Answer):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(Answer):
    status: Literal["ok", "starting", "draining", "failed", "disk_full"]
    reason: str | None = None
    """Why no jobs are taken, as far as it is known."""


class Alive(Answer):
    status: Literal["alive"] = "alive"


def stage(job: Job) -> Any:
    if job.status != "in_progress":
        return {"completed": "done"}.get(job.status, job.status)
    if job.step >= job.asked.steps:
        return "decode"
    return "denoise" if job.step or "encode" in job.timings else "encode"


def made(job: Job, live: Any) -> Video | Image:
    """A job as clients see it; `live` is what the engine knows of it now."""
    asked, known = job.asked, {}
    if live is not None and job.active:  # one that has just ended may still be known as it was
        known = {
            "queue_position": live.queue_position, "eta_seconds": live.eta, "ranks": list(live.ranks),
            "plan": live.plan, "preview_step": live.preview_step if live.preview else None,
        }  # fmt: skip
    weft = Progress(
        stage=stage(job), step=job.step, num_steps=asked.steps, num_frames=asked.frames, fps=asked.fps,
        seed=asked.seed, guidance_scale=asked.guidance, negative_prompt=asked.negative, bytes=job.size,
        output_format=asked.format, timings=times(job.timings), **known,
    )  # fmt: skip
    said: dict[str, Any] = {
        "id": job.id, "model": asked.model, "status": job.status, "progress": job.progress,
        "created_at": int(job.created), "completed_at": whole(job.completed),
        "expires_at": whole(job.expires),
        "prompt": asked.prompt, "size": f"{asked.width}x{asked.height}", "weft": weft,
        "error": job.failure and Failed(code=job.failure.code, message=job.failure.message),
    }  # fmt: skip
    if asked.kind == "video":
        return Video(**said, seconds=f"{round(asked.frames / asked.fps, 2):g}")
    return Image(**said)


def times(timings: Mapping[str, float]) -> dict[str, float | None]:
    named = dict.fromkeys(("queue", "encode", "denoise", "decode")) | dict(timings)
    return {name: None if seconds is None else round(seconds, 4) for name, seconds in named.items()}


def whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
