"""Trace masks: recorded from a real model, by step and layer, in an .npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.mask import BlockMask, BoolArray
from weft.masks.grid import TokenGrid, nearest

Arrays = dict[str, npt.NDArray[Any]]

MAX_BYTES = 8 << 30
KINDS = {"tiles": (3, ("b1",)), "bits": (3, ("u1",)), "counts": (1, ("i", "u"))}
"""Arrays of a file: the axes of one mask, and the dtypes as beginnings of their NumPy codes."""
EXPECTED = (
    "A trace is an .npz file with booleans `tiles` or packed uint8 `bits` [steps, layers, heads, q blocks, "
    "kv blocks], or integers `counts` [steps, layers, heads]; steps and layers may be left out together."
)


def trace_mask(
    heads: int,
    grid: TokenGrid,
    *,
    block: int = 64,
    file: str = "",
    step: int = 0,
    layer: int = 0,
    seed: int = 0,
) -> BlockMask:
    """Return one step and one layer of a recording: `tiles`, packed `bits` or `counts` in an .npz file.

    A count is a share of the file's `total` (or of its largest count); that share of this grid's tiles is
    active, at random places. `layer` is the model's number if the file has `layers`, and a position if not.
    """
    arrays = _read(file)
    name = next(name for name in KINDS if name in arrays)
    one = _pick(arrays, name, step, layer)
    if len(one) != heads:
        raise InputError(f"heads must be {len(one)}, as in the trace {file}, got {heads}.")
    blocks = grid.blocks(block)
    if name == "counts":
        total = _total(arrays, file) if "total" in arrays else int(arrays[name].max())
        return grid.mask(_scatter(one, total, blocks, seed), block)
    expected = blocks, -(-blocks // 8) if name == "bits" else blocks
    if one.shape[1:] != expected:
        raise InputError(
            f"{grid.tokens} tokens in blocks of {block} have {name} of {expected[0]} × {expected[1]}; "
            f"in {file} they are {one.shape[1]} × {one.shape[2]}.",
            hint="Pass the grid, text and block that the trace was recorded with.",
        )
    return grid.mask(
        np.unpackbits(one, axis=2, count=blocks).view(np.bool_) if name == "bits" else one, block
    )


def _read(file: str) -> Arrays:
    path = Path(file)
    if not path.is_file():
        raise InputError(f"There is no file {file!r}.", hint="Write trace:FILE with an existing file.")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            unpacked = sum(member.file_size for member in archive.zip.infolist())
            if unpacked > MAX_BYTES:  # a small file can unpack to any size
                raise InputError(f"{path} unpacks to {unpacked:,} bytes.", hint=f"At most {MAX_BYTES:,}.")
            arrays = {name: np.asarray(archive[name]) for name in archive.files}
    except InputError:
        raise
    except Exception:
        # The errors of NumPy and of zip (pickles, headers, passwords) do not help a user.
        raise InputError(f"{path} is not an .npz file of plain arrays.", hint=EXPECTED) from None
    for name, (axes, kinds) in KINDS.items():
        if (array := arrays.get(name)) is not None:
            if array.dtype.str[1:].startswith(kinds) and array.ndim in (axes, axes + 2) and array.size:
                return arrays
            raise InputError(f"`{name}` of {path} is {array.dtype} of shape {array.shape}.", hint=EXPECTED)
    raise InputError(f"{path} holds {', '.join(arrays) or 'nothing'}.", hint=EXPECTED)


def _total(arrays: Arrays, file: str) -> int:
    total = arrays["total"]
    if total.size != 1 or total.dtype.kind not in "iu":
        raise InputError(
            f"`total` of {file} must be one whole number, got {total.dtype} of shape {total.shape}."
        )
    return int(total.item())


def _pick(arrays: Arrays, name: str, step: int, layer: int) -> npt.NDArray[Any]:
    """Return [heads, …] of one step and one layer."""
    array = arrays[name]
    if array.ndim == KINDS[name][0]:
        array = array[None, None]
    steps, count = array.shape[:2]
    layers: list[int] = (
        arrays["layers"].ravel().tolist()[:count] if "layers" in arrays else list(range(count))
    )
    if not 0 <= step < steps:
        raise InputError(f"step={step} is not in the trace.", hint=f"It has steps 0 to {steps - 1}.")
    if layer not in layers:
        raise InputError(f"layer={layer} is not in the trace.", hint=f"It has {', '.join(map(str, layers))}.")
    return array[step, layers.index(layer)]


def _scatter(counts: npt.NDArray[Any], total: int, blocks: int, seed: int) -> BoolArray:
    """Return [heads, blocks, blocks] with each head's share of tiles at random places."""
    least, most = int(counts.min()), int(counts.max())
    if not 0 <= least <= most <= total:
        raise InputError(f"Counts must be in [0, total={total}], got {least} to {most}.", hint=EXPECTED)
    rng = np.random.default_rng(seed)
    tiles = np.zeros((len(counts), blocks, blocks), dtype=np.bool_)
    for head, count in zip(tiles, counts.tolist(), strict=True):
        if count:
            head[:] = nearest(rng.random((blocks, blocks), dtype=np.float32), count / total)
    return tiles
