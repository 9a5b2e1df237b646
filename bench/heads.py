"""Heads on 8 ranks: balance with known counts, through a denoising loop, with heads split; planning times.

The counts are those of Wan2.1-14B with SpargeAttn (30 steps × 20 layers × 40 heads, one run). Ratios are
given as the busiest rank's load in per mille of the mean, beside the bound that no grouping can beat.

A prior should come from another run, and there is only one. So the prior of the row that has the bar is
this run's mean over time (no step of it) with every count multiplied by lognormal noise of sigma 0.2,
the mean over several draws; the rows below it say what the exact mean over time, no prior at all and
noisy counts of step 0 (what a store would hold) give. The forecast has no constant fitted to the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
from weft.plan.online import Online, Policy

from bench.deals import DbspPolicy, replay, snake
from bench.rows import Row
from weft.plan.balance import bound, ratio
from weft.plan.heads import Groups, greedy, group_loads, natural, refined
from weft.plan.split import part_loads, split

TRACE = Path(__file__).parents[2] / "shared" / "data" / "wan_sparge_head_blocks.npz"
RANKS = 8
NOISE = 0.2
ATTENTION_US = 50_000  # Wan 14B on 8 GPUs, one layer of one step
ALLOWED = 0.002
UNIT = "‰ of mean load"
WINDOWS = (45, 45, 60, 30, 50, 27)  # of 300 tiles: the windows of STA
Number = float | np.floating
Counts = npt.NDArray[np.int64]
Assigned = Callable[[Counts, int], Groups]


def rows(quick: bool, trace: Path = TRACE) -> list[Row]:  # noqa: FBT001 - bench.planner calls it so
    counts = np.load(trace)["counts"].astype(np.int64)
    return [
        *known(counts),
        *online(counts, 2 if quick else 8),
        *splitting(20 if quick else 100),
        *times(counts),
    ]


def known(counts: Counts) -> list[Row]:
    """Every layer of every step planned from its own counts."""
    layers = counts.reshape(-1, counts.shape[-1])

    def grade(deal: Assigned) -> list[float]:
        return [ratio(group_loads(deal(layer, RANKS), layer)) for layer in layers]

    ours, theirs, dealt = grade(refined), grade(greedy), grade(snake)
    least = [bound(layer, RANKS) for layer in layers]
    best = float(np.mean(least))
    return [
        _ratio("known counts, mean", np.mean(ours), ("db-SP's greedy", np.mean(theirs)), best, 1.008),
        _ratio("known counts, mean", np.mean(ours), ("xDiT's snake", np.mean(dealt)), best, None),
        _ratio("known counts, worst", max(ours), ("db-SP's greedy", max(theirs)), max(least), 1.08),
        _ratio("known counts, worst", max(ours), ("xDiT's snake", max(dealt)), max(least), None),
    ]


def online(counts: Counts, draws: int) -> list[Row]:
    """Each step planned from the steps before it, the first from a prior."""
    _, layers, heads = counts.shape
    in_order = [natural(heads, RANKS)] * layers
    theirs = "db-SP's policy", replay(DbspPolicy(in_order), counts).mean()
    least = float(np.mean([bound(layer, RANKS) for step in counts for layer in step]))
    over_time = counts.mean(axis=0)

    def noisy(prior: npt.NDArray[np.float64]) -> float:
        noise = [np.random.default_rng(seed).lognormal(0, NOISE, prior.shape) for seed in range(draws)]
        return float(np.mean([replay(Online(_planned(prior * factor)), counts).mean() for factor in noise]))

    exact = replay(Online(_planned(over_time)), counts).mean()
    without = replay(Online(in_order), counts).mean()
    return [
        _ratio(f"online, prior: time mean, noise {NOISE}", noisy(over_time), theirs, least, 1.035),
        _ratio("online, prior: exact time mean", exact, theirs, least, None),
        _ratio("online, no prior", without, theirs, least, None),
        _ratio(f"online, prior: step 0, noise {NOISE}", noisy(counts[0].astype(float)), theirs, least, None),
    ]


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
        shares = split(table, RANKS)
        ours.append(ratio(part_loads(shares, table)))
        cuts.append(sum(len(group) for group in shares) - 24)
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
    prior = _planned(counts.mean(axis=0))
    loop = median(_micros(lambda: _observe_all(Online(prior), counts)) for _ in range(7)) / len(layers)
    theirs = median(_micros(lambda: _observe_all(DbspPolicy(prior), counts)) for _ in range(7)) / len(layers)
    allowed = ATTENTION_US * ALLOWED
    return [
        _time("plan 40 heads", one, ("db-SP's greedy", peer), 1000, "< 1000 µs"),
        _time(
            "plan online, per layer and step",
            loop,
            ("db-SP's policy", theirs),
            allowed,
            f"≤ {allowed:.0f} µs ({ALLOWED:.1%} of attention)",
        ),
    ]


def _planned(prior: npt.NDArray[np.float64]) -> list[Groups]:
    return [refined(layer, RANKS, equal=True) for layer in np.rint(prior).astype(np.int64)]


def _observe_all(policy: Policy, steps: Iterable[Counts]) -> None:
    for step in steps:
        policy.observe(step)


def _micros(call: Callable[[], object]) -> float:
    # CPU time, which others on the machine disturb less; a planner is one thread.
    began = time.process_time_ns()
    call()
    return (time.process_time_ns() - began) / 1e3


def _ratio(
    case: str,
    found: float | np.floating,
    peer: tuple[str, float | np.floating],
    limit: float,
    bar: float | None,
) -> Row:
    return Row(
        case=case,
        measured=1e3 * float(found),
        unit=UNIT,
        peer=1e3 * float(peer[1]),
        peer_name=peer[0],
        limit=1e3 * limit,
        bar=f"≤ {1e3 * bar:.0f} ‰" if bar else "",
        holds=bar is None or float(found) <= bar,
    )


def _time(case: str, found: float, peer: tuple[str, float], most: float, bar: str) -> Row:
    return Row(
        case=case, measured=found, unit="µs", peer=peer[1], peer_name=peer[0], bar=bar, holds=found <= most
    )
