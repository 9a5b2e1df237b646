"""Refusals: why a run cannot go on, as errors that say what was seen and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError, Tensor

from weft.core.errors import InputError, WeftError
from weft.core.files import read_json
from weft.run.exchange import all_gather_json
from weft.train.recipe import Recipe

LOOSE = {"steps": 0, "accumulate": 0, "checkpointing": False}
"""Of a recipe, what may change when a run goes on; how often it is saved and on how many ranks, too."""
HUGE = 1e4
"""Of clips: pixels are from -1 to 1, and latents that a model can learn are not far from it."""


def check_same(file: Path, recipe: dict[str, Any]) -> None:
    """Refuse another recipe than the one in `file`, which a run was begun with."""
    try:
        old = read_json(file)
    except InputError as error:
        raise InputError(error.message, hint="Restore it, or give another --out.") from None
    defaults = Recipe().to_json()
    for name in ("model", "data", "train", "sparse", "clips"):
        if not isinstance(old.get(name), dict | None):
            raise InputError(f"[{name}] of {file} is no table.", hint="Restore it, or give another --out.")
        new = defaults.get(name) or {}  # an option that a run is older than is as it was without it
        before, now = ({**new, **(each.get(name) or {}), **LOOSE} for each in (old, recipe))
        if before != now:
            raise InputError(f"{file.parent} has a run with another [{name}].", hint="Give another --out.")


def diverged(step: int, loss: float, norm: float, video: Tensor) -> WeftError:
    """Return the error of a loss that is no number; all ranks ask, each with its clips of that step."""
    values = video.abs()
    whole = bool(values.isfinite().all())
    seen = all_gather_json([whole, float(values.max()) if whole else 0.0])
    largest = max(each for _, each in seen)
    again = "in another --out with model.start = …/model"
    if not all(good for good, _ in seen):
        what, hint = "Its clips have NaN or infinity", "Leave those clips out, or encode them again."
    elif largest > HUGE:
        what, hint = f"Its clips have values up to {largest:.3g}", "Scale them to about -1 to 1."
    else:
        what = f"Its clips are in order, with values up to {largest:.3g}"
        hint = f"Lower train.rate, or use float32 where it is bfloat16, {again}."
    return WeftError(
        f"Step {step}: the loss is {loss:g} and its gradient's norm {norm:g}. {what}.", hint=hint
    )


@contextmanager
def fitting() -> Iterator[None]:
    """Around code that takes memory by the sizes of a recipe: tell where there is not as much."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else "it cannot be allocated"
        raise WeftError(
            f"There is not enough memory: {reason}.",
            hint="Lower train.batch or the sizes in [data] and [model], or take more ranks.",
        ) from error


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Around code that takes apart what a file held: where it is of another shape, the file is refused."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, WeftError):
            raise
        raise InputError(
            f"{what} cannot be used: {type(error).__name__}: {error}.",
            hint="Go on with the recipe and the version of weft that wrote it, or give another --out.",
        ) from error
