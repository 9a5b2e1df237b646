"""Torus between machines: against USP, swapped, the planner's own choice and the bound, on a test bed.

    python -m bench.torus [--quick] [--json FILE]

Machines are network namespaces with limited links, two ranks in each. Compute is a timer as long as the
FLOPs would take, since more ranks than cores could not compute at the same time; for 2 x 2 there is real
compute too. How long is told by rho, the time of a unit of compute over that of the message that it has
to hide: 1 is where hiding is hardest. Links are calibrated once on each bed; the planner, and the number
of parts and of deferred stages of the torus, know nothing else.

The bound is the longer of compute and bytes / bandwidth: the bytes of a torus, the fewest there can be, as
gloo alone passes them on to the next machine in the same rounds. Ratios are medians over rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from rich.progress import Progress

from bench import bed
from bench.bed import COMPUTE, DEVICES, TIMER, WIRE
from bench.rows import Line, Results, Row, interleave, main, median_ratio, quartiles, undisturbed, walls
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.choose import build, choose
from weft.plan.strategies.torus import Torus
from weft.run.spawn.testbed import MachinePool, Testbed
from weft.simulate.predict import predict

MACHINES = (2, 3, 4)
TOKENS = {"400mbit": 1536, "1gbit": 3072}
REAL_HEADS = {"400mbit": 24, "1gbit": 96}  # a faster wire needs fewer tokens, and these last as long
RHOS = (0.25, 0.5, 1.0, 2.0, 4.0)
PARTS = (1, 2, 3)
USP, SWAPPED, TORUS, PLANNER = "USP", "swapped", "torus", "planner"
NEAR_BOUND, NEAR_SIMULATED, NEAR_BEST = {1.0: 1.25, 2.0: 1.10, 4.0: 1.10}, 1.15, 1.05
SPEEDUP = {3: 1.3, 4: 1.4}


@dataclass(frozen=True)
class Cell:
    """One bed, one length, one speed of compute; schedules by who stands for them."""

    name: str
    topology: Topology
    problem: Problem
    rho: float
    plans: dict[str, Schedule]
    kernel: str = TIMER


def cells(place: str, topology: Topology, problem: Problem, speeds: dict[float, float]) -> list[Cell]:
    """A cell for each rho, with the FLOP/s that make it."""
    mask, machines, devices = (
        BlockMask.dense(problem.heads, problem.q.size),
        topology.machines,
        topology.devices,
    )
    make = partial(build, problem=problem, mask=mask, topology=topology)
    plain = {USP: make(f"usp:{devices}x{machines}"), SWAPPED: make(f"swapped:{machines}x{devices}")}
    tori = [make(name) for name in torus_names(machines, devices)]
    table: list[Cell] = []
    for rho, flops in speeds.items():
        here = replace(topology, flops=flops)
        best = min(tori, key=lambda torus: predict(torus, here).seconds)
        plans = {**plain, TORUS: best, PLANNER: choose(problem, mask, here).schedule}
        table.append(Cell(f"{place} rho {rho:g}", here, problem, rho, plans))
    return table


def torus_names(machines: int, devices: int) -> list[str]:
    return [
        str(Torus(ulysses, machines * devices // ulysses, chunks=parts, defer=defer))
        for ulysses in (machines, machines * devices)
        for parts in PARTS
        for defer in range((machines - 1) * parts, -1, -1)
    ]


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - the command line's call
    report = Results()
    rates, rhos = (["400mbit"], (1.0,)) if quick else (list(TOKENS), RHOS)
    for machines in MACHINES:
        with Testbed(machines) as testbed, testbed.pool(DEVICES, timeout=120.0) as pool:
            pool.run(bed.go_first)
            for rate in rates:
                testbed.change_rate(rate)
                _run(report, pool, timed(pool, rate, rhos), progress, quick=quick)
    if not quick:
        with Testbed(2) as testbed, testbed.pool(DEVICES, timeout=120.0) as pool:
            for rate in rates:
                testbed.change_rate(rate)
                _run(report, pool, real(pool, rate), progress, quick=quick)
    return report


def timed(pool: MachinePool, rate: str, rhos: Sequence[float]) -> list[Cell]:
    machines = pool.size // DEVICES
    problem = bed.problem_of(TOKENS[rate], pool.size)
    links: Topology = pool.run(bed.links, machines)[0]
    speeds = {rho: bed.flops_for(rho, problem, links.nic_bandwidth) for rho in rhos}
    return cells(f"{machines}x{DEVICES} {rate}", links, problem, speeds)


def real(pool: MachinePool, rate: str) -> list[Cell]:
    """With the compiled kernel and as many tokens as make rho 1; machines divide the cores of this one."""
    machines = pool.size // DEVICES
    measured: Topology = pool.run(bed.links, machines)[0]
    flops: float = pool.run(bed.kernel_flops)[0]
    share = min(1.0, bed.cores() / pool.size)
    tokens = pool.size * flops * share / measured.nic_bandwidth  # float32: 4 bytes, and 4 FLOPs a product
    problem = bed.problem_of(round(tokens / 64) * 64, pool.size, REAL_HEADS[rate])
    # Sockets take core time, which timers would not miss.
    lost: float = pool.run(bed.slowdown)[0]
    measured = replace(measured, cores=max(1, bed.cores() // machines), comm_slowdown=lost)
    made = cells(f"{machines}x{DEVICES} {rate} real compute", measured, problem, {1.0: flops})
    return [replace(cell, kernel="auto") for cell in made]


def _run(report: Results, pool: MachinePool, made: list[Cell], progress: Progress, *, quick: bool) -> None:
    plans = {plan.name: plan for cell in made for plan in cell.plans.values()}
    pool.run(bed.prepare, list(plans.values()), made[0].kernel)
    for cell in made:
        task = progress.add_task(cell.name, total=None)
        rounds(report, pool, cell, *((0.0, 3) if quick else (6.0, 4) if cell.kernel == TIMER else (15.0, 9)))
        progress.remove_task(task)


def rounds(report: Results, pool: MachinePool, cell: Cell, seconds: float, least: int) -> None:
    names = [plan.name for plan in cell.plans.values()] + [WIRE] + [COMPUTE] * (cell.kernel != TIMER)
    unique, flops = list(dict.fromkeys(names)), cell.topology.flops
    played = list(interleave(lambda turn: pool.run(bed.play, unique, flops, turn), seconds, least))
    # Timers go before other processes, real compute does not.
    used = played if cell.kernel == TIMER else undisturbed(played)
    took = walls(used)
    wire = took[WIRE]
    compute = took.get(COMPUTE) or [bed.compute_seconds(cell.problem, flops) * 1e3] * len(wire)
    bound = [max(pair) for pair in zip(compute, wire, strict=True)]
    wall = {who: took[plan.name] for who, plan in cell.plans.items()}
    judge(report, cell, wall, bound)
    rate = bed.least_bytes(cell.problem, cell.topology.machines) / median(wire) * 8e-3
    note = f"compute {median(compute):.1f} ms, wire {rate:.0f} Mbit/s; {len(wire)} rounds"
    report.lines.append(Line(case=cell.name, name="bound", measured=median(bound), note=note))
    for who, plan in cell.plans.items():
        simulated = predict(plan, cell.topology).seconds * 1e3
        line = Line(
            case=cell.name,
            name=who,
            measured=median(wall[who]),
            quartiles=quartiles(wall[who]),
            note=f"{plan.name}: {median_ratio(wall[who], bound):.3f} x bound, simulated {simulated:.1f}",
        )
        report.lines.append(line)


def judge(report: Results, cell: Cell, wall: dict[str, list[float]], bound: list[float]) -> None:
    """The two rows of a cell: the torus, and the planner's choice."""
    simulated = predict(cell.plans[TORUS], cell.topology).seconds * 1e3
    asked = [(f"≤ {NEAR_SIMULATED} x simulated", median(wall[TORUS]) / simulated, -NEAR_SIMULATED)]
    if most := NEAR_BOUND.get(cell.rho):
        asked.append((f"≤ {most} x limit", median_ratio(wall[TORUS], bound), -most))
    if cell.rho == 1 and (least := SPEEDUP.get(cell.topology.machines)):
        asked.append((f"≥ {least} x USP", median_ratio(wall[USP], wall[TORUS]), least))
    behind = max(median_ratio(wall[PLANNER], wall[who]) for who in (USP, SWAPPED, TORUS))
    chosen = [(f"≤ {NEAR_BEST} x the best", behind, -NEAR_BEST)]
    for who, bars in ((TORUS, asked), (PLANNER, chosen)):
        report.rows.append(
            Row(
                case=f"{cell.name}: {who}",
                measured=median(wall[who]),
                peer=median(wall[USP]),
                peer_name="USP",
                limit=median(bound),
                bar=", ".join(f"{text} ({value:.3f})" for text, value, _ in bars),
                holds=all(value >= bar if bar > 0 else value <= -bar for _, value, bar in bars),
            )
        )


if __name__ == "__main__":
    main(measure, __doc__ or "")
