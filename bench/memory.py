"""Memory of one attention on the fullest rank: what is held, what is printed, and what it was at 45b0107.

    python -m bench.memory [--quick] [--json FILE]

Wan2.1-14B at 720p (75,600 tokens, 40 heads of 128, bfloat16), dense and with sliding tiles, on 8 to 32 ranks.
The fullest rank runs its program on meta tensors, and the storages that are alive at the same time are added
up. Kernel scratch is apart: as much as the largest call of a kernel returns. The limit is the least that any
layout of the workspace could hold, all that is live at one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.progress import Progress

from bench.dry import DryRun, Held, mask_of, schedule_of
from bench.rows import Line, Results, Row, main
from bench.worker import BASE, TreeWorker, base_worker
from weft.core.schedule import Schedule
from weft.plan.strategy import factors, most_machines
from weft.schedule.reverse import reverse

MB = 1e6
NODES = {8: (2, 4), 16: (2, 8), 32: (4, 8)}
"""Machines and devices of each, for the strategies that span machines."""
DIRECTIONS = {"forward": "forward", "saving": "forward that saves", "backward": "backward"}
BOUND_RATIO, PRINTED_TOLERANCE, PRINTED_RATIO = 1.05, 0.01, 1.10
NAMED = {
    ("ring", 32, "forward"): 300,
    ("ring", 32, "backward"): 700,
    ("usp:2x4", 8, "forward"): 1050,
    ("usp:2x4", 8, "backward"): 2950,
}
"""MB that dense attention may hold; 1,693, 7,549, 2,032 and 4,258 (without what is at home) at 45b0107."""


class MemoryCase(NamedTuple):
    name: str
    ranks: int
    nodes: str = ""
    kind: str = "dense"

    def __str__(self) -> str:
        return f"{self.name} on {self.ranks}, {self.kind}"

    def schedule(self) -> Schedule:
        return schedule_of(self.name, self.ranks, self.nodes, mask_of(self.kind))


class Figures(NamedTuple):
    """Bytes of one program on its fullest rank."""

    printed: int
    held: Held
    workspace: int = 0
    bound: int = 0
    live: tuple[str, ...] = ()
    """Slots that are live where most are."""

    @property
    def limit(self) -> int:
        return self.printed - self.workspace + self.bound


def names(ranks: int, kind: str) -> list[tuple[str, str]]:
    """Every strategy for so many ranks, and the cluster that it needs."""
    machines, devices = NODES[ranks]
    flat = ["ring", *(["zigzag"] if kind == "dense" else []), "ulysses", "gather"]
    flat += [f"usp:{u}x{r}" for u, r in factors(ranks) if u > 1 and r > 1]
    torus = [f"torus:{u}x{r}" for u, r in factors(ranks) if most_machines(u, machines, devices) > 1]
    return [(name, "") for name in flat] + [(name, f"{machines}x{devices}xh100") for name in torus]


def cases(ranks: int, kind: str) -> Iterable[tuple[MemoryCase, Schedule]]:
    """Every strategy, and each with balanced shares where that makes another schedule."""
    for name, nodes in names(ranks, kind):
        case = MemoryCase(name, ranks, nodes, kind)
        plain = case.schedule()
        yield case, plain
        if name != "zigzag":
            case = MemoryCase(f"{name}+balanced", ranks, nodes, kind)
            balanced = case.schedule()
            if balanced.ops != plain.ops:
                yield case, balanced


# In this tree.


def figures(schedule: Schedule) -> dict[str, Figures]:
    """By direction, what the fullest rank holds and what `weft plan` says that it does."""
    return {direction: _figures(schedule, direction) for direction in DIRECTIONS}


def _figures(schedule: Schedule, direction: str) -> Figures:
    from weft.program.lower import lower_all
    from weft.program.steps import Program, Target
    from weft.program.workspace import assign, memory_of

    back = reverse(schedule) if direction != "forward" else schedule
    programs: dict[frozenset[str], list[Program]] = {}
    fullest: tuple[int, Program] | None = None
    for rank in range(schedule.problem.ranks):
        saved = {"q", *(piece.tensor for piece in back.kept[rank])} - {"o"} if direction == "saving" else ()
        save = frozenset(saved)
        if save not in programs:
            programs[save] = lower_all(back if direction == "backward" else schedule, Target(save=save))
        program = programs[save][rank]
        total = memory_of(program).total
        if fullest is None or total > fullest[0]:
            fullest = total, program
    assert fullest
    printed, program = fullest
    space = assign(program)
    held = DryRun(schedule, program.rank).held(direction)
    return Figures(printed, held, space.num_bytes, space.bound, live_at_peak(program, space))


def live_at_peak(program: Any, space: Any) -> tuple[str, ...]:
    """The slots of the workspace, results apart, that are live at the step where they take most."""
    from weft.program.workspace import lives

    live = {slot: life for slot, life in lives(program, "workspace").items() if space.places[slot][0] == 0}
    at = range(len(program.steps))
    step = max(at, key=lambda t: sum(x.num_bytes for x in live.values() if x.first <= t <= x.last), default=0)
    there = [(life.num_bytes, slot.name) for slot, life in live.items() if life.first <= step <= life.last]
    return tuple(f"{name} {size / MB:,.1f}" for size, name in sorted(there, reverse=True))


# In the tree of 45b0107, which had neither `lower` nor `workspace`.


def figures_there(cases: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """By direction, what that tree printed for its fullest rank, and what this rank holds."""
    from weft.schedule import measure

    peak: Any = getattr(measure, "peak_memory")  # noqa: B009 - it is not in this tree
    listed: list[dict[str, Any]] = []
    for case in cases:
        schedule = MemoryCase(*case).schedule()
        each: dict[str, Any] = {}
        for direction in DIRECTIONS:
            ranks = peak(reverse(schedule) if direction == "backward" else schedule)
            each[direction] = max(ranks), DryRun(schedule, ranks.index(max(ranks))).held(direction)
        listed.append(each)
    return listed


# Rows.


def row(case: str, here: Figures, there: Figures | None, *, forward: bool) -> tuple[Row, list[str]]:
    """One program beside the same one of 45b0107, and what it misses."""
    bar = f"{here.printed / MB:,.0f} printed ± 1 %, workspace ≤ {BOUND_RATIO} × live slots"
    missed: list[str] = []
    if abs(here.held.num_bytes - here.printed) > PRINTED_TOLERANCE * here.printed:
        stale = f", of which earlier kernel calls {here.held.stale / MB:,.0f}" if here.held.stale else ""
        alive = ", ".join(f"{count} × {size / MB:,.1f}" for size, count in here.held.sizes[:6])
        missed.append(f"holds {here.held.num_bytes / here.printed:.3f} × what is printed{stale}: {alive}")
    if here.workspace > BOUND_RATIO * here.bound:
        missed.append(f"workspace {here.workspace / here.bound:.3f} × live: {', '.join(here.live[:8])}")
    if forward and there:
        bar += f", printed ≤ {PRINTED_RATIO:.2f} × {there.printed / MB:,.0f} there"
        if here.printed > PRINTED_RATIO * there.printed:
            ratio = here.printed / there.printed
            missed.append(f"prints {ratio:.3f} × what it did; live: {', '.join(here.live[:8])}")
    return Row(
        case=case,
        measured=here.held.num_bytes / MB,
        unit="MB",
        peer=there.held.num_bytes / MB if there else None,
        peer_name=BASE if there else "",
        limit=here.limit / MB,
        bar=bar,
        holds=not missed,
    ), missed


def named_row(case: str, most: int, here: Figures, there: Figures | None) -> Row:
    measured = here.held.num_bytes / MB
    return Row(
        case=case,
        measured=measured,
        unit="MB",
        peer=there.held.num_bytes / MB if there else None,
        peer_name=BASE if there else "",
        limit=here.limit / MB,
        bar=f"≤ {most:,}",
        holds=measured <= most,
    )


def judge(
    done: Sequence[tuple[MemoryCase, dict[str, Figures]]], there: Sequence[dict[str, Figures]] | None
) -> Results:
    """Rows of all programs, those with bars of their own first."""
    report, rows = Results(), list[Row]()
    for place, (case, here) in enumerate(done):
        for direction, ours in here.items():
            theirs = there[place][direction] if there else None
            name = f"{case}, {DIRECTIONS[direction]}"
            if case.kind == "dense" and (most := NAMED.get((case.name, case.ranks, direction))):
                report.rows.append(named_row(f"{name}, at most", most, ours, theirs))
            judged, missed = row(name, ours, theirs, forward=direction == "forward")
            rows.append(judged)
            report.lines.extend(Line(case=name, name="missed", unit="MB", note=note) for note in missed)
    report.rows.extend(rows)
    return report


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - bench.rows calls it so
    wanted = [(ranks, kind) for ranks in ((8,) if quick else NODES) for kind in ("dense", "sta")]
    task = progress.add_task("building", total=len(wanted) + 2)
    built: list[tuple[MemoryCase, Schedule]] = []
    with base_worker() as worker:
        for ranks, kind in wanted:
            built += cases(ranks, kind)
            progress.advance(task)
        if quick:
            built += [(case, case.schedule()) for case in [MemoryCase("ring", 32)]]
        if worker:  # it works while this process does
            worker.begin("bench.memory:figures_there", [case for case, _ in built])
        progress.update(task, description="running here")
        done = [(case, figures(schedule)) for case, schedule in built]
        progress.update(task, advance=1, description=f"running {BASE}")
        return judge(done, _answers(worker) if worker else None)


def _answers(worker: TreeWorker) -> list[dict[str, Figures]]:
    return [
        {direction: Figures(printed, Held(*held)) for direction, (printed, held) in each.items()}
        for each in worker.result()
    ]


if __name__ == "__main__":
    main(measure, __doc__ or "")
