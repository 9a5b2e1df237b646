"""Errors of a training run, with what was observed and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError, Tensor

from weft.core.errors import InputError, WeftError
from weft.core.files import read_json
from weft.run.exchange import all_gather_json
from weft.train.recipe import RENAMED, Recipe

MAY_CHANGE = {"steps": 0, "accumulate": 0, "checkpointing": False}
"""Recipe keys that may change when a run resumes, like all of [save] and [parallel]."""
MAX_CLIP_VALUE = 1e4
"""Pixels are from -1 to 1, and latents that a model can learn are not far from it."""


def check_same(file: Path, recipe: dict[str, Any]) -> None:
    """Refuse a recipe that differs from `file`, the one that the run was started with."""
    try:
        old = read_json(file)
    except InputError as error:
        raise InputError(error.message, hint="Restore it, or give another --out.") from None
    defaults = Recipe().to_json()
    for name in ("model", "data", "train", "sparse", "clips"):
        if not isinstance(old.get(name), dict | None):
            raise InputError(
                f"[{name}] of {file} must be a table.", hint="Restore it, or give another --out."
            )
        # Keys that a run is older than have their defaults.
        before, after = (
            {**(defaults.get(name) or {}), **_renamed(name, table.get(name) or {}), **MAY_CHANGE}
            for table in (old, recipe)
        )
        if before != after:
            raise InputError(f"{file.parent} has a run with another [{name}].", hint="Give another --out.")


def _renamed(section: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a section with the present names of its keys; older weft wrote British ones."""
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
