"""Balance for real: the same sparse attention unbalanced, balanced as db-SP does, and by weft's planner.

    python -m bench.balance [--quick] [--json FILE]

2 and 4 gloo ranks with one thread each, the compiled kernel, H = 12, D = 64, float32. Every schedule
is checked against dense attention with the expanded mask first. Four ranks share this machine's two
cores, where the idle time of one is taken by another and wall time shows nothing; so a time is the CPU
time that the busiest rank spends in attention: what the slowest of real devices would take. Wall time,
transfers and all, stands beside it. The limit is total work / ranks: the mean over ranks in the same
run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch.nn.functional import scaled_dot_product_attention as sdpa

from bench.deals import dbsp_schedule
from bench.rows import Line, Results, Row, Took, interleave, main, median_ratio, take_turns
from bench.stage import STAGE
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.masks.grid import TokenGrid
from weft.masks.spec import mask_from_spec
from weft.plan.balanced import Balancer
from weft.plan.choose import build
from weft.run.execute import Executor
from weft.run.kernels import choose as choose_kernel
from weft.run.spawn.pool import Pool
from weft.run.world import world_of
from weft.schedule.measure import measure as measure_schedule

HEADS, DIM, BLOCK = 12, 64, 64
GRID = TokenGrid(14, 16, 16, prefix=512)
TOLERANCE = 2e-5
TRACKS = 0.10
MASKS = {
    "heads of many densities": "random:density=0.25,cv=0.8",
    "windows, some heads dense": "sta:dense=0.2",
    "text before bands": "svg:density=0.1",
    "video-like": "evolving",
}
CASES = {
    2: {"ulysses": ("windows, some heads dense", "video-like"), "ring": ("text before bands", "video-like")},
    4: {
        "ulysses": ("heads of many densities", "windows, some heads dense", "video-like"),
        "usp:2x2": ("text before bands", "windows, some heads dense", "video-like"),
        "ring": ("text before bands", "video-like"),
    },
}
"""By ranks and way, masks that it does not balance by itself; --quick takes the first."""


@dataclass(frozen=True)
class BalanceCase:
    ranks: int
    way: str
    masks: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.ranks} ranks {self.way}, {self.masks}"

    @property
    def mask(self) -> BlockMask:
        return mask_from_spec(MASKS[self.masks], heads=HEADS, grid=GRID, block=BLOCK, seed=1)

    @property
    def problem(self) -> Problem:
        layout = Layout.even(GRID.tokens, self.ranks)
        return Problem(batch=1, heads=HEADS, kv_heads=HEADS, head_dim=DIM, q=layout, kv=layout)


def schedules(case: BalanceCase) -> dict[str, Schedule]:
    return {
        "unbalanced": build(case.way, case.problem, case.mask),
        "db-SP": dbsp_schedule(Balancer(case.problem, case.mask, Topology.local(case.ranks)), case.way),
        "weft": build(f"{case.way}+balanced", case.problem, case.mask),
    }


# On a rank.


class Clocked:
    """A kernel that counts the CPU time of the thread that calls it."""

    def __init__(self) -> None:
        self.kernel = choose_kernel("cpu")
        self.name, self.grouped = self.kernel.name, self.kernel.grouped
        self.seconds = 0.0

    def attend(self, *args: Any, **options: Any) -> Any:
        began = time.thread_time()
        output = self.kernel.attend(*args, **options)
        self.seconds += time.thread_time() - began
        return output

    def attend_backward(self, *args: Any, **options: Any) -> Any:
        return self.kernel.attend_backward(*args, **options)


_clock = None


def prepare(case: BalanceCase) -> dict[str, float]:
    """Put every schedule on stage; the largest error of each against dense attention with the mask."""
    global _clock
    _clock = Clocked()
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, GRID.tokens, DIM) for _ in range(3)]
    rows = torch.as_tensor(case.problem.q.order(dist.get_rank()))
    tiles = torch.as_tensor(case.mask.tiles)
    allowed = tiles.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, rows]
    expected = sdpa(whole[0][:, :, rows], whole[1], whole[2], attn_mask=allowed[None])
    q, k, v = (x[:, :, rows].contiguous() for x in whole)
    STAGE.clear()
    errors: dict[str, float] = {}
    for name, schedule in schedules(case).items():
        executor = Executor(schedule, world_of(None, 120.0).comm, _clock, name=f"{case} {name}")
        call = partial(executor.forward, q, k, v, DIM**-0.5, keep=False)
        errors[name] = float((call()[0] - expected).nan_to_num().abs().max())
        STAGE[name] = call
    return errors


def play(turn: int) -> dict[str, Took]:
    """Wall time of each contender, and as its CPU time that of its attention alone."""
    assert _clock is not None
    times: dict[str, Took] = {}
    names = list(STAGE)
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        _clock.seconds = 0.0
        took = take_turns({name: STAGE[name]}, 0, before=dist.barrier)[name]
        times[name] = Took(took.wall, _clock.seconds)
    return times


# In the parent.


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - bench.rows calls it so
    report = Results()
    cases = [
        BalanceCase(ranks, way, name, 2 if quick else 10)
        for ranks, ways in CASES.items()
        for way, masks in ways.items()
        for name in (masks[:1] if quick else masks)
    ]
    task = progress.add_task("balance", total=len(cases))
    for ranks in CASES:
        with Pool(ranks, threads=1, timeout=120.0) as pool:
            for case in (case for case in cases if case.ranks == ranks):
                progress.update(task, description=str(case))
                _measure(pool, case, report)
                progress.advance(task)
    return report


def _measure(pool: Pool, case: BalanceCase, report: Results) -> None:
    errors = {
        name: max(ratios[name] for ratios in pool.run(prepare, case))
        for name in ("unbalanced", "db-SP", "weft")
    }
    means: list[dict[str, float]] = []

    def both(turn: int) -> list[dict[str, Took]]:
        ranks = pool.run(play, turn)
        means.append({name: sum(took[name].cpu for took in ranks) / len(ranks) for name in errors})
        return ranks

    rounds = list(interleave(both, case.seconds, least=3))
    times = {name: [r.took[name].cpu for r in rounds] for name in errors}
    predicted = {name: measure_schedule(schedule).imbalance for name, schedule in schedules(case).items()}
    mean = {name: [played[name] for played in means] for name in times}
    ratios = {name: median_ratio(times[name], mean[name]) for name in times}
    tracks = {name: ratios[name] / predicted[name] - 1 for name in times}
    right = max(errors.values()) <= TOLERANCE
    worst = max(tracks.values(), key=abs)
    ahead = median_ratio(times["db-SP"], times["weft"])
    report.rows.append(
        Row(
            case=str(case),
            measured=median(times["weft"]) * 1e3,
            peer=median(times["db-SP"]) * 1e3,
            peer_name="db-SP's greedy",
            limit=median(mean["weft"]) * 1e3,
            bar=f"within {TRACKS:.0%} of the predicted ratio (worst {worst:+.1%}), db-SP/weft {ahead:.3f}",
            holds=right and abs(worst) <= TRACKS,
        )
    )
    for name in times:
        wall = median(r.took[name].wall for r in rounds) * 1e3
        note = (
            f"imbalance {ratios[name]:.3f}, predicted {predicted[name]:.3f}, wall {wall:.0f} ms, "
            f"error {errors[name]:.0e}"
        )
        middle = median(times[name]) * 1e3
        ratio = median_ratio(times[name], times["weft"])
        report.lines.append(Line(case=str(case), name=name, measured=middle, ratio=ratio, note=note))


if __name__ == "__main__":
    main(measure, __doc__ or "")
