"""Grids: the (frames, rows, columns) of a model's video tokens, as its arguments say them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from weft.core.errors import InputError


def patches(model: Any, given: Mapping[str, Any], order: str = "cthw") -> tuple[int, int, int]:
    """Of latents [batch, …] whose other dims come in an order; images have no frames."""
    shape, patch = given["hidden_states"].shape[1:], model.config.patch_size
    size = dict(zip(order if len(shape) == len(order) else order.replace("t", ""), shape, strict=True))
    if isinstance(patch, int):
        patch = getattr(model.config, "patch_size_t", None) or 1, patch, patch
    frames, rows, columns = (1, 1, *patch)[-3:]
    return -(-size.get("t", 1) // frames), size["h"] // rows, size["w"] // columns


def frames_first(model: Any, given: Mapping[str, Any]) -> tuple[int, int, int]:
    return patches(model, given, "tchw")


def told(_: Any, given: Mapping[str, Any]) -> tuple[int, int, int]:
    return given["num_frames"], given["height"], given["width"]


def ids(_: Any, given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of positions [tokens, (what, row, column, …)]; images one after another are frames."""
    ids = given["img_ids"]
    places = (ids if ids.dim() == 2 else ids[0])[:, 1:3]
    rows, columns = (len(each.unique()) for each in places.T)
    first = places[: rows * columns]
    frames, rest = divmod(len(places), rows * columns)
    if rest or bool((places != first.repeat(frames, 1)).any()):
        raise _no_grid(len(places))
    return frames, rows, columns


def shapes(_: Any, given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Images one after another are frames; of one image, its shape may be by itself."""
    first = given["img_shapes"][0]
    shapes = first if isinstance(first, list) else [first]
    if len({tuple(shape[1:]) for shape in shapes}) > 1:
        raise _no_grid(sum(map(prod, shapes)))
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def _no_grid(tokens: int) -> InputError:
    return InputError(
        f"{tokens} tokens of images of different sizes are no grid.",
        hint="Masks need one; without mask= images can have any sizes.",
    )
