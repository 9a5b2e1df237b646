"""Balance: the largest load over the mean, and the lower bound of that ratio.

Loads are integers (a cost table's, not counts of tiles), so that all ranks compute the same numbers.
`tiles[u, a, b]` is the load of Ulysses slice u between row group a and column group b of its ring;
in ring step t, rank a meets column group (a - t) mod R.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def ratio(loads: npt.ArrayLike) -> float:
    """max / mean over ranks: the slowdown against perfect balance if ranks wait only at the end.

    >>> ratio([4, 2, 3, 3])
    1.3333333333333333
    """
    array = np.asarray(loads, dtype=np.float64).ravel()
    total = array.sum()
    return float(array.max() * array.size / total) if total else 1.0


def step_loads(tiles: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[slices, ranks of the ring, steps] of tiles [slices, row groups, column groups]."""
    ring = tiles.shape[-1]
    rank, step = np.ogrid[:ring, :ring]
    return tiles[:, rank, (rank - step) % ring]


def step_ratio(tiles: npt.NDArray[Any]) -> float:
    """As `ratio`, with a barrier after each ring step; rings of different slices do not wait for each other.

    >>> step_ratio(np.array([[[3, 1], [1, 3]]])), step_ratio(np.array([[[3, 1], [3, 1]]]))
    (1.0, 1.5)
    """
    total = tiles.sum()
    slowest = step_loads(tiles).max(axis=1).sum(axis=1).max()
    return float(slowest / total * tiles.shape[0] * tiles.shape[1]) if total else 1.0


def bound(weights: npt.ArrayLike, ranks: int, *, splittable: bool = False) -> float:
    """No assignment of whole items to ranks has a lower ratio; items that can be split know only the mean.

    With P·j + 1 items, some rank gets j + 1 of them: at best the smallest j + 1 of the largest P·j + 1.

    >>> bound([5, 1, 1, 1], 2), bound([3, 3, 3], 2)
    (1.25, 1.3333333333333333)
    """
    items = np.sort(np.asarray(weights, dtype=np.int64))[::-1]
    total = int(items.sum())
    if not total or ranks < 2:
        return 1.0
    least = -(-total // ranks)
    for j in range(0 if splittable else (items.size - 1) // ranks + 1):
        first = items[: ranks * j + 1]
        least = max(least, int(first[-(j + 1) :].sum()))
    return least * ranks / total
