"""Block mask of a head, each tile in the color of its rank: in model order and grouped by rank."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from weft.core.indices import Indices, IntArray
from weft.core.schedule import Schedule
from weft.report.case import Case
from weft.report.draw import Figure, Label, Pixels, Polyline, Rect, Shape
from weft.report.frame import Symbol, legend
from weft.report.palette import EIGHT, rank_color, rgb

PANEL, LEFT, TOP, BETWEEN = 216.0, 12.0, 24.0, 24.0
DENSE_UNITS = 128
PIXELS = 216
MOST_HEADS = 8
NOBODY = -1


def shown_heads(schedule: Schedule) -> list[int]:
    """Return one head for each distinct set of ranks that computes a head."""
    sharers: dict[int, set[int]] = {}
    for _, op in schedule.attends():
        for head in op.q.heads:
            sharers.setdefault(head, set()).add(op.rank)
    first: dict[frozenset[int], int] = {}
    for head in sorted(sharers):
        first.setdefault(frozenset(sharers[head]), head)
    return sorted(first.values())[:MOST_HEADS]


def owners(schedule: Schedule, head: int) -> tuple[IntArray, IntArray]:
    """Return the rank of each active tile [q units, kv units] and of each key unit [kv units].

    A unit is a block of the mask; for a dense mask, whose blocks carry no information, a fixed share of
    the tokens.
    """
    _, mask = schedule.attention
    rows, cols = (
        _samples(mask.q_len, mask.block_q, dense=mask.is_dense),
        _samples(mask.kv_len, mask.block_k, dense=mask.is_dense),
    )
    grid = np.full((rows.size, cols.size), NOBODY, dtype=np.int64)
    brought = np.full(cols.size, NOBODY, dtype=np.int64)
    for _, op in schedule.attends():
        if head not in op.q.heads:
            continue
        ours, theirs = _among(rows, op.q.tokens, mask.q_len), _among(cols, op.kv.tokens, mask.kv_len)
        grid[np.ix_(ours, theirs)] = op.rank
        # The first attention of a rank reads its own keys.
        new = theirs & (brought == NOBODY)
        brought[new] = op.rank
    if not mask.is_dense:
        grid[~mask.patterns[mask.pattern_of[head]]] = NOBODY
    return grid, brought


def _samples(length: int, block: int, *, dense: bool) -> IntArray:
    if not dense:
        return np.arange(0, length, block, dtype=np.int64)
    units = min(length, DENSE_UNITS)
    return (np.arange(units, dtype=np.int64) * 2 + 1) * length // (2 * units)


def _among(samples: IntArray, tokens: Indices, length: int) -> npt.NDArray[np.bool_]:
    here = np.zeros(length, dtype=bool)
    for start, stop in tokens.runs:
        here[start:stop] = True
    return here[samples]


def pixels(tiles: IntArray, ranks: int, machines: int) -> npt.NDArray[np.uint8]:
    """Return the pixels of tiles; several tiles per pixel get their mean color, weighted by density."""
    table = np.array([rgb(*rank_color(rank, ranks, machines)) for rank in range(ranks)] + [(0, 0, 0)])
    active = tiles != NOBODY
    planes = np.dstack([table[tiles] * active[:, :, None], 255 * active]).astype(np.float64)
    for axis in (0, 1):
        size = planes.shape[axis]
        if size > PIXELS:
            starts = np.arange(PIXELS) * size // PIXELS
            planes = np.add.reduceat(planes, starts, axis=axis)
            counts = np.diff(np.append(starts, size))
            planes /= counts.reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
    share = planes[:, :, 3:] / 255
    color = np.divide(planes[:, :, :3], share, out=np.zeros_like(planes[:, :, :3]), where=share > 0)
    # The square root keeps a thin diagonal visible in a coarse pixel. Sixteen
    # strengths and as many steps of each color look the same as all and are a third of the bytes.
    rgba = np.dstack([color, 255 * np.sqrt(share)])
    return (
        (rgba / 17).round().clip(0, 15).astype(np.uint8) * 17
        if max(tiles.shape) > PIXELS
        else rgba.astype(np.uint8)
    )


def mask_figure(case: Case, schedule: Schedule, head: int) -> Figure:
    """Draw the two panels of one head."""
    tiles, brought = owners(schedule, head)
    computes = tiles.max(axis=1)
    down, across = np.argsort(computes, kind="stable"), np.argsort(brought, kind="stable")
    second = LEFT + PANEL + BETWEEN
    shapes: list[Shape] = [
        Label(LEFT, 14, "model order", 12, "ink"),
        Label(second, 14, "by rank", 12, "ink"),
        Rect(LEFT, TOP, PANEL, PANEL, "panel"),
        Rect(second, TOP, PANEL, PANEL, "panel"),
        Pixels(LEFT, TOP, PANEL, PANEL, pixels(tiles, case.ranks, case.machines), "mask"),
        Pixels(
            second, TOP, PANEL, PANEL, pixels(tiles[np.ix_(down, across)], case.ranks, case.machines), "mask"
        ),
    ]
    for borders, vertical in ((np.diff(computes[down]), False), (np.diff(brought[across]), True)):
        for place in np.flatnonzero(borders) + 1:
            at = PANEL * float(place) / (borders.size + 1)
            ends = (
                ((second + at, TOP), (second + at, TOP + PANEL))
                if vertical
                else ((second, TOP + at), (second + PANEL, TOP + at))
            )
            shapes.append(Polyline(ends, "ink", 0.8, kind="border"))
    sharing = [rank for rank in range(case.ranks) if (tiles == rank).any()]
    shapes += rank_legend(case, sharing, TOP + PANEL + 20)
    whole = tiles.size or 1
    title = (
        f"Mask of head {head}: {(tiles != NOBODY).sum() / whole:.0%} of tiles, shared by {_ranks(sharing)}"
    )
    caption = f"Queries down, keys across; {tiles.shape[0]} × {tiles.shape[1]} tiles."
    width, height = second + PANEL + LEFT, TOP + PANEL + 32
    return Figure(f"mask-head-{head}", title, width, height, tuple(shapes), caption, group="mask")


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} alone"
    return f"{len(ranks)} ranks"


def rank_legend(case: Case, ranks: list[int], y: float) -> list[Shape]:
    """Return the legend: one square per rank, or per machine if ranks have no colors of their own."""
    by_machine = case.ranks > EIGHT
    devices = max(1, case.ranks // case.machines)
    chosen = sorted({rank // devices * devices for rank in ranks}) if by_machine else ranks
    entries: list[tuple[Symbol, str]] = [("", "machine" if by_machine else "rank")]
    for rank in chosen[:EIGHT]:
        square = Rect(0, 0, 10, 10, *rank_color(rank, case.ranks, case.machines))
        entries.append((square, str(rank // devices if by_machine else rank)))
    return legend(entries, y, math.inf, LEFT)[0]
