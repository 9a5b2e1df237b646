"""Return the (frames, rows, columns) of a model's video tokens, read from its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch.utils._pytree import PyTree
from torch.utils.weak import WeakIdKeyDictionary

from weft.core.errors import InputError
from weft.core.voxels import Extent
from weft.hooks.digest import version_of
from weft.hooks.wrap import Target

Arguments = Mapping[str, PyTree]


def patches(model: Target, arguments: Arguments, order: str = "cthw") -> Extent:
    """Of latents [batch, …] whose other dims are in an order; images have no frames."""
    shape, patch = arguments["hidden_states"].shape[1:], model.config.patch_size
    size = dict(zip(order if len(shape) == len(order) else order.replace("t", ""), shape, strict=True))
    if isinstance(patch, int):
        patch = getattr(model.config, "patch_size_t", None) or 1, patch, patch
    frames, rows, columns = (1, 1, *patch)[-3:]
    return -(-size.get("t", 1) // frames), size["h"] // rows, size["w"] // columns


def frames_first(model: Target, arguments: Arguments) -> Extent:
    return patches(model, arguments, "tchw")


def from_sizes(_: Target, arguments: Arguments) -> Extent:
    return arguments["num_frames"], arguments["height"], arguments["width"]


def from_shape(model: Target, arguments: Arguments) -> Extent:
    return patches(model, arguments, "thwc")


def from_packed(_: Target, arguments: Arguments) -> Extent:
    """Of position ids [text and image tokens, (image, row, column)]."""
    tokens = arguments["hidden_states"].shape[1]
    return from_ids(_, {"img_ids": arguments["position_ids"][-tokens:]})


_extents = WeakIdKeyDictionary()
"""Of packed rows, by the tensor of their positions, which all steps have: reading it waits for the device."""


def from_rows(_: Target, arguments: Arguments) -> Extent:
    """Of rows of all kinds of tokens, the last of which are the video: those of one kind and one time."""
    ids, tags, times = (arguments[name] for name in ("position_ids", "token_tags", "timestep_indices"))
    version = version_of(ids), version_of(tags), version_of(times)
    if ids not in _extents or _extents[ids][0] != version:
        other = ((tags != tags[-1]) | (times != times[-1])).nonzero().flatten()
        count = len(tags) - (int(other[-1]) + 1 if len(other) else 0)
        extent = tuple(len(axis.unique()) for axis in ids[-count:].T)
        _extents[ids] = version, extent if prod(extent) == count else (1, 1, count)
    return _extents[ids][1]


def from_ids(_: Target, arguments: Arguments) -> Extent:
    """Return the grid of position ids [tokens, (image, row, column, …)]; consecutive images are frames."""
    ids = arguments["img_ids"]
    cells = (ids if ids.dim() == 2 else ids[0])[:, 1:3]
    rows, columns = (len(each.unique()) for each in cells.T)
    first = cells[: rows * columns]
    frames, rest = divmod(len(cells), rows * columns)
    if rest or bool((cells != first.repeat(frames, 1)).any()):
        raise _no_grid(len(cells))
    return frames, rows, columns


def from_shapes(_: Target, arguments: Arguments) -> Extent:
    """Images one after another are frames; the shape of a single image may be outside of a list."""
    first = arguments["img_shapes"][0]
    shapes = first if isinstance(first, list) else [first]
    if len({tuple(shape[1:]) for shape in shapes}) > 1:
        raise _no_grid(sum(map(prod, shapes)))
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def _no_grid(tokens: int) -> InputError:
    return InputError(
        f"{tokens} tokens of images of different sizes do not form a grid, which sparse= needs.",
        hint="Without sparse= images can have any sizes.",
    )
