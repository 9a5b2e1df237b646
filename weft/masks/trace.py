"""Trace: masks recorded from a real model, step by step and layer by layer, from an .npz file."""

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
"""What a file may hold: the axes of one mask and the kinds of numbers, of one byte where it says so."""
WANTED = (
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
    """One step and one layer of a recording: `tiles`, packed `bits` or `counts` in an .npz file.

    Of a count, the share of the file's `total` (or else of its largest count) is kept of this grid's
    tiles, at random places, since a count does not say where. `layer` is the model's number if the
    file has `layers`, and a position if not.
    """
    arrays = _read(file)
    name = next(name for name in KINDS if name in arrays)
    one = _pick(arrays, name, step, layer)
    if len(one) != heads:
        raise InputError(f"The trace {file} has {len(one)} heads, not {heads}.", hint=f"Ask for {len(one)}.")
    blocks = grid.blocks(block)
    if name == "counts":
        total = _total(arrays, file) if "total" in arrays else int(arrays[name].max())
        return grid.mask(_scatter(one, total, blocks, seed), block)
    wanted = blocks, -(-blocks // 8) if name == "bits" else blocks
    if one.shape[1:] != wanted:
        raise InputError(
            f"{grid.tokens} tokens in blocks of {block} have {name} of {wanted[0]} × {wanted[1]}; "
            f"in {file} they are {one.shape[1]} × {one.shape[2]}.",
            hint="Give the grid, text and block that the trace was recorded with.",
        )
    return grid.mask(
        np.unpackbits(one, axis=2, count=blocks).view(np.bool_) if name == "bits" else one, block
    )


def _read(file: str) -> Arrays:
    path = Path(file)
    if not path.is_file():
        raise InputError(f"There is no file {file!r}.", hint="Write trace:FILE, with a file that is there.")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as found:
            unpacked = sum(part.file_size for part in found.zip.infolist())
            if unpacked > MAX_BYTES:  # a small file can unpack to anything
                raise InputError(f"{path} unpacks to {unpacked:,} bytes.", hint=f"At most {MAX_BYTES:,}.")
            arrays = {name: np.asarray(found[name]) for name in found.files}
    except InputError:
        raise
    except Exception:
        # The reasons of NumPy and of zip (pickles, headers, passwords) say nothing to a user.
        raise InputError(f"{path} is no .npz file of plain arrays.", hint=WANTED) from None
    for name, (axes, kinds) in KINDS.items():
        if (array := arrays.get(name)) is not None:
            if array.dtype.str[1:].startswith(kinds) and array.ndim in (axes, axes + 2) and array.size:
                return arrays
            raise InputError(f"`{name}` of {path} is {array.dtype} of shape {array.shape}.", hint=WANTED)
    raise InputError(f"{path} holds {', '.join(arrays) or 'nothing'}.", hint=WANTED)


def _total(arrays: Arrays, file: str) -> int:
    given = arrays["total"]
    if given.size != 1 or given.dtype.kind not in "iu":
        raise InputError(
            f"`total` of {file} is {given.dtype} of shape {given.shape}.", hint="Give one whole number."
        )
    return int(given.item())


def _pick(arrays: Arrays, name: str, step: int, layer: int) -> npt.NDArray[Any]:
    """[heads, …] of one step and one layer."""
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
    """[heads, blocks, blocks] with each head's share of tiles at random places."""
    least, most = int(counts.min()), int(counts.max())
    if not 0 <= least <= most <= total:
        raise InputError(f"Counts from {least} to {most} are no parts of total={total}.", hint=WANTED)
    rng = np.random.default_rng(seed)
    tiles = np.zeros((len(counts), blocks, blocks), dtype=np.bool_)
    for head, count in zip(tiles, counts.tolist(), strict=True):
        if count:
            head[:] = nearest(rng.random((blocks, blocks), dtype=np.float32), count / total)
    return tiles
