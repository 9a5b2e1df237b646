"""Heads on 8 ranks: balance with known counts, through a denoising loop, with heads split; planning times.

The counts are those of Wan2.1-14B with SpargeAttn (30 steps × 20 layers × 40 heads, one run). Ratios are
given as the busiest rank's load in per mille of the mean, beside the bound that no grouping of whole heads
can beat.

Online is what a planner does on rank 0 (`weft.run.planner`): the first step is planned from its own
mask, every other one from the masks before it, by a forecast. A prior should come from another run, and there
is only one: it is what a run stores whose counts are this run's, by step and layer, each multiplied by
lognormal noise of sigma 0.2, the mean over several draws. The forecast has no constant fitted to the file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from bench.deals import DbspPolicy, snake
from bench.dry import Transport
from bench.rows import Row
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.topology import Topology
from weft.plan.assignment import natural_assignment
from weft.plan.balance import bound, ratio
from weft.plan.balanced import Balancer
from weft.plan.heads import Groups, greedy, group_loads, natural, refined
from weft.plan.place import AttentionId
from weft.plan.split import part_loads, split
from weft.plan.strategies import parse
from weft.run.planner import Planner

TRACE = Path(__file__).parents[2] / "shared" / "data" / "wan_sparge_head_blocks.npz"
RANKS = 8
STRATEGY = parse("ulysses+balanced", RANKS)
TOPOLOGY = Topology.local(RANKS)
NOISE = 0.2
BLOCK, Q_BLOCKS, KV_BLOCKS = 64, 256, 512
"""Of the masks that are made of counts: as many tiles as the largest count of the file."""
PREFIXES = np.packbits(np.tri(KV_BLOCKS + 1, KV_BLOCKS, -1, dtype=np.bool_), axis=1)
"""Packed rows by how many of their tiles are active, from the first on."""
KNOWN, KNOWN_CUTS, ONLINE, ONLINE_PRIOR = 1.0015, 0.5, 1.026, 1.022
PLAN_MS = 50
UNIT = "‰ of mean load"
WINDOWS = (45, 45, 60, 30, 50, 27)  # of 300 tiles: the windows of STA
Number = float | np.floating
Counts = npt.NDArray[np.int64]
Assigned = Callable[[Counts, int], Groups]


def rows(quick: bool, trace: Path = TRACE) -> list[Row]:  # noqa: FBT001 - bench.planner calls it so
    counts = np.load(trace)["counts"].astype(np.int64)
    return [
        *known(counts),
        *online(counts, 1 if quick else 8),
        *splitting(20 if quick else 100),
        *times(counts),
    ]


def problem_of(heads: int) -> Problem:
    q, kv = (Layout.even(blocks * BLOCK, RANKS) for blocks in (Q_BLOCKS, KV_BLOCKS))
    return Problem(batch=1, heads=heads, kv_heads=heads, head_dim=128, q=q, kv=kv)


def mask_of(counts: Counts) -> BlockMask:
    """Return a mask whose heads have so many tiles, in rows as even as can be."""
    edges = counts[:, None] * np.arange(Q_BLOCKS + 1) // Q_BLOCKS
    bits = PREFIXES[np.diff(edges, axis=1)]
    sizes = Q_BLOCKS * BLOCK, KV_BLOCKS * BLOCK, BLOCK, BLOCK
    return BlockMask(*sizes, tuple(range(len(counts))), bits)


def known(counts: Counts) -> list[Row]:
    """Every layer of every step planned from its own counts: with heads cut as masks that change have it."""
    layers = counts.reshape(-1, counts.shape[-1])
    problem = problem_of(counts.shape[-1])

    def grade(deal: Assigned) -> list[float]:
        return [ratio(group_loads(deal(layer, RANKS), layer)) for layer in layers]

    whole, theirs, dealt = grade(refined), grade(greedy), grade(snake)
    least = [bound(layer, RANKS) for layer in layers]
    best = float(np.mean(least))
    in_order = natural_assignment(problem, mask_of(layers[0]), STRATEGY.mesh)
    cut: list[float] = []
    parts: list[int] = []
    for layer in layers:
        balancer = Balancer(problem, mask_of(layer), TOPOLOGY)
        heads = balancer.renew(STRATEGY, in_order).heads
        cut.append(ratio(part_loads(heads, balancer.row_loads)))
        parts.append(sum(len(group) for group in heads) - problem.heads)
    name = f"known counts, {np.mean(parts):.2f} cut heads a layer"
    few = bool(np.mean(parts) <= KNOWN_CUTS)
    beside = "whole heads", np.mean(whole)
    return [
        _ratio(f"{name}, mean", np.mean(cut), beside, 1.0, KNOWN, f", ≤ {KNOWN_CUTS} cuts", also=few),
        _ratio(f"{name}, worst", max(cut), ("whole heads", max(whole)), 1.0, None),
        _ratio(
            "known counts, whole heads, mean",
            np.mean(whole),
            ("db-SP's greedy", np.mean(theirs)),
            best,
            1.008,
        ),
        _ratio(
            "known counts, whole heads, mean", np.mean(whole), ("xDiT's snake", np.mean(dealt)), best, None
        ),
        _ratio(
            "known counts, whole heads, worst", max(whole), ("db-SP's greedy", max(theirs)), max(least), 1.08
        ),
        _ratio(
            "known counts, whole heads, worst", max(whole), ("xDiT's snake", max(dealt)), max(least), None
        ),
    ]


def online(counts: Counts, draws: int) -> list[Row]:
    """Each step planned from the steps before it, the first from its own mask."""
    _, layers, heads = counts.shape
    theirs = "db-SP's policy", DbspPolicy([natural(heads, RANKS)] * layers).replay(counts).mean()
    plain = "the last step's counts", persistence(counts).mean()
    with TemporaryDirectory() as folder:
        ratios, seconds = replay(counts, folder)
    noisy = float(np.mean([replay_with_prior(counts, seed).mean() for seed in range(draws)]))
    prior = f"online, prior by step and layer, noise {NOISE}"
    return [
        _ratio("online, no prior", ratios.mean(), theirs, 1.0, ONLINE),
        _ratio("online, no prior", ratios.mean(), plain, 1.0, None),
        _ratio("online, no prior, from step 1 on", ratios[1:].mean(), plain, 1.0, None),
        _ratio(prior, noisy, theirs, 1.0, ONLINE_PRIOR),
        _ratio(prior, noisy, plain, 1.0, None),
        _time(
            "plan online beside the run, per layer and step",
            1e6 * seconds / ratios.size,
            (
                "db-SP's policy",
                _micros(lambda: DbspPolicy([natural(heads, RANKS)] * layers).replay(counts)) / ratios.size,
            ),
            1e3 * PLAN_MS,
            f"≤ {PLAN_MS} ms",
        ),
    ]


def persistence(counts: Counts) -> npt.NDArray[np.float64]:
    """Return the ratios [steps, layers] of whole heads by the last step's counts, the first by its own."""
    seen = np.concatenate([counts[:1], counts[:-1]])
    return np.array(
        [
            [ratio(group_loads(refined(old, RANKS), new)) for old, new in zip(*both, strict=True)]
            for both in zip(seen, counts, strict=True)
        ]
    )


def replay_with_prior(counts: Counts, seed: int) -> npt.NDArray[np.float64]:
    """Run twice: what the run with noisy counts has stored is the prior of the other one."""
    noise = np.random.default_rng(seed).lognormal(0, NOISE, counts.shape)
    noisy = np.clip(np.rint(counts * noise), 1, Q_BLOCKS * KV_BLOCKS).astype(np.int64)
    with TemporaryDirectory() as folder:
        replay(noisy, folder)
        return replay(counts, folder)[0]


def planner_of(ranks: int, folder: str) -> Planner:
    """Return the planner of a rank 0 whose other ranks hold whatever it does; it stores in a folder."""
    comm: Any = Transport(0, ranks, collective=True)
    with patch.dict(os.environ, WEFT_PLANS=folder):
        return Planner(comm, lambda _: dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]


def replay(counts: Counts, folder: str) -> tuple[npt.NDArray[np.float64], float]:
    """Return the ratios [steps, layers] of a run by the planner's rank 0, and the CPU seconds of planning.

    Each plan is ready for the next step. Runs that share a folder know what the last one has stored there.
    """
    problem, planner = problem_of(counts.shape[2]), planner_of(RANKS, folder)
    places = [AttentionId("wan", layer, 0, "sparge") for layer in range(counts.shape[1])]
    seconds = 0.0
    for step, layers in enumerate(counts):
        masks = [mask_of(row) for row in layers]
        began = time.process_time()
        for place, mask in zip(places, masks, strict=True):
            planner.plan(place, problem, mask, step=step, topology=lambda: TOPOLOGY, strategy=str(STRATEGY))
        planner.finish()
        seconds += time.process_time() - began
    planner.save()
    planner.finish()
    planner.close()
    return np.array(
        [[each.imbalance for each in entry.judged] for entry in planner.entries.values()]
    ).T, seconds


def splitting(draws: int) -> list[Row]:
    """24 heads of which a tenth is dense, at least one; every q block of a window head has equal work."""
    ours: list[float] = []
    equal: list[float] = []
    free: list[float] = []
    cuts: list[int] = []
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        tiles = rng.choice(WINDOWS, 24)
        tiles[(rng.random(24) < 0.1) | (np.arange(24) == rng.integers(24))] = 300
        table = np.repeat(tiles[:, None], 300, axis=1)
        parts = split(table, RANKS)
        ours.append(ratio(part_loads(parts, table)))
        cuts.append(sum(len(group) for group in parts) - 24)
        equal.append(ratio(group_loads(greedy(tiles, RANKS), tiles)))
        free.append(ratio(group_loads(refined(tiles, RANKS), tiles)))
    name = f"24 heads, 10 % dense, split ({np.mean(cuts):.1f} cuts)"
    return [
        _ratio(f"{name}, mean", np.mean(ours), ("free counts", np.mean(free)), 1.0, 1.05),
        _ratio(f"{name}, mean", np.mean(ours), ("equal counts", np.mean(equal)), 1.0, None),
        _ratio(f"{name}, worst", max(ours), ("free counts", max(free)), 1.0, 1.05),
    ]


def times(counts: Counts) -> list[Row]:
    layers = counts.reshape(-1, counts.shape[-1])
    one = median(_micros(partial(refined, layer, RANKS)) for layer in layers)
    peer = median(_micros(partial(greedy, layer, RANKS)) for layer in layers)
    return [_time("plan 40 heads", one, ("db-SP's greedy", peer), 1000, "< 1000 µs")]


def _micros(call: Callable[[], object]) -> float:
    # CPU time, which others on the machine disturb less; a planner is one thread.
    began = time.process_time_ns()
    call()
    return (time.process_time_ns() - began) / 1e3


def _ratio(
    case: str,
    measured: Number,
    peer: tuple[str, Number],
    limit: float,
    bar: float | None,
    rest: str = "",
    *,
    also: bool = True,
) -> Row:
    """`also` is whether what `rest` of the bar says holds."""
    return Row(
        case=case,
        measured=1e3 * float(measured),
        unit=UNIT,
        peer=1e3 * float(peer[1]),
        peer_name=peer[0],
        limit=1e3 * limit,
        bar=f"≤ {1e3 * bar:g} ‰{rest}" if bar else "",
        holds=bar is None or (float(measured) <= bar and also),
    )


def _time(case: str, measured: float, peer: tuple[str, float], most: float, bar: str) -> Row:
    return Row(
        case=case,
        measured=measured,
        unit="µs",
        peer=peer[1],
        peer_name=peer[0],
        bar=bar,
        holds=measured <= most,
    )
