"""Contiguous cuts: blocks stay in order, so that masks with locality go on needing few remote keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.indices import IntArray


def cut(loads: npt.ArrayLike, ring: int, *, cap: float = 1.25) -> IntArray:
    """The rank of each block: contiguous runs whose largest load is the least there is.

    No rank has more than `cap` times its even share of the blocks; a cap that cannot be kept in whole
    blocks is loosened to the least that can. Of equal cuts, it is one with nearly even counts.

    >>> cut([9, 1, 1, 1, 1, 1], 2, cap=2.0).tolist()
    [0, 1, 1, 1, 1, 1]
    """
    weights = np.asarray(loads, dtype=np.int64)
    if weights.ndim != 1 or ring < 1 or cap < 1 or weights.min(initial=0) < 0:
        raise InputError(
            f"Cannot cut loads of shape {weights.shape} for {ring} ranks with a cap of {cap}.",
            hint="Give one load of 0 or more a block, one rank or more, and a cap of 1 or more.",
        )
    most = max(int(cap * weights.size / ring), -(-weights.size // ring))
    prefix = np.concatenate(([0], np.cumsum(weights)))
    low, high = int(weights.max(initial=0)), int(prefix[-1])
    while low < high:
        middle = (low + high) // 2
        if _furthest(prefix, ring, middle, most)[-1] == weights.size:
            high = middle
        else:
            low = middle + 1
    stops = _evened(prefix, ring, low, most)
    return np.repeat(np.arange(ring), np.diff(stops, prepend=0))


def _furthest(prefix: IntArray, ring: int, limit: int, most: int) -> list[int]:
    """Where each rank ends at the latest if none has more than the limit, nor more blocks than allowed."""
    stops: list[int] = []
    at = 0
    for _ in range(ring):
        reach = int(np.searchsorted(prefix, int(prefix[at]) + limit, side="right")) - 1
        at = min(reach, at + most, prefix.size - 1)
        stops.append(at)
    return stops


def _evened(prefix: IntArray, ring: int, limit: int, most: int) -> list[int]:
    """Cuts as near to even counts as the limit allows: each between the earliest and the latest there is."""
    size = prefix.size - 1
    backwards = prefix[-1] - prefix[::-1]
    earliest = [size - stop for stop in _furthest(backwards, ring, limit, most)[-2::-1]] + [size]
    stops: list[int] = []
    at = 0
    for rank, first in enumerate(earliest):
        reach = int(np.searchsorted(prefix, int(prefix[at]) + limit, side="right")) - 1
        wish = size * (rank + 1) // ring
        at = min(max(wish, first, at), reach, at + most, size)
        stops.append(at)
    return stops
