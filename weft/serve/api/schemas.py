"""Schemas of requests and responses, as OpenAI's clients have them; weft's additions are under `weft`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from weft.serve.jobs import Job, JobFailure, JsonObject, Status

if TYPE_CHECKING:
    from weft.serve.spool import SpoolFile
    from weft.serve.watch import LiveJob

MAX_PROMPT_CHARS = 4000
MAX_IMAGES = 8
Stage = Literal["queued", "encode", "denoise", "decode", "done", "failed"]
STAGES: dict[Status, Stage] = {"queued": "queued", "completed": "done", "failed": "failed"}
T = TypeVar("T")

Text = Annotated[str, Field(max_length=MAX_PROMPT_CHARS)]
# Not \d, which matches the digits of all scripts.
Size = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$", examples=["64x64"])]
FRACTION = r"(?:[1-9][0-9]{0,2}|0[1-9][0-9]?|00[1-9])"
Seconds = Annotated[
    str, Field(pattern=rf"^(?:[1-9][0-9]{{0,3}}(?:\.[0-9]{{1,3}})?|0\.{FRACTION})$", examples=["2"])
]


def _check_number(value: T) -> T:
    """Reject number literals of Python (1_000, spaces) in the text of a form or a query."""
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", value):
        raise ValueError("a number is written as 7, -7, 0.5 or 5e-1")
    return value


PLAIN_NUMBER = BeforeValidator(_check_number)
"""Goes after the bounds of a number: before them, the OpenAPI schema would lack the bounds."""
Number = Annotated[float, Field(allow_inf_nan=False)]


class RequestModel(BaseModel):
    """What a client sends; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class ResponseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class InputReference(RequestModel):
    image_url: Annotated[str, Field(pattern=r"^data:image/(png|jpeg|webp);base64,")]
    """A data URL with a PNG, JPEG or WebP; nothing is fetched."""
    _file: SpoolFile | None = PrivateAttr(default=None)
    _digest: bytes = PrivateAttr(default=b"")

    def replace_data(self, file: SpoolFile, digest: bytes) -> None:
        """Hold the picture as a file, which is removed after the response unless moved, instead of a URL."""
        self.image_url, self._file, self._digest = "", file, digest

    @property
    def file(self) -> SpoolFile | None:
        return self._file

    @property
    def digest(self) -> bytes:
        """SHA-256 of the picture as it was sent."""
        return self._digest


class GenerationRequest(RequestModel):
    """Fields of both videos and images; all but the prompt have defaults of the model."""

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS, pattern=r"\S")]
    model: Annotated[str, Field(max_length=200)] | None = None
    negative_prompt: Text | None = None
    seed: Annotated[int, Field(ge=0, lt=2**53 - MAX_IMAGES), PLAIN_NUMBER] | None = None
    num_inference_steps: Annotated[int, Field(ge=1, le=1000), PLAIN_NUMBER] | None = None
    guidance_scale: Annotated[Number, Field(ge=0, le=100), PLAIN_NUMBER] | None = None
    priority: Annotated[int, Field(ge=-10, le=10), PLAIN_NUMBER] | None = None
    deadline_seconds: Annotated[Number, Field(gt=0, le=7 * 86400), PLAIN_NUMBER] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None

    def fingerprint(self) -> bytes:
        """Return bytes that are equal for equal requests."""
        return self.model_dump_json(exclude_none=True, exclude={"input_reference"}).encode() + b"\0"


class VideoRequest(GenerationRequest):
    """POST /v1/videos. A multipart form has the same fields, and `input_reference` may be a file in it."""

    size: Size | None = None
    seconds: Seconds | Annotated[Number, Field(gt=0, lt=10_000), PLAIN_NUMBER] | None = None
    num_frames: Annotated[int, Field(ge=1, le=100_000), PLAIN_NUMBER] | None = None
    fps: Annotated[Number, Field(ge=1, le=240), PLAIN_NUMBER] | None = None
    input_reference: InputReference | None = None

    def fingerprint(self) -> bytes:
        return super().fingerprint() + (self.input_reference.digest if self.input_reference else b"")


class ImageRequest(GenerationRequest):
    """POST /v1/images/generations."""

    size: Size | Literal["auto"] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES), PLAIN_NUMBER] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3), PLAIN_NUMBER] | None = None
    quality: Literal["auto", "standard"] | None = None
    background: Literal["auto", "opaque"] | None = None


class ErrorDetail(ResponseModel):
    message: str
    type: Literal["authentication_error", "permission_error", "rate_limit_error", "server_error",
                  "invalid_request_error"]  # fmt: skip
    param: str | None
    code: str


class ErrorResponse(ResponseModel):
    """The body of every response with a status >= 400."""

    error: ErrorDetail


class JobInfo(ResponseModel):
    """What weft adds to a job of OpenAI's API."""

    stage: Stage
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


class JobResponse(ResponseModel):
    id: str
    model: str
    status: Status
    progress: Annotated[int, Field(ge=0, le=100)]
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str
    size: str
    error: JobFailure | None
    weft: JobInfo


class VideoResponse(JobResponse):
    object: Literal["video"] = "video"
    seconds: str
    remixed_from_video_id: None = None


class ImageResponse(JobResponse):
    object: Literal["image"] = "image"


class ListResponse(ResponseModel):
    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoList(ListResponse):
    data: list[VideoResponse]


class ImageList(ListResponse):
    data: list[ImageResponse]


class DeletedResponse(ResponseModel):
    id: str
    object: Literal["video.deleted", "image.deleted"]
    deleted: Literal[True] = True


class ImageData(ResponseModel):
    b64_json: str | None = None
    url: str | None = None
    revised_prompt: None = None


class GenerationInfo(ResponseModel):
    id: str
    seed: int
    timings: dict[str, float | None]


class GenerationResponse(ResponseModel):
    """Response of POST /v1/images/generations; `weft` has an entry for each picture."""

    created: int
    data: list[ImageData]
    output_format: Literal["png", "jpeg", "webp"]
    size: str
    weft: list[GenerationInfo]


class ModelInfo(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["weft"] = "weft"
    weft: JsonObject
    """Kinds, sizes and defaults of the model; empty until a rank is ready."""


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[ModelInfo]


class HealthResponse(ResponseModel):
    status: Literal["ok", "starting", "draining", "failed", "disk_full"]
    reason: str | None = None
    """Why no jobs are accepted, if known."""


class LivenessResponse(ResponseModel):
    status: Literal["alive"] = "alive"


def job_response(job: Job, live: LiveJob | None) -> VideoResponse | ImageResponse:
    """Return a job as clients see it; `live` is the engine's view of it now."""
    params = job.params
    weft = JobInfo(
        stage=_stage(job), step=job.step, num_steps=params.steps, num_frames=params.frames, fps=params.fps,
        seed=params.seed, guidance_scale=params.guidance, negative_prompt=params.negative, bytes=job.size,
        output_format=params.format, timings=timings_of(job.timings),
    )  # fmt: skip
    if live is not None and job.active:  # the engine may still know a job that has just ended
        weft.queue_position, weft.eta_seconds = live.queue_position, live.eta
        weft.ranks, weft.plan = list(live.ranks), live.plan
        weft.preview_step = live.preview_step if live.preview else None
    response = JobResponse(
        id=job.id, model=params.model, status=job.status, progress=job.progress,
        created_at=int(job.created), completed_at=_unix(job.completed), expires_at=_unix(job.expires),
        prompt=params.prompt, size=f"{params.width}x{params.height}", weft=weft,
        error=job.failure,
    )  # fmt: skip
    if params.kind == "video":
        return VideoResponse(**dict(response), seconds=f"{round(params.frames / params.fps, 2):g}")
    return ImageResponse(**dict(response))


def _stage(job: Job) -> Stage:
    if job.status != "in_progress":
        return STAGES[job.status]
    if job.step >= job.params.steps:
        return "decode"
    return "denoise" if job.step or "encode" in job.timings else "encode"


def timings_of(seconds: Mapping[str, float]) -> dict[str, float | None]:
    """Return rounded seconds by stage; None for stages that have not ended."""
    return dict.fromkeys(("queue", "encode", "denoise", "decode")) | {
        stage: round(duration, 4) for stage, duration in seconds.items()
    }


def _unix(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
