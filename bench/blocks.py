"""Blocks to ring ranks: how even each ring step is, what moves for it, what stays local, how long it takes.

`rows(quick)` are rows of bench/planner.py. Masks are made-up videos of 592 × 592 blocks and 40 heads over
layers and steps, the heads balanced first; the peer is db-SP's greedy on the same loads. Times are CPU
milliseconds of one process, which survive a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np

from bench.deals import contiguous, dbsp_blocks, homes, tile_sums
from bench.rows import Row
from weft.core.indices import IntArray
from weft.core.mask import BlockMask
from weft.masks.evolving import evolving_mask
from weft.masks.grid import TokenGrid
from weft.masks.sta import sta_mask
from weft.masks.svg import svg_mask
from weft.plan.balance import bound, step_ratio
from weft.plan.blocks import Blocks, joint
from weft.plan.counts import head_loads, row_loads, tile_loads
from weft.plan.cuts import cut
from weft.plan.heads import natural, refined

GRID, HEADS, LAYERS = TokenGrid(16, 37, 64), 40, 40
STRATEGIES = (4, 2), (2, 4), (1, 8)
RATIO, MOVED, NEEDED, LAYER_MS, MODEL_MS = 1.02, 1 / 3, 1.1, 20, 500
PEER = "db-SP, reward 2"

Count = Callable[[BlockMask], IntArray]
T = TypeVar("T")


def rows(quick: bool) -> list[Row]:  # noqa: FBT001 - bench.planner calls it so
    masks = [evolving_mask(HEADS, GRID, seed=seed, step=4 * seed) for seed in range(3 if quick else 12)]
    table = [row for strategy in STRATEGIES for row in _balance_rows(masks, *strategy)]
    return table + _local_rows() + _time_rows(masks)


class BlockBalance(NamedTuple):
    ratio: float
    moved: float
    """Of rows or columns, whichever move more; mean over slices."""


def _judge(tiles: IntArray, ring: int, dealt: Blocks) -> BlockBalance:
    at_home = zip(dealt, homes(tiles, ring), strict=True)
    moved = [float((groups != home).mean()) for groups, home in at_home]
    return BlockBalance(step_ratio(tile_sums(tiles, *dealt, ring)), max(moved))


def _balance_rows(masks: Sequence[BlockMask], slices: int, ring: int) -> list[Row]:
    ours: list[BlockBalance] = []
    peer: list[BlockBalance] = []
    others: list[tuple[float, float]] = []
    limits: list[float] = []
    for mask in masks:
        heads = head_loads(mask)
        tiles = tile_loads(mask, refined(heads, slices))
        rows, cols = (np.tile(home, (slices, 1)) for home in homes(tiles, ring))
        ours.append(_judge(tiles, ring, joint(tiles, ring, *homes(tiles, ring))))
        peer.append(_judge(tiles, ring, dbsp_blocks(tiles, ring, reward=2)))
        free = _judge(tiles, ring, dbsp_blocks(tiles, ring, reward=0))
        still = _judge(tile_loads(mask, natural(HEADS, slices)), ring, (rows, cols))
        others.append((free.ratio, still.ratio))
        limits.append(bound(heads, slices))
    free, still = 100 * (np.max(others, axis=0) - 1)
    worst, most = 100 * (np.max(ours, axis=0) - (1, 0))
    worst_peer, most_peer = 100 * (np.max(peer, axis=0) - (1, 0))
    return [
        Row(
            case=f"U{slices}R{ring} step ratio over 1, worst of {len(masks)} layers",
            measured=float(worst),
            unit="%",
            peer=float(worst_peer),
            peer_name=f"{PEER} (reward 0: {free:.1f}, natural: {still:.1f})",
            limit=100 * (max(limits) - 1),
            bar=f"≤ {100 * (RATIO - 1):.0f} %",
            holds=bool(worst <= 100 * (RATIO - 1)),
        ),
        Row(
            case=f"U{slices}R{ring} blocks moved for it, most of {len(masks)} layers",
            measured=float(most),
            unit="%",
            peer=float(most_peer),
            peer_name=PEER,
            bar=f"≤ {100 * MOVED:.0f} %",
            holds=bool(most <= 100 * MOVED),
        ),
    ]


def _local_rows() -> list[Row]:
    """Needed keys of contiguous cuts by load, over those of equal cuts."""
    video = TokenGrid(12, 48, 64)
    masks = {
        "STA 3×3×3": sta_mask(8, video),
        "STA 1×3×3": sta_mask(8, video, window=((1, 3, 3),)),
        "spatial bands": svg_mask(8, video, spatial=1.0),
    }
    table: list[Row] = []
    for name, mask in masks.items():
        even = contiguous(mask.q_blocks, 8)
        plain = 100 * needed_fraction(mask, even, even)
        ours = 100 * needed_fraction(mask, cut(row_loads(mask).sum(axis=0), 8), even)
        tiles = tile_loads(mask, [range(mask.heads)])
        peer = dbsp_blocks(tiles, 8)
        table.append(
            Row(
                case=f"{name}, ring of 8: remote keys that cuts by load need",
                measured=ours,
                unit="%",
                peer=100 * needed_fraction(mask, peer[0][0], peer[1][0]),
                peer_name=PEER,
                limit=plain,
                bar=f"≤ {NEEDED} × equal cuts (limit)",
                holds=ours <= NEEDED * plain,
            )
        )
    return table


def _milliseconds(call: Callable[[T], object], arguments: Sequence[T]) -> list[float]:
    """Of each in turn."""
    times: list[float] = []
    for one in arguments:
        began = time.process_time()
        call(one)
        times.append(1e3 * (time.process_time() - began))
    return times


def _time_rows(masks: Sequence[BlockMask]) -> list[Row]:
    table: list[Row] = []
    layers = [masks[layer % len(masks)] for layer in range(LAYERS)]
    for slices, ring in STRATEGIES:

        def count(mask: BlockMask, slices: int = slices) -> IntArray:
            return tile_loads(mask, refined(head_loads(mask), slices))

        def plan(mask: BlockMask, ring: int = ring, count: Count = count) -> Blocks:
            tiles = count(mask)
            return joint(tiles, ring, *homes(tiles, ring))

        def greedy(mask: BlockMask, ring: int = ring, count: Count = count) -> Blocks:
            return dbsp_blocks(count(mask), ring)

        plan(masks[0])
        counting, peer, ours = (_milliseconds(call, layers) for call in (count, greedy, plan))
        for case, bar, of in ((" a layer", LAYER_MS, median), (f" {LAYERS} layers, cold", MODEL_MS, sum)):
            table.append(
                Row(
                    case=f"U{slices}R{ring} planning{case}",
                    measured=of(ours),
                    peer=of(peer),
                    peer_name=f"{PEER}, on our counts",
                    limit=of(counting),
                    bar=f"< {bar} ms (limit: counting alone)",
                    holds=of(ours) < bar,
                )
            )
    return [*table, _warm_row()]


def _warm_row() -> Row:
    """The next denoising step, from the plan of the last."""
    old, new = (
        tile_loads(evolving_mask(HEADS, GRID, seed=1, step=step), [range(HEADS)]) for step in (20, 21)
    )
    home = homes(old, 8)
    before = joint(old, 8, *home)
    after = joint(new, 8, *home, start=before)
    warm = median(_milliseconds(lambda tiles: joint(tiles, 8, *home, start=before), [new] * 9))
    cold = median(_milliseconds(lambda tiles: joint(tiles, 8, *home), [new] * 9))
    stale, fresh = (100 * (step_ratio(tile_sums(new, *dealt, 8)) - 1) for dealt in (before, after))
    return Row(
        case=f"U1R8 blocks of the next step from the last plan ({stale:.1f} % over 1, then {fresh:.1f} %)",
        measured=warm,
        peer=cold,
        peer_name="weft, from home",
        bar=f"≤ {100 * (RATIO - 1):.0f} % over 1",
        holds=fresh <= 100 * (RATIO - 1),
    )


def needed_fraction(mask: BlockMask, rows: IntArray, cols: IntArray) -> float:
    """The share of remote kv blocks that a rank's rows need in some head, on average over ranks.

    `rows[n]` and `cols[m]` are ring coordinates; the ring is as large as the largest of them says.
    """
    ring = int(max(rows.max(), cols.max())) + 1
    any_head = np.bitwise_or.reduce(mask.bits[np.unique(mask.pattern_of)], axis=0)
    shares: list[float] = []
    for rank in range(ring):
        touched = np.bitwise_or.reduce(any_head[rows == rank], axis=0)
        needed = np.unpackbits(touched, count=mask.kv_blocks).view(np.bool_)
        remote = cols != rank
        shares.append(float(needed[remote].mean()) if remote.any() else 0.0)
    return float(np.mean(shares))
