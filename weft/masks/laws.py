"""Laws over heads: how densities spread, which heads are of which kind, how values drift over steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.mask import BoolArray

Floats = npt.NDArray[np.float64]


def share(name: str, given: float) -> float:
    """The number, if it is a share."""
    if not 0 <= given <= 1:
        raise InputError(f"{name}={given} is no share.", hint="Give a number from 0 to 1.")
    return given


def head_densities(heads: int, density: float | Sequence[float], *, cv: float = 0.0, seed: int = 0) -> Floats:
    """[heads]: one density for all, or one spread by a beta law with this cv (deviation / mean), or a list.

    >>> head_densities(3, 0.25).tolist(), head_densities(2, [0.1, 0.9]).tolist()
    ([0.25, 0.25, 0.25], [0.1, 0.9])
    """
    listed = np.atleast_1d(np.asarray(density, dtype=np.float64))
    for one in listed.tolist():
        share("density", one)
    if listed.size not in (1, heads):
        raise InputError(f"{listed.size} densities for {heads} heads.", hint=f"Give 1 or {heads}.")
    mean = float(listed[0])
    if not cv or listed.size > 1 or mean in (0, 1):
        return np.broadcast_to(listed, heads).copy()
    # A share with this mean cannot spread further than being 0 or 1.
    widest = float(np.sqrt((1 - mean) / mean))
    if not 0 <= cv < widest:
        raise InputError(
            f"cv={cv} with density={mean} is no law on 0 to 1.", hint=f"Give a cv of less than {widest:.2f}."
        )
    total = (1 - mean) / (mean * cv**2) - 1
    return np.random.default_rng([seed, 1]).beta(mean * total, (1 - mean) * total, heads)


def chosen_heads(heads: int, part: float, *, name: str, seed: int) -> BoolArray:
    """[heads]: which heads are of a kind that this share of them is (rounded to whole heads)."""
    found = np.zeros(heads, dtype=np.bool_)
    found[np.random.default_rng([seed, 2]).permutation(heads)[: round(share(name, part) * heads)]] = True
    return found


def drift(shape: tuple[int, ...], *, step: int, rho: float, seed: Sequence[int]) -> Floats:
    """Standard normals after `step` denoising steps of an AR(1) walk: each step keeps rho of the last."""
    if step < 0:
        raise InputError(f"step={step} is no step.", hint="Steps are counted from 0.")
    share("rho", rho)
    rng = np.random.default_rng(seed)
    found = rng.standard_normal(shape)
    for _ in range(step):
        found = rho * found + np.sqrt(1 - rho**2) * rng.standard_normal(shape)
    return found
