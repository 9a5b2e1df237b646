"""Whole transformers on two ranks: weft, Diffusers and cache-dit beside one process, on Wan and Flux.

    python -m bench.pipeline [--quick] [--json FILE]

A small random WanTransformer3DModel (2,048 tokens) and FluxTransformer2DModel (2,304 and 64 of text), heads
of 64, float32, two ranks with one thread each. A time is that of one call of the transformer: whole inputs
in, the whole output out on every rank. Before any clock starts each contender's output is compared with one
process's, and its gradients, of which the sum or the mean over ranks may be meant; who raises or is off is
listed as such and not timed. Then rounds: everybody once, in an order that turns, each engine in processes
of its own. A ratio is the median over rounds.

The limit of a dense call is half of the time of one process. That of a sparse one is (rest + density ×
attention) / 2, where rest is one process whose self-attention is left out and attention what that saves; the
mask is of sliding tiles. Weft's own kernel is faster than SDPA, so it may come below both.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from rich.progress import Progress

from bench.pipeline_peers import (
    ALONE,
    ALONE_TOO,
    CONTENDERS,
    NO_GROUP,
    ONE_RANK,
    PEERS,
    REST,
    RING,
    SPARSE,
    ULYSSES,
    WEFT,
    PeerModel,
    models,
)
from bench.pipeline_rank import PeerVerdict, answer, play, prepare
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
from weft.run.spawn.pool import Pool
from weft.run.spawn.pool_rank import PRELOAD

EQUAL, OVER_ONE, TRAINING, OVERHEAD = 0.98, 1.85, 1.1, 1.02
Wall = dict[str, list[float]]
"""By contender, milliseconds of each round."""


@dataclass(frozen=True)
class PipelineCase:
    model: PeerModel
    what: str
    names: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return f"{self.model.name}, {self.what}"

    @property
    def backward(self) -> bool:
        return self.what == BOTH


FORWARD, BOTH, ONE = "forward", "forward + backward", "on one rank"


def cases(*, quick: bool) -> list[PipelineCase]:
    """In a hurry, training and overhead are those of Wan, and there is always a process group."""
    scale = 0.8 if quick else 11.0
    alone = (ALONE, ONE_RANK) if quick else (ALONE, ONE_RANK, ALONE_TOO, NO_GROUP)
    return [
        case
        for model in models(quick=quick)
        for case in (
            PipelineCase(model, FORWARD, (ALONE, REST, *PEERS, WEFT, SPARSE), 5 * scale),
            PipelineCase(model, BOTH, (ULYSSES, WEFT) if quick else (ULYSSES, RING, WEFT), 4 * scale),
            PipelineCase(model, ONE, alone, 3 * scale),
        )
        if not quick or model.name == "Wan" or case.what == FORWARD
    ]


class Homes:
    """The processes of each engine."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._pools: dict[str, Pool] = {}

    def of(self, name: str) -> Pool:
        home, ranks = CONTENDERS[name].home, CONTENDERS[name].ranks
        if home not in self._pools:
            self._pools[home] = self._stack.enter_context(Pool(ranks, threads=1, timeout=120.0))
        return self._pools[home]

    def prepare(self, case: PipelineCase) -> dict[str, PeerVerdict]:
        pools: dict[Pool, list[str]] = {}
        for name in case.names:
            pools.setdefault(self.of(name), []).append(name)
        right, sparse = (
            self.of(ALONE).run(answer, case.model, case.backward, sparse)[0] if wanted else None
            for sparse, wanted in ((False, True), (True, SPARSE in case.names))
        )
        for pool, names in pools.items():
            pool.start(prepare, case.model, names, right, sparse)
        verdicts: dict[str, PeerVerdict] = {}
        for pool, names in pools.items():
            ranks = pool.finish()
            verdicts |= {name: max(rank[name] for rank in ranks) for name in names}
        return verdicts

    def play(self, names: list[str], turn: int) -> list[dict[str, Took]]:
        """A round, by rank: everybody once, in an order that turns, and weft right before each of the others.

        The speed of a core changes within seconds: what is compared lies side by side.
        """
        first = turn % len(names)
        took: dict[str, list[Took]] = {}
        for name in names[first:] + names[:first]:
            if WEFT in names and name != WEFT:
                took[before(name)] = self.of(WEFT).run(play, WEFT)
            took[name] = self.of(name).run(play, name)
        most = max(len(ranks) for ranks in took.values())
        idle = [Took(0.0, 0.0)] * most
        return [{name: [*ranks, *idle][rank] for name, ranks in took.items()} for rank in range(most)]


def before(name: str) -> str:
    """Weft, right before another contender."""
    return f"{WEFT} before {name}"


def side_by_side(wall: Wall, one: str, other: str) -> tuple[list[float], list[float]]:
    """The times of two contenders that were taken next to each other, as far as they were."""
    if one == WEFT and before(other) in wall:
        return wall[before(other)], wall[other]
    return wall[one], wall[before(one)] if other == WEFT and before(one) in wall else wall[other]


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - the command line's call
    PRELOAD.append("diffusers.models.transformers")  # seconds, in each of eight processes
    report = Results()
    with ExitStack() as stack:
        homes = Homes(stack)
        for case in cases(quick=quick):
            task = progress.add_task(f"{case}: checking", total=case.seconds)
            verdicts = homes.prepare(case)
            names = [name for name in case.names if verdicts[name].correct]
            progress.update(task, description=str(case))
            rounds = interleave(partial(homes.play, names), case.seconds) if names else ()
            used = undisturbed(followed(rounds, progress, task))
            wall = walls(used) if used else {}
            report.rows.extend(judge(case, wall))
            report.lines.extend(tell(case, wall, verdicts, used))
    return report


def judge(case: PipelineCase, wall: Wall) -> list[Row]:
    """The rows of a case; of contenders that are in `wall`, which are right."""
    if case.what == ONE:
        pairs = [pair for pair in ((ONE_RANK, ALONE), (NO_GROUP, ALONE_TOO)) if pair[0] in case.names]
        return [_row(f"{case.model.name}, {weft}", wall, weft, alone, OVERHEAD) for weft, alone in pairs]
    if case.backward:
        return [_row(str(case), wall, WEFT, ULYSSES, TRAINING)]
    fastest = min(
        (name for name in PEERS if name in wall),
        key=lambda name: median_ratio(*side_by_side(wall, name, WEFT if WEFT in wall else ALONE)),
        default="",
    )
    density = case.model.mask.density
    half = [one / 2 for one in wall[ALONE]]
    bound = [(rest + density * (one - rest)) / 2 for one, rest in zip(wall[ALONE], wall[REST], strict=True)]
    sparse = f"{case}, sparse, density {density:.2f}"
    return [
        _row(f"{case}, the peers", wall, WEFT, fastest, EQUAL, half),
        _row(f"{case}, one process", wall, WEFT, ALONE, OVER_ONE, half),
        _row(sparse, wall, SPARSE, WEFT, 1.0, bound),
    ]


def _row(  # noqa: PLR0913 - of a table
    case: str, wall: Wall, own: str, other: str, bar: float, limit: list[float] | None = None
) -> Row:
    """Of `other` / `own` of each round at least the bar; of overhead, `own` / `other` at most."""
    upper = bar == OVERHEAD
    condition = f"{own}/{other} ≤ {bar}" if upper else f"{other}/{own} ≥ {bar}"
    ratio = 0.0
    if own in wall and other in wall:
        pair = side_by_side(wall, own, other)
        ratio = median_ratio(*pair) if upper else median_ratio(*reversed(pair))
    return Row(
        case=case,
        measured=median(wall[own]) if own in wall else None,
        peer=median(wall[other]) if other in wall else None,
        peer_name=other,
        limit=median(limit) if limit else None,
        bar=f"{condition} (is {ratio:.3f})" if ratio else f"{condition}: not measured",
        holds=bool(ratio) and (ratio <= bar if upper else ratio >= bar),
    )


def tell(
    case: PipelineCase, wall: Wall, verdicts: dict[str, PeerVerdict], used: Sequence[Round]
) -> list[Line]:
    busy = f"{median(one.others for one in used):.0%} of the machine to others" if used else "nobody is right"
    lines: list[Line] = []
    for name in case.names:
        note = str(verdicts[name]) if lines else f"{verdicts[name]}; {len(used)} rounds, {busy}"
        line = Line(case=str(case), name=name, note=note)
        if times := wall.get(name):
            cpu = median(one.took[name].cpu * 1e3 for one in used)
            ratio = median_ratio(*side_by_side(wall, name, WEFT)) if WEFT in wall else None
            line = replace(line, measured=median(times), quartiles=quartiles(times), cpu=cpu, ratio=ratio)
        lines.append(line)
    return lines


if __name__ == "__main__":
    main(measure, __doc__ or "")
