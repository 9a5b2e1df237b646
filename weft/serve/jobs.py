"""The values of serving: what was asked, what it costs alike, how far a job is; and JSON both ways."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args

from weft.core.errors import InputError

Kind = Literal["video", "image"]
Status = Literal["queued", "in_progress", "completed", "failed"]
Format = Literal["mp4", "gif", "png", "webp", "jpeg"]

KINDS: tuple[Kind, ...] = get_args(Kind)
STATUSES: tuple[Status, ...] = get_args(Status)
FORMATS: tuple[Format, ...] = get_args(Format)
TYPES: dict[Format, str] = {each: f"{'video' if each == 'mp4' else 'image'}/{each}" for each in FORMATS}
"""What HTTP calls them."""

# Crockford's 32 digits, in the order of their bytes: the text of an id sorts as its number does.
_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ID = re.compile(rf"(?:{'|'.join(KINDS)})_[0-7][{_DIGITS}]{{25}}")
_RANDOM_BITS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """All that the cost of a job depends on; jobs of equal shape can be one batch."""

    frames: int
    height: int
    width: int
    steps: int
    guided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What somebody asked for, with every default filled in: enough to make it again, to the bit."""

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
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, KINDS)
        _one_of("format", self.format, FORMATS)
        for name in ("frames", "height", "width", "steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} is too few.", hint=f"{name} is 1 or more.")
        if self.kind == "image" and self.frames != 1:
            raise InputError(f"An image has one frame, not {self.frames}.", hint="Ask for a video.")

    @property
    def shape(self) -> Shape:
        # A scale of 1 is the prediction itself: only one pass is made then.
        guided = self.guidance is not None and self.guidance != 1
        return Shape(
            frames=self.frames, height=self.height, width=self.width, steps=self.steps, guided=guided
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Asked:
        """Reads the fields it knows: a message may carry others beside them."""
        return cls(**_known(cls, plain))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a job has no result: a code for programs, a sentence for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One video or image on its way, as the store last knew it. Times are unix seconds."""

    id: str
    asked: Asked
    status: Status = "queued"
    step: int = 0
    created: float
    started: float | None = None  # the first time that ranks took it
    completed: float | None = None  # when it ended, either way
    expires: float | None = None
    priority: int = 0
    deadline: float
    failure: Failure | None = None
    attempts: int = 0  # losses since the last new step
    timings: dict[str, float] = field(default_factory=dict)
    output: str | None = None  # the name of a file in the job's folder
    size: int = 0

    @property
    def progress(self) -> int:
        """Percent of the steps, 100 only when the result is there."""
        return 100 if self.status == "completed" else min(99, 100 * self.step // self.asked.steps)

    @property
    def active(self) -> bool:
        return self.status in ("queued", "in_progress")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Job:
        known = _known(cls, plain)
        failure = known.get("failure")
        known |= {"asked": Asked.from_json(known["asked"]), "failure": failure and Failure(**failure)}
        return cls(**known)


def new_id(kind: Kind, milliseconds: int) -> str:
    """`video_` or `image_` and a ULID: 48 bits of time, by which ids sort, and 80 nobody can guess."""
    _one_of("kind", kind, KINDS)
    number = milliseconds << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    return f"{kind}_" + "".join(_DIGITS[number >> shift & 31] for shift in range(125, -1, -5))


def born(id: str) -> int:
    """The millisecond in an id."""
    number = 0
    for digit in checked_id(id)[-26:]:
        number = number << 5 | _DIGITS.index(digit)
    return number >> _RANDOM_BITS


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def checked_id(text: str) -> str:
    """`text` if it is an id; what is none never becomes a path or a query."""
    if is_id(text):
        return text
    raise InputError(f"{text[:80]!r} is not the id of a job.", hint=f"Ids look like {new_id('video', 0)}.")


def _one_of(name: str, given: object, known: tuple[str, ...]) -> None:
    if given not in known:
        raise InputError(f"{name}={given!r} is unknown.", hint=f"It is one of {', '.join(known)}.")


def _known(cls: type[Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain[name] for name in _names(cls) if name in plain}


@cache
def _names(cls: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))
