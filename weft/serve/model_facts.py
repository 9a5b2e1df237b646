"""ModelFacts: what a loaded model can make, as its ranks report it and `GET /v1/models` shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from weft.serve.jobs import JobShape, JsonObject, Kind

Grid = tuple[int, int, int]
"""Tokens or pixels in time, height and width."""


@dataclass(frozen=True, kw_only=True)
class WarmupPace:
    """Seconds of a step of `shape` on so many ranks, measured at the start."""

    shape: JobShape
    ranks: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    model: str
    pipeline: str = ""  # its class
    kinds: tuple[Kind, ...] = ()
    frames: int = 1  # these are the defaults of a request
    height: int = 64
    width: int = 64
    steps: int = 30
    guidance: float | None = None  # None: the model has none
    fps: float = 16.0
    multiple: Grid = (1, 1, 1)  # legal sizes are multiples of it, plus `first` frames
    first: int = 0
    patch: Grid  # frames × rows × columns of pixels that are one token
    heads: int
    head_dim: int
    depth: int
    width_model: int = 0
    text_tokens: int
    params: int
    dtype: str = "float32"
    bytes: int = 0  # of all weights that a rank holds; 0: unknown
    takes: tuple[str, ...] = ()  # arguments of the pipeline
    needs_image: bool = False
    memory: int = 0  # bytes that the rank may use; 0: unknown
    examples: tuple[str, ...] = ()  # prompts
    vocabulary: tuple[str, ...] = ()  # words that the model was trained on, if they are few
    closed_vocabulary: bool = False  # whether the model refuses prompts with other words
    alike: tuple[str, ...] = ()  # parameters that jobs of one batch share, beside their shape
    batches: bool = True  # whether jobs may share a batch: not if each must have the bits that it has alone
    paces: tuple[WarmupPace, ...] = ()

    @property
    def default(self) -> JobShape:
        """The shape of a request that leaves all sizes to the model."""
        return JobShape(
            frames=self.frames, height=self.height, width=self.width, steps=self.steps,
            guided=self.guidance not in (None, 1),
        )  # fmt: skip

    def grid(self, frames: int, height: int, width: int) -> Grid:
        """Return the tokens in time, height and width."""
        t, h, w = self.patch
        return -(-frames // t), -(-height // h), -(-width // w)

    def to_json(self) -> JsonObject:
        facts = asdict(self)
        return {"class": facts.pop("pipeline"), **facts}
