"""Training steps: dense on torch's attention against DSV in stage 2, from 4k to 16k tokens.

    python -m bench.training [--quick] [--json FILE]

A step is a whole one: forward, backward, gradients averaged over ranks and clipped, both optimisers. DSV's
has predictors that learn and select, and its part of the profiling that every hundredth step does. It is in
stage 2, at a density of 0.1, at what a model trained on weft-pan needs, and where nothing is sparse; weights
are random, for a predictor costs the same whether it is right or wrong. In all of them its dispatcher decides
by block and head what pays. One process and ranks have one thread each. The dense baseline of two ranks is
the faster of weft's own Ulysses and of one by hand whose attention is torch's.

The limit is Amdahl's: a step without attention, and the density's part of what attention adds to a dense one.
Weft's kernel is faster than torch's, so it may come below. Contenders take turns; a ratio is the median over
rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from rich.progress import Progress

from bench.rows import (
    Line,
    Results,
    Round,
    Row,
    Took,
    followed,
    interleave,
    main,
    median_ratio,
    quartiles,
    undisturbed,
    walls,
)
from bench.training_rank import (
    FORCED,
    LOOKING,
    REFUSED,
    REST,
    SPARSE,
    TORCH,
    TRAINED,
    ULYSSES,
    WEFT,
    TrainingCase,
    play,
    prepare,
)
from weft.run.spawn.pool import Pool

FAST, EQUAL, SMALL = 2.5, 0.98, 0.10
LONG = 16384
Wall = dict[str, list[float]]
"""By contender, milliseconds of each round."""


def cases(*, quick: bool) -> list[tuple[TrainingCase, float]]:
    """And seconds for each."""
    if quick:
        return [
            (TrainingCase(4096, 1, depth=1), 4.0),
            (TrainingCase(LONG, 1, depth=1, heads=2), 0.0),
            (TrainingCase(4096, 2, depth=1), 2.0),
        ]
    seconds = {4096: 40.0, 8192: 60.0, LONG: 180.0}
    return [(TrainingCase(tokens, ranks), seconds[tokens]) for ranks in (1, 2) for tokens in seconds]


def names_of(case: TrainingCase, *, quick: bool) -> tuple[str, ...]:
    """In a hurry, of the long one only a pair."""
    dense = (TORCH,) if case.ranks == 1 else (ULYSSES, WEFT)
    if case.tokens == LONG:
        return (*dense, REST, FORCED) if quick else (*dense, REST, FORCED, TRAINED)
    return (*dense, REST, FORCED, TRAINED, REFUSED)


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - the command line's call
    report = Results()
    with ExitStack() as stack:
        pools: dict[int, Pool] = {}
        for case, seconds in cases(quick=quick):
            if case.ranks not in pools:
                pools[case.ranks] = stack.enter_context(Pool(case.ranks, threads=1, timeout=300.0))
            pool, names = pools[case.ranks], names_of(case, quick=quick)
            task = progress.add_task(f"{case}: building", total=max(1.0, seconds))
            facts: dict[str, tuple[float, float]] = pool.run(prepare, case, names)[0]
            progress.update(task, description=str(case))
            rounds = interleave(partial(turn, pool, names), seconds, least=1 if quick else 3)
            used = undisturbed(followed(rounds, progress, task))
            wall = walls(used)
            for name, (_, profiling) in facts.items():
                wall[name] = [each + profiling * 1e3 for each in wall[name]]
            report.rows.extend(judge(case, wall, facts))
            report.lines.extend(tell(case, wall, facts, used))
    return report


def turn(pool: Pool, names: tuple[str, ...], number: int) -> list[dict[str, Took]]:
    """A round, by rank: a step of everybody, in an order that turns."""
    first, ranks = number % len(names), [{} for _ in range(pool.size)]
    for name in names[first:] + names[:first]:
        for rank, took in zip(ranks, pool.run(play, name), strict=True):
            rank |= took
    return ranks


def judge(case: TrainingCase, wall: Wall, facts: dict[str, Any]) -> list[Row]:
    dense = min(
        (name for name in (TORCH, ULYSSES, WEFT) if name in wall), key=lambda name: median(wall[name])
    )
    rows: list[Row] = []
    for name in SPARSE:
        if name not in wall:
            continue
        density, bar = facts[name][0], FAST if (case.tokens, name) == (LONG, FORCED) else EQUAL
        pairs = zip(wall[dense], wall[REST], strict=True)
        ratio = median_ratio(wall[dense], wall[name])
        rows.append(
            Row(
                case=f"{case}, {name}, density {density:.2f}",
                measured=median(wall[name]),
                peer=median(wall[dense]),
                peer_name=dense,
                limit=median(rest + density * (whole - rest) for whole, rest in pairs),
                bar=f"{dense}/DSV ≥ {bar} (is {ratio:.2f})",
                holds=ratio >= bar,
            )
        )
    if case.tokens == LONG:
        rows.append(_share(case, wall))
    return rows


def _share(case: TrainingCase, wall: Wall) -> Row:
    share = median_ratio(wall[FORCED + LOOKING], wall[FORCED])
    return Row(
        case=f"{case}, {FORCED}{LOOKING}",
        measured=100 * share,
        unit="% of the step",
        bar=f"≤ {100 * SMALL:.0f}",
        holds=share <= SMALL,
    )


def tell(case: TrainingCase, wall: Wall, facts: dict[str, Any], used: Sequence[Round]) -> list[Line]:
    busy = f"{len(used)} rounds, {median(one.others for one in used):.0%} of the machine to others"
    lines: list[Line] = []
    for name in (name for name in wall if not name.endswith(LOOKING)):
        note = "" if lines else busy
        if name in facts:
            looking, profiling = median(wall[name + LOOKING]), 1e3 * facts[name][1]
            note = f"{looking:.0f} ms are selection and predictor, {profiling:.1f} profiling"
        lines.append(
            Line(
                case=str(case),
                name=name,
                measured=median(wall[name]),
                quartiles=quartiles(wall[name]),
                cpu=median(one.took[name].cpu * 1e3 for one in used),
                ratio=median_ratio(wall[name], wall[FORCED]),
                note=note,
            )
        )
    return lines


if __name__ == "__main__":
    main(measure, __doc__ or "")
