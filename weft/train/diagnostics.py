"""Errors of a training run, with what was observed and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError, Tensor

from weft.core import tables
from weft.core.errors import InputError, WeftError
from weft.core.files import read_json
from weft.run.exchange import all_gather_json
from weft.train.recipe import RENAMED, Recipe

SECTIONS = ("model", "data", "train", "sparse")
"""Parts of a recipe that must stay as they are when a run resumes."""
MAY_CHANGE: dict[str, Any] = {"steps": 0, "accumulate": 0, "checkpointing": False}
"""Keys of [train] that may change nevertheless."""
MAX_CLIP_VALUE = 1e4
"""Pixels are from -1 to 1, and latents that a model can learn are not far from it."""


def check_same(file: Path, recipe: Recipe, clips: dict[str, str]) -> None:
    """Refuse a recipe, or clips, that differ from those in `file`, with which the run was started."""
    try:
        old = read_json(file)
        sections = {name: _renamed(name, old[name]) for name in SECTIONS if old.get(name) is not None}
        before = tables.read(Recipe, sections, str(file))  # keys newer than the run get their defaults
    except InputError as error:
        raise InputError(error.message, hint="Restore it, or give another --out.") from None
    old_train, new_train = (replace(each.train, **MAY_CHANGE) for each in (before, recipe))
    same = {name: getattr(before, name) == getattr(recipe, name) for name in SECTIONS}
    same |= {"train": old_train == new_train, "clips": (old.get("clips") or {}) == clips}
    for name, is_same in same.items():
        if not is_same:
            raise InputError(f"{file.parent} has a run with another [{name}].", hint="Give another --out.")


def _renamed(section: str, config: Any) -> Any:
    """Return a section with the present names of its keys; older weft wrote British ones."""
    if not isinstance(config, dict):
        return config
    names = RENAMED.get(section, {})
    config = {names.get(key, key): value for key, value in config.items()}
    return config | {"proxy": "center"} if config.get("proxy") == "centre" else config


def diverged(step: int, loss: float, grad_norm: float, video: Tensor) -> WeftError:
    """Return the error of a loss that is not finite; collective, each rank passes its clips of that step."""
    values = video.abs()
    is_finite = bool(values.isfinite().all())
    ranks = all_gather_json([is_finite, float(values.max()) if is_finite else 0.0])
    largest = max(value for _, value in ranks)
    again = "in another --out with model.start = …/model"
    if not all(finite for finite, _ in ranks):
        cause, hint = "Its clips have NaN or infinity", "Leave those clips out, or encode them again."
    elif largest > MAX_CLIP_VALUE:
        cause, hint = f"Its clips have values up to {largest:.3g}", "Scale them to about -1 to 1."
    else:
        cause = f"Its clips are in order, with values up to {largest:.3g}"
        hint = f"Lower train.lr, or use float32 where it is bfloat16, {again}."
    return WeftError(
        f"Step {step}: the loss is {loss:g} and its gradient's norm {grad_norm:g}. {cause}.", hint=hint
    )


@contextmanager
def explaining_out_of_memory() -> Iterator[None]:
    """Turn out-of-memory errors into one that names the recipe's sizes."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else "it cannot be allocated"
        raise WeftError(
            f"There is not enough memory: {reason}.",
            hint="Lower train.batch or the sizes in [data] and [model], or use more ranks.",
        ) from error
