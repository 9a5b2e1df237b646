"""Papers: what they report of machines that we do not have, next to what weft simulates for them.

    python -m bench.papers [--quick] [--json FILE]

Nothing is fitted to a row. Clusters are those of `simulate/clusters`, masks those of `masks/` at the
published densities, linear layers run at 60 % of the peak, and the attention kernel is of FlashAttention-2's
kind: 61 % of the peak of an A100, 35 % of a Hopper's, unless a paper logs the speed of its own. A row holds
within 25 %, and a speed-up only if it is one there and here; a row that does not stays, with a sentence: what
is known, or "perhaps" and a guess. "measured" is what is simulated. The 35 % was chosen for all rows, but
knowing that 61 % would give half of the published times on H800: docs/papers.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import mean

import numpy as np
from rich.progress import Progress

from bench import published as paper
from bench.deals import dbsp_schedule
from bench.rows import Results, Row, main
from bench.volumes import stages_seconds, volumes
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.masks.grid import TokenGrid
from weft.masks.random import random_mask
from weft.masks.spec import mask_from_spec
from weft.plan.balanced import Balancer
from weft.plan.choose import build
from weft.schedule.measure import attend_works
from weft.schedule.measure import measure as measure_schedule
from weft.schedule.reverse import reverse
from weft.simulate.clusters import cluster
from weft.simulate.events import simulate
from weft.simulate.gpus import DEVICES
from weft.simulate.model_step import step
from weft.simulate.models import ModelSizes, model

NEAR = 0.25
LINEAR = 0.6  # of the peak
AMPERE = 190 / 312  # of the peak: FlashAttention-2 on A100
HOPPER = 0.35  # of the peak: FlashAttention-2 on H100, assumed
BLOCK = 64
Times = dict[tuple[str, ...], list[float]]


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - bench.rows calls it so
    of_dbsp = partial(dbsp, *((1, (paper.WAN,)) if quick else (4, (paper.WAN, paper.COG))))
    parts = (of_dbsp, streamfusion, dsp_volumes, open_sora, dsv_parallel, dsv_training)
    report, task = Results(), progress.add_task("papers", total=len(parts))
    for section in parts:
        report.rows.extend(section())
        progress.advance(task)
    return report


def row(case: str, unit: str, simulated: float, published: float, why: str = "") -> Row:
    """`why` is shown where the two are further apart than they may be."""
    ratio = simulated / published
    opposite = unit == "×" and (simulated - 1) * (published - 1) < 0  # a gain there, a loss here
    near = abs(ratio - 1) <= NEAR and not opposite
    bar = f"ratio {ratio:.2f}" + (f": {why}" if why and not near else "")
    both = {"measured": simulated, "peer": published, "peer_name": "published", "limit": None}
    return Row(case=case, unit=unit, bar=bar, holds=near, **both)


def machine(name: str) -> Topology:
    """A cluster with the attention kernel of its day."""
    device = name.split("x")[-1]
    flops = (HOPPER if device.startswith("h") else AMPERE) * peak(device)
    return replace(cluster(name), flops=flops, sparse_flops=flops)


def peak(device: str) -> float:
    return DEVICES[device].tflops * 1e12


def problem_of(size: ModelSizes, tokens: int, ranks: int, *, text: int = 0, batch: int = 1) -> Problem:
    layout = Layout.even(tokens + text, ranks, prefix=text)
    heads = {"heads": size.heads, "kv_heads": size.heads, "head_dim": size.head_dim}
    return Problem(batch=batch, q=layout, kv=layout, dtype="bfloat16", **heads)


def dbsp(seeds: int, models: tuple[str, ...]) -> Iterator[Row]:
    """Layers are seeds: a way's time is the mean over them."""
    times: Times = defaultdict(list)
    for name in models:
        for law in paper.LAWS:
            for seed in range(seeds):
                _layer(name, law, seed, times)
    took = {key: mean(values) for key, values in times.items()}
    yield from _traces(took)
    yield from _scaling(took)
    yield from _end_to_end(took, [case for case in paper.END_TO_END if case.model in models])


def _layer(name: str, law: str, seed: int, times: Times) -> None:
    """One layer by every way on every cluster; "db-SP" is the fastest of its balanced ways for this layer."""
    size = model(name)
    grid = size.grid()
    tokens = TokenGrid(*grid, prefix=size.text)
    mask = mask_from_spec(paper.LAWS[law], heads=size.heads, grid=tokens, block=BLOCK, seed=seed)
    for ranks, ways in {1: ("usp:1x1",), **paper.WAYS}.items():
        problem = problem_of(size, math.prod(grid), ranks, text=size.text)
        balancer = Balancer(problem, mask, Topology.local(ranks))
        best: Times = defaultdict(list)
        for way in ways[:1] if law == "sparge" else ways:
            for balance, schedule in (
                ("", build(way, problem, mask)),
                ("db-SP", dbsp_schedule(balancer, way)),
            ):
                works = attend_works(schedule)
                for device in ("a800", "h800"):
                    seconds = simulate(schedule, machine(f"{ranks}x{device}"), works).seconds
                    times[name, law, device, balance + way].append(seconds)
                    best[name, law, device, f"{ranks}db-SP"].append(seconds if balance else math.inf)
        for key, values in best.items():
            times[key].append(min(values))


def _traces(took: dict[tuple[str, ...], float]) -> Iterator[Row]:
    why = {
        "balanced": "its kernels take 33 to 40 ms too; NCCL, waiting included, and copies add 10 to 19 there",
        "imbalanced": "its mask is not recorded, and perhaps one of the deliberately bad (ratio 1.8)",
    }
    for kind, by_way in paper.TRACES.items():
        for way, published in by_way.items():
            seconds = took[paper.WAN, "paro .414", "a800", ("db-SP" if kind == "balanced" else "") + way]
            yield row(f"db-SP trace, {kind} {way}", "ms", 1e3 * seconds, published, why[kind])
    way, published = paper.DENSE_TRACE
    problem = problem_of(model(paper.WAN), 75_600, 8)
    schedule = build(way, problem, BlockMask.dense(problem.heads, 75_600))
    seconds = simulate(schedule, machine("8xa800")).seconds
    yield row(f"db-SP trace, dense {way}", "ms", 1e3 * seconds, published)


def _whole(name: str, device: str, ranks: int, attention: float) -> float:
    """No guidance, as in db-SP's drivers."""
    size = model(name)
    topology, speed = machine(f"{ranks}x{device}"), LINEAR * peak(device)
    return size.steps * step(size, size.grid(), attention, topology, linear_flops=speed).seconds


def _scaling(took: dict[tuple[str, ...], float]) -> Iterator[Row]:
    """Read as end to end, of which device is not said."""
    one = _whole(paper.WAN, "a800", 1, took[paper.WAN, "paro .414", "a800", "usp:1x1"])
    for way, published in paper.SCALING.items():
        eight = _whole(paper.WAN, "a800", 8, took[paper.WAN, "paro .414", "a800", way])
        yield row(f"Wan+PARO, 8 GPUs over 1, {way}", "×", one / eight, published)


def _end_to_end(took: dict[tuple[str, ...], float], cases: list[paper.EndToEnd]) -> Iterator[Row]:
    why = {
        "h800": "H800 is only 1.8× as fast as A800 there; perhaps launches and kernels not made for it",
        "a800": "perhaps more time outside attention there than 60 % of the peak gives",
    }
    gains: list[tuple[float, float]] = []
    for case in cases:
        speedups: list[float] = []
        names = dict(zip(paper.WAYS[case.ranks], case.static, strict=False))
        names[f"{case.ranks}db-SP"] = case.dbsp
        for way, published in names.items():
            attention = took[case.model, case.law, case.device, way]
            speedups.append(_whole(case.model, case.device, case.ranks, attention))
            head = f"{case.model} {case.law} {case.ranks}x{case.device} {way.lstrip('48')}"
            unknown = "Sparge's density is not known; 0.47 is assumed" * (case.law == "sparge")
            yield row(head, "s", speedups[-1], published, unknown or why[case.device])
        gains.append((min(speedups[:-1]) / speedups[-1], min(case.static) / case.dbsp))
    ours, theirs = map(mean, zip(*gains, strict=True))
    yield row(f"db-SP over the best static way, mean of {len(gains)}", "×", ours, theirs)


def streamfusion() -> Iterator[Row]:
    network = "perhaps its network: with 16 GB/s a machine, not 48, Flux without stages is within 15 %"
    kernels = "perhaps NCCL's kernels: staged, they run beside attention, and slow it by a tenth here"
    for case in paper.ABLATION:
        topology = cluster(f"{case.machines}x8xa100")
        one_sided = replace(topology, two_sided=False, comm_slowdown=0.0)
        usp = _dense_step(case, case.usp, topology)
        swap = network if case.model == "flux" else "not explained: a slower network makes it no better"
        for name, way, where, published, why in (
            ("", case.swapped, topology, case.topology_aware, swap),
            (" by NCCL", case.staged, topology, case.torus, kernels),
            (" one-sided", case.staged, one_sided, case.one_sided, ""),
        ):
            head = f"StreamFusion {case.name}, {case.machines} machines: {way}{name} over {case.usp}"
            yield row(head, "×", usp / _dense_step(case, way, where), published, why)


def _dense_step(case: paper.Ablation, way: str, topology: Topology) -> float:
    size = model(case.model)
    grid = size.grid(*case.size)
    tokens = math.prod(grid)
    problem = problem_of(size, tokens, topology.ranks, text=size.text)
    schedule = build(way, problem, BlockMask.dense(size.heads, tokens + size.text), topology)
    seconds = simulate(schedule, topology).seconds
    return step(size, grid, seconds, topology, linear_flops=LINEAR * peak("a100")).seconds


def dsp_volumes() -> Iterator[Row]:
    """One layer of Open-Sora on 8 ranks, sharded by frames, of which time has to attend to all."""
    size, ranks = model("open-sora"), 8
    frames, height, width = size.grid()
    problem = problem_of(size, frames, ranks, batch=height * width)
    activation = 2 * frames * height * width * size.hidden
    away = activation * (ranks - 1) / ranks / 1e6
    printed = {"megatron": 8 * away, "ring": 2 * away, "ulysses": 4 * away / ranks, "dsp": 2 * away / ranks}
    for way, published in printed.items():
        sent, source = getattr(volumes(activation, ranks), way), "formula"
        if way in ("ring", "ulysses"):
            schedule = build(way, problem, BlockMask.dense(size.heads, frames))
            sent, source = max(map(measure_schedule(schedule).sent, range(ranks))), "schedule"
        exact = math.isclose(sent / 1e6, published)
        yield replace(row(f"DSP volume, {way} ({source})", "MB", sent / 1e6, published), holds=exact)


def open_sora() -> Iterator[Row]:
    """100 steps with guidance, two passes each: the defaults of Open-Sora 1.0, from memory."""
    size = model("open-sora")
    why = "steps and version are not said; perhaps launches, and on 8 what every rank repeats there"
    for (ranks, way), published in paper.OPEN_SORA.items():
        topology = machine(f"{ranks}xh800")
        attention = stages_seconds(size, size.grid(), topology, way)
        one = step(size, size.grid(), attention, topology, linear_flops=LINEAR * peak("h800")).seconds
        yield row(f"Open-Sora, {ranks} GPUs, {way}", "s", 2 * size.steps * one, published, why)


def dsv_parallel() -> Iterator[Row]:
    topology = replace(cluster("4xh100"), flops=paper.SPARSE_FLOPS[0], sparse_flops=paper.SPARSE_FLOPS[0])
    size = model("dsv-2.7b")
    for case in paper.PARALLEL:
        densities = (1 - np.linspace(*case.sparsity, size.heads)).tolist()
        mask = random_mask(size.heads, case.tokens, case.tokens, block=BLOCK, density=densities)
        problem = problem_of(size, case.tokens, 4)
        ways = ("ulysses", "gather", "ulysses+balanced", "gather:2x2+balanced", "gather+balanced")
        took = {way: simulate(build(way, problem, mask, topology), topology).seconds for way in ways}
        best = min(took.values())
        head = f"DSV 4xH100, {case.name}"
        why = "its kernel log gives a fifth of that for the forward; what else was timed is not said"
        yield row(f"{head}: best plan", "ms", 1e3 * best, case.dsv, why)
        yield row(f"{head}: naive by head", "×", took["ulysses"] / best, case.by_head / case.dsv)
        yield row(f"{head}: naive by sequence", "×", took["gather"] / best, case.by_sequence / case.dsv)


def dsv_training() -> Iterator[Row]:
    """A context-parallel group; data parallelism and the optimizer are left out on both sides."""
    for number, case in enumerate(paper.TRAINING):
        dense, sparse = _train(case, sparse=False), _train(case, sparse=True)
        if number == 0:
            yield row(f"DSV {case.name}: full attention", "ms", 1e3 * dense, paper.STEP_MS[0])
            yield row(f"DSV {case.name}: DSV", "ms", 1e3 * sparse, paper.STEP_MS[1])
        why = f"{case.low}-{case.high} is reported; the sparsity of this run is not"
        yield row(f"DSV {case.name}: speed-up", "×", dense / sparse, (case.low + case.high) / 2, why)


def _train(case: paper.Training, *, sparse: bool) -> float:
    """Forward, forward again (activations are checkpointed), backward; linear layers are four forwards."""
    size, topology = model(case.model), cluster(case.cluster)
    if topology.machines > 1:
        topology = replace(topology, nic_bandwidth=100e9)  # 200 Gbit/s for two GPUs
    problem = problem_of(size, case.tokens, topology.ranks)
    forward = build("ulysses", problem, BlockMask.dense(size.heads, case.tokens))
    attention = dense = _passes(forward, topology, paper.DENSE_FLOPS, 1.0)
    if sparse:
        work = (case.tokens / 65536) ** 2 * size.heads / topology.ranks / 4
        thin = _passes(forward, topology, paper.SPARSE_FLOPS, paper.SPARSE_DENSITY)
        chosen = thin + 2 * paper.SELECTION * work
        attention = paper.DENSE_SHARE * dense + (1 - paper.DENSE_SHARE) * chosen
    around = step(size, (1, 1, case.tokens), 0.0, topology, linear_flops=LINEAR * peak("h100"))
    return size.layers * attention + 4 * around.seconds


def _passes(forward: Schedule, topology: Topology, flops: tuple[float, float], density: float) -> float:
    # A share of dense tiles stands for the sparse ones, so that they are one call.
    speeds = ("flops", "backward_flops", "sparse_flops", "sparse_backward_flops")
    machine = replace(topology, **dict(zip(speeds, 2 * flops, strict=True)))

    def run(schedule: Schedule) -> float:
        works = {index: round(work * density) for index, work in attend_works(schedule).items()}
        return simulate(schedule, machine, works).seconds

    return 2 * run(forward) + run(reverse(forward))


if __name__ == "__main__":
    main(measure, __doc__ or "")
