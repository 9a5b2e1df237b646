"""ModelFacts: what a loaded model can make, as its ranks report it and `GET /v1/models` shows it."""

from __future__ import annotations

from typing import TypedDict

from weft.serve.jobs import JsonObject


class WarmupPace(TypedDict):
    """Seconds of a step of `shape` (the fields of a `JobShape`) on so many ranks, measured at the start."""

    shape: JsonObject
    ranks: int
    seconds: float


class RequiredFacts(TypedDict):
    """What a loaded model can make; `GET /v1/models` shows all facts."""

    model: str
    kinds: list[str]
    frames: int  # these are the defaults of a request
    height: int
    width: int
    steps: int
    guidance: float | None  # None: the model has none
    fps: float
    multiple: list[int]  # legal sizes: frames are `first` more than a multiple of the first number
    patch: list[int]  # frames × rows × columns of pixels that are one token
    heads: int
    head_dim: int
    depth: int
    text_tokens: int
    params: int


RankFacts = TypedDict("RankFacts", {"class": str}, total=False)
"""`class` is no name that a class body takes: the class of the pipeline."""


class ModelFacts(RequiredFacts, RankFacts, total=False):
    """All facts of a model, as a rank sends them. See `RequiredFacts` for those that are always there."""

    first: int
    width_model: int
    dtype: str
    bytes: int  # of all weights that a rank holds
    takes: list[str]  # arguments of the pipeline
    needs_image: bool
    memory: int  # bytes that the rank may use; 0: unknown
    examples: list[str]  # prompts
    vocabulary: list[str]  # words that the model was trained on, if they are few
    closed_vocabulary: bool  # whether the model refuses prompts with other words
    alike: list[str]  # parameters that jobs of one batch share, beside their shape
    batches: bool  # whether jobs may share a batch: not where each must have the bits that it has alone
    paces: list[WarmupPace]
