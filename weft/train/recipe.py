"""Recipe: what `weft train` is told, from a TOML file or a Python one.

    [model]                     # sizes of a VideoDiT
    width = 192
    [data]
    set = "weft-shapes"
    [train]
    steps = 3000
    [sparse]                    # left out: attention is dense
    method = "dsv"

A Python recipe has `recipe`, a dict of the same shape. Each part is one class below, with its defaults.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from weft.core import files, tables
from weft.core.backends import check_backend
from weft.core.errors import InputError

Extent = tuple[int, int, int]
MAX_BATCH, MAX_FRAMES, MAX_SIZE = 1 << 20, 1 << 16, 1 << 14
MAX_BLOCK, MAX_TOKENS = 1 << 16, 1 << 24
"""A recipe is not always of one's own: larger ones overflow in kernels, or would take all memory."""
MAX_MEAN = 100.0
MAX_NAME = 255
"""Bytes of a file's name."""


@dataclass(frozen=True)
class ModelPart:
    """Sizes of the VideoDiT; see `weft.models.dit.DiTConfig`."""

    patch: Extent = (4, 8, 8)
    width: int = 192
    depth: int = 6
    heads: int = 6
    mlp: int = 4
    qk_norm: bool = True
    phrase: int = 0
    """Words that tell of one thing; 4 in weft's own captions, 0 if they stand alone."""
    upscale: int = 1
    """Train on clips of a fraction of their height and width, and an upscaler for the rest."""
    start: str = ""
    """A model's directory, whose weights to begin with."""


@dataclass(frozen=True)
class DataPart:
    """weft-shapes, weft-pan, or a folder of videos or of latents (then `path`)."""

    set: Literal["weft-shapes", "weft-pan", "folder", "latents"] = "weft-shapes"
    path: str = ""
    frames: int = 16
    size: int = 64
    most: int = 2
    """Shapes in a clip."""
    held_out: int = 64
    """Clips for validation, that are never trained on."""


@dataclass(frozen=True)
class TrainPart:
    steps: int = 1000
    batch: int = 16
    """Clips in a step, over all ranks."""
    accumulate: int = 1
    """Parts that a step's clips are computed in, one after the other."""
    optimiser: Literal["adamw", "muon"] = "adamw"
    """muon: matrices of blocks by Muon, which takes fewer steps, the rest by AdamW."""
    rate: float = 1e-3
    warmup: int = 100
    floor: float = 0.0
    """Of the rate, that the cosine ends at, as a share of it."""
    decay: float = 0.01
    """Weight decay, on matrices only."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.999
    drop: float = 0.1
    """How often a prompt is forgotten, for guidance."""
    edges: float = 0.0
    """What errors between neighbouring pixels count, beside those of pixels: outlines are few pixels."""
    mean: float = 0.0
    """Of the logit-normal timesteps: above 0 trains more on noise."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters and optimiser are float32."""
    checkpointing: bool = False
    """Blocks are computed again for their gradients, instead of kept."""
    seed: int = 0


@dataclass(frozen=True)
class ParallelPart:
    """Ranks that share a sequence; the others, if there are more, have other clips. 0: all of them."""

    sequence: int = 1
    plan: str = "auto"
    backend: str = "auto"
    """The kernel of attention that is split or sparse; see `weft.core.backends`."""
    shard: bool = True
    """Parameters over the ranks (FSDP2); if not, each rank has them all, which is faster where they fit."""


@dataclass(frozen=True)
class SavePart:
    every: int = 200
    """Steps from one checkpoint to the next."""
    keep: int = 2
    samples: int = 0
    """Steps from one sheet of samples to the next; 0 for none."""
    validate: int = 0
    """Steps from one held-out loss to the next; 0 for none."""
    prompts: tuple[str, ...] = (
        "a red circle moving left",
        "a blue square moving up",
        "a green triangle moving right over a white star",
        "a yellow star moving down and a purple circle",
    )


@dataclass(frozen=True)
class SparsePart:
    """Sparse attention in training: who selects, how much, and from when on."""

    method: Literal["dsv", "pooled", "window"] = "dsv"
    """dsv: a learned predictor. pooled: means of cubes, as VSA. window: the nearest cubes."""
    source: Literal["qk", "hidden"] = "qk"
    rank: int = 16
    """Of the predictor, in each head."""
    loss: Literal["kl", "pearson", "dsv"] = "kl"
    rate: float = 1e-3
    rows: int = 64
    """Queries that predictors learn from, and that are profiled."""
    mass: float = 0.9
    """The share of a query's softmax that has to be kept."""
    cube: Extent = (2, 4, 4)
    block_k: int | None = None
    """Keys that are taken or left together; as many as a cube has, if not told."""
    proxy: Literal["mean", "centre"] = "mean"
    budget: Literal["profile"] | float = "profile"
    """Of keys, by head: as measured, or one share for all."""
    least: float = 0.02
    coarse: bool = False
    """A gated attention among means of cubes is added."""
    anneal: int = 0
    """Steps in which the budget falls from everything to its value."""
    stage1: int = 200
    """The most steps that a block stays dense for the sake of its predictor."""
    profile_every: int = 25
    profile_rarely: int = 100
    """Once a block's predictor is good."""
    dense_blocks: tuple[int, ...] = ()
    """Blocks that stay dense for ever; -1 is the last."""
    gate: Literal["cost"] | float = "cost"
    """A block is sparse where that is measured to be faster, or needs less than this share of keys."""
    cost_tokens: int | None = None
    """The length for which costs are asked, if not the real one."""

    def __post_init__(self) -> None:
        for name in ("rank", "rows", "profile_every", "profile_rarely"):
            _within(f"sparse.{name}", getattr(self, name), 1)
        for name in ("anneal", "stage1", "rate"):
            _within(f"sparse.{name}", getattr(self, name), 0)
        for size in (*self.cube, math.prod(self.cube)):
            _within("sparse.cube", size, 1, MAX_BLOCK)
        _within("sparse.block_k", self.block_k or 1, 1, MAX_BLOCK)
        _within("sparse.cost_tokens", self.cost_tokens or 0, 0, MAX_TOKENS)
        for name in ("mass", "least", "budget"):
            share = getattr(self, name)
            if share != "profile" and not 0 < share <= 1:
                raise InputError(
                    f"sparse.{name} = {share} is no share.", hint="It is above 0, and at most 1."
                )


@dataclass(frozen=True)
class Recipe:
    model: ModelPart = field(default_factory=ModelPart)
    data: DataPart = field(default_factory=DataPart)
    train: TrainPart = field(default_factory=TrainPart)
    parallel: ParallelPart = field(default_factory=ParallelPart)
    save: SavePart = field(default_factory=SavePart)
    sparse: SparsePart | None = None

    def __post_init__(self) -> None:
        train, data = self.train, self.data
        for name, value, least in (
            ("train.steps", train.steps, 1), ("train.edges", train.edges, 0),
            ("train.accumulate", train.accumulate, 1), ("train.warmup", train.warmup, 0),
            ("save.every", self.save.every, 1), ("save.keep", self.save.keep, 1),
            ("data.held_out", data.held_out, 1), ("parallel.sequence", self.parallel.sequence, 0),
            ("train.seed", train.seed, 0), ("save.samples", self.save.samples, 0),
            ("save.validate", self.save.validate, 0), ("prompts of save", len(self.save.prompts), 1),
        ):  # fmt: skip
            _within(name, value, least)
        check_backend(self.parallel.backend)
        _within("train.batch", train.batch, 1, MAX_BATCH)
        _within("train.mean", train.mean, -MAX_MEAN, MAX_MEAN)
        _within("data.frames", data.frames, 1, MAX_FRAMES)
        _within("data.size", data.size, 1, MAX_SIZE)
        _within("model.upscale", self.model.upscale, 1, data.size)
        for path in (data.path, self.model.start):
            if any(len(part.encode()) > MAX_NAME for part in Path(path).parts):
                raise InputError(f"{path[:80]!r} in the recipe is too long for a path.")
        for name, share in (("ema", train.ema), ("drop", train.drop), ("floor", train.floor)):
            if not 0 <= share <= 1:
                raise InputError(f"train.{name} = {share} in the recipe.", hint="It is from 0 to 1.")
        if min(train.rate, train.clip) <= 0:
            raise InputError(
                f"train.rate = {train.rate}, train.clip = {train.clip}.", hint="Above 0 it learns."
            )
        if train.batch % train.accumulate:
            raise InputError(
                f"train.batch = {train.batch} cannot be computed in {train.accumulate} equal parts.",
                hint="Let train.accumulate divide train.batch.",
            )
        if data.set == "latents" and self.model.upscale > 1:
            raise InputError(f"model.upscale = {self.model.upscale}.", hint="Latents are not enlarged.")
        if (data.set in ("folder", "latents")) != bool(data.path):
            raise InputError(
                f'data.set = "{data.set}" with data.path = "{data.path}".',
                hint="folder and latents have a path, the others are made up.",
            )

    def to_json(self) -> dict[str, Any]:
        return {name: part for name, part in asdict(self).items() if part is not None}

    @staticmethod
    def of(said: Mapping[str, Any], where: str = "The recipe") -> Recipe:
        """From a dict of parts; unknown names and wrong types are refused."""
        return tables.read(Recipe, said, where)

    @staticmethod
    def load(path: Path | str) -> Recipe:
        file = Path(path)
        if not file.is_file():
            raise InputError(f"There is no recipe {file}.", hint="Try recipes/shapes.toml of the repository.")
        if file.suffix == ".py":
            said = runpy.run_path(str(file)).get("recipe")
            if isinstance(said, Recipe):
                return said
            if not isinstance(said, Mapping):
                raise InputError(f"{file} has no `recipe`.", hint="Let it be a dict, as of a TOML file.")
        elif file.suffix == ".toml":
            said = files.toml(file)
        else:
            raise InputError(f"{file} is no recipe.", hint="Recipes end in .toml or .py.")
        return Recipe.of(said, str(file))


def _within(name: str, value: float, least: float, most: float = math.inf) -> None:
    if not least <= value <= most:
        hint = f"It is {least} or more." if most == math.inf else f"It is from {least} to {most:,}."
        raise InputError(f"{name} = {value} in the recipe.", hint=hint)
