"""Recipe: the configuration of `weft train`, from a TOML file or a Python one.

    [model]                     # sizes of a VideoDiT
    width = 192
    [data]
    set = "weft-shapes"
    [train]
    steps = 3000
    [sparse]                    # left out: attention is dense
    method = "dsv"

A Python recipe defines `recipe`, a dict of the same shape. Each section is a dataclass below, with defaults.
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
from weft.core.voxels import Extent
from weft.video.transformer import DiTSizes

MAX_BATCH, MAX_FRAMES, MAX_SIZE = 1 << 20, 1 << 16, 1 << 14
MAX_BLOCK, MAX_TOKENS = 1 << 16, 1 << 24
"""Limits for untrusted recipes: larger values overflow in kernels, or exhaust memory."""
MAX_LOGIT_MEAN = 100.0
MAX_NAME_BYTES = 255
RENAMED = {
    "data": {"most": "max_shapes"},
    "train": {
        "optimiser": "optimizer", "rate": "lr", "decay": "weight_decay", "clip": "max_grad_norm",
        "mean": "logit_mean",
    },
    "sparse": {"rate": "lr", "least": "min_budget"},
}  # fmt: skip
"""Keys of older versions, by section, with their new names."""


@dataclass(frozen=True)
class ModelConfig(DiTSizes):
    """Sizes of the VideoDiT, and its initial weights."""

    start: str = ""
    """Directory of a model whose weights training starts from."""


@dataclass(frozen=True)
class DataConfig:
    """weft-shapes, weft-pan, or a folder (`path`) of videos or of latents."""

    set: Literal["weft-shapes", "weft-pan", "folder", "latents"] = "weft-shapes"
    path: str = ""
    frames: int = 16
    size: int = 64
    max_shapes: int = 2
    """Per clip."""
    held_out: int = 64
    """Clips for validation, never trained on."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    batch: int = 16
    """Clips per step, over all ranks."""
    accumulate: int = 1
    """Micro-batches per step, for gradient accumulation."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of blocks, which takes fewer steps, AdamW for the rest."""
    lr: float = 1e-3
    warmup: int = 100
    floor: float = 0.0
    """Final learning rate of the cosine, as a share of `lr`."""
    weight_decay: float = 0.01
    """On matrices only."""
    max_grad_norm: float = 1.0
    ema: float = 0.999
    drop: float = 0.1
    """Probability of dropping a prompt, for classifier-free guidance."""
    edges: float = 0.0
    """Weight of the error between neighboring pixels in the loss: outlines are few pixels."""
    logit_mean: float = 0.0
    """Of the logit-normal timesteps: above 0 trains more on noise."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters and optimizer state are float32."""
    checkpointing: bool = False
    """Recompute blocks in the backward instead of storing their activations."""
    seed: int = 0


@dataclass(frozen=True)
class ParallelConfig:
    """`sequence` ranks share each clip (0: all of them); further groups have other clips."""

    sequence: int = 1
    plan: str = "auto"
    backend: str = "auto"
    """Kernel of sharded or sparse attention; see `weft.core.backends`."""
    shard: bool = True
    """Shard parameters over the ranks (FSDP2); replicating them is faster where they fit."""


@dataclass(frozen=True)
class SaveConfig:
    every: int = 200
    """Steps between checkpoints."""
    keep: int = 2
    samples: int = 0
    """Steps between sheets of samples; 0 for none."""
    validate: int = 0
    """Steps between held-out losses; 0 for none."""
    prompts: tuple[str, ...] = (
        "a red circle moving left",
        "a blue square moving up",
        "a green triangle moving right over a white star",
        "a yellow star moving down and a purple circle",
    )


@dataclass(frozen=True)
class SparseConfig:
    """Sparse attention in training: how blocks are selected, how many, and from which step on."""

    method: Literal["dsv", "pooled", "window"] = "dsv"
    """dsv: a learned predictor. pooled: means of cubes, as in VSA. window: the nearest cubes."""
    source: Literal["qk", "hidden"] = "qk"
    rank: int = 16
    """Of the predictor, per head."""
    loss: Literal["kl", "pearson", "dsv"] = "kl"
    lr: float = 1e-3
    """Of the predictor."""
    rows: int = 64
    """Queries sampled to train and profile the predictor."""
    mass: float = 0.9
    """Share of a query's softmax that the selected keys must hold."""
    cube: Extent = (2, 4, 4)
    block_k: int | None = None
    """Keys per block; by default as many as a cube has."""
    proxy: Literal["mean", "center"] = "mean"
    budget: Literal["profile"] | float = "profile"
    """Share of keys per head: as profiled, or one value for all."""
    min_budget: float = 0.02
    coarse: bool = False
    """Add a gated attention among means of cubes."""
    anneal: int = 0
    """Steps in which the budget falls from 1 to its value."""
    stage1: int = 200
    """Maximum number of steps that a block stays dense while its predictor is trained."""
    profile_every: int = 25
    profile_rarely: int = 100
    """The same once a block's predictor is good."""
    dense_blocks: tuple[int, ...] = ()
    """Blocks that always stay dense; -1 is the last."""
    gate: Literal["cost"] | float = "cost"
    """Blocks become sparse where that is measured to be faster, or that need less than this share of keys."""
    cost_tokens: int | None = None
    """Sequence length for the cost model, if not the real one."""

    def __post_init__(self) -> None:
        _check_ranges("sparse", self, "rank rows profile_every profile_rarely", 1)
        _check_ranges("sparse", self, "anneal stage1 lr", 0)
        for size in (*self.cube, math.prod(self.cube)):
            _check_range("sparse.cube", size, 1, MAX_BLOCK)
        _check_range("sparse.block_k", self.block_k or 1, 1, MAX_BLOCK)
        _check_range("sparse.cost_tokens", self.cost_tokens or 0, 0, MAX_TOKENS)
        for name in ("mass", "min_budget", "budget"):
            share = getattr(self, name)
            if share != "profile" and not 0 < share <= 1:
                raise InputError(f"sparse.{name} must be in (0, 1], got {share}.")


@dataclass(frozen=True)
class Recipe:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    sparse: SparseConfig | None = None

    def __post_init__(self) -> None:
        train, data = self.train, self.data
        check_backend(self.parallel.backend)
        _check_ranges("train", train, "steps accumulate", 1)
        _check_ranges("train", train, "edges warmup seed", 0)
        _check_ranges("train", train, "ema drop floor", 0, 1)
        _check_ranges("train", train, "batch", 1, MAX_BATCH)
        _check_ranges("train", train, "logit_mean", -MAX_LOGIT_MEAN, MAX_LOGIT_MEAN)
        _check_ranges("data", data, "held_out", 1)
        _check_ranges("data", data, "frames", 1, MAX_FRAMES)
        _check_ranges("data", data, "size", 1, MAX_SIZE)
        _check_ranges("model", self.model, "upscale", 1, data.size)
        _check_ranges("parallel", self.parallel, "sequence", 0)
        _check_ranges("save", self.save, "every keep", 1)
        _check_ranges("save", self.save, "samples validate", 0)
        _check_range("len(save.prompts)", len(self.save.prompts), 1)
        for path in (data.path, self.model.start):
            if any(len(name.encode()) > MAX_NAME_BYTES for name in Path(path).parts):
                raise InputError(f"{path[:80]!r} in the recipe is too long for a path.")
        for name in ("lr", "max_grad_norm"):
            if getattr(train, name) <= 0:
                raise InputError(f"train.{name} must be > 0, got {getattr(train, name)}.")
        if train.batch % train.accumulate:
            raise InputError(
                f"train.accumulate must divide train.batch, got {train.accumulate} and {train.batch}."
            )
        if data.set == "latents" and self.model.upscale > 1:
            raise InputError(f"model.upscale must be 1 for latents, got {self.model.upscale}.")
        if (data.set in ("folder", "latents")) != bool(data.path):
            raise InputError(
                f'data.set = "{data.set}" with data.path = "{data.path}".',
                hint="folder and latents need data.path; the other sets are generated and take none.",
            )

    def to_json(self) -> dict[str, Any]:
        return {name: section for name, section in asdict(self).items() if section is not None}

    @staticmethod
    def of(table: Mapping[str, Any], source: str = "The recipe") -> Recipe:
        """Build a recipe from a dict of sections; unknown keys and wrong types raise an error."""
        for section, keys in RENAMED.items():
            config = table.get(section)
            for old in keys.keys() & config if isinstance(config, Mapping) else ():
                raise InputError(f"{source} [{section}]: {old!r} is now {keys[old]!r}.", hint="Rename it.")
        return tables.read(Recipe, table, source)

    @staticmethod
    def load(path: Path | str) -> Recipe:
        file = Path(path)
        if not file.is_file():
            raise InputError(f"There is no recipe {file}.", hint="Try recipes/shapes.toml of the repository.")
        if file.suffix == ".py":
            table = runpy.run_path(str(file)).get("recipe")
            if isinstance(table, Recipe):
                return table
            if not isinstance(table, Mapping):
                raise InputError(f"{file} must define `recipe`, a dict as of a TOML file.")
        elif file.suffix == ".toml":
            table = files.toml(file)
        else:
            raise InputError(f"A recipe must end in .toml or .py, got {file}.")
        return Recipe.of(table, str(file))


def _check_ranges(
    section: str, config: object, names: str, minimum: float, maximum: float = math.inf
) -> None:
    for name in names.split():
        _check_range(f"{section}.{name}", getattr(config, name), minimum, maximum)


def _check_range(name: str, value: float, minimum: float, maximum: float = math.inf) -> None:
    if not minimum <= value <= maximum:
        limits = f">= {minimum}" if maximum == math.inf else f"in [{minimum}, {maximum:,}]"
        raise InputError(f"{name} in the recipe must be {limits}, got {value}.")
