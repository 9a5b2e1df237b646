"""Jobs: the parameters of a request, the job made of it, and the ids of jobs."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from weft.core.errors import InputError

Kind = Literal["video", "image"]
Status = Literal["queued", "in_progress", "completed", "failed"]
Format = Literal["mp4", "gif", "png", "webp", "jpeg"]

JsonObject = dict[str, Any]

KINDS: tuple[Kind, ...] = get_args(Kind)
STATUSES: tuple[Status, ...] = get_args(Status)
FORMATS: tuple[Format, ...] = get_args(Format)
MEDIA_TYPES: dict[Format, str] = {each: f"{'video' if each == 'mp4' else 'image'}/{each}" for each in FORMATS}

# Crockford's 32 digits, in the order of their bytes: the text of an id sorts as its number does.
_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ID = re.compile(rf"(?:{'|'.join(KINDS)})_[0-7][{_DIGITS}]{{25}}")
_RANDOM_BITS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """All that the cost of a job depends on. Jobs of equal shape can share a batch."""

    frames: int
    height: int
    width: int
    steps: int
    guided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """Validated parameters of a request with all defaults resolved: they determine the result bitwise."""

    kind: Kind
    model: str
    prompt: str
    negative: str | None = None
    frames: int
    height: int
    width: int
    steps: int
    seed: int
    guidance: float | None = None  # None: the model has none
    fps: float = 16.0
    image: str | None = None  # the name of a file in the job's folder, never a path
    format: Format
    more: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, KINDS)
        _check_choice("format", self.format, FORMATS)
        for name in ("frames", "height", "width", "steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 1, got {getattr(self, name)}.")
        if self.kind == "image" and self.frames != 1:
            raise InputError(f"An image has one frame, got {self.frames}.", hint="Request a video.")

    @property
    def shape(self) -> JobShape:
        # A scale of 1 is the prediction itself: only one pass is made then.
        guided = self.guidance is not None and self.guidance != 1
        return JobShape(
            frames=self.frames, height=self.height, width=self.width, steps=self.steps, guided=guided
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    """Why a job has no result: a code for programs, a sentence for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One video or image, as last stored. Times are unix seconds."""

    id: str
    params: GenerationParams
    status: Status = "queued"
    step: int = 0
    created: float
    started: float | None = None  # when ranks first took it
    completed: float | None = None  # when it ended, completed or failed
    expires: float | None = None
    priority: int = 0
    deadline: float
    failure: JobFailure | None = None
    attempts: int = 0  # losses since the last new step
    timings: dict[str, float] = field(default_factory=dict)
    output: str | None = None  # the name of a file in the job's folder
    size: int = 0

    @property
    def progress(self) -> int:
        """Percent of the steps; 100 only when the result is there."""
        return 100 if self.status == "completed" else min(99, 100 * self.step // self.params.steps)

    @property
    def active(self) -> bool:
        return self.status in ("queued", "in_progress")


def new_id(kind: Kind, milliseconds: int) -> str:
    """Return `video_` or `image_` and a ULID: 48 bits of time, by which ids sort, and 80 random bits."""
    _check_choice("kind", kind, KINDS)
    number = milliseconds << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    return f"{kind}_" + "".join(_DIGITS[number >> shift & 31] for shift in range(125, -1, -5))


def created_ms(id: str) -> int:
    """Return the millisecond in an id."""
    number = 0
    for digit in checked_id(id)[-26:]:
        number = number << 5 | _DIGITS.index(digit)
    return number >> _RANDOM_BITS


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def checked_id(text: str) -> str:
    """Return `text` if it is an id, so that nothing else becomes a path or a query."""
    if is_id(text):
        return text
    raise InputError(f"{text[:80]!r} is not the id of a job.", hint=f"Ids look like {new_id('video', 0)}.")


def _check_choice(name: str, choice: str, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise InputError(f"{name} must be one of {', '.join(choices)}, got {choice!r}.")
