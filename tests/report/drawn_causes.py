"""Timelines by the simulator with exactly one known cause: a kind, and the rank, link or machine it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

import numpy as np

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.timeline import Timeline
from weft.core.topology import Link, Topology
from weft.plan.choose import build
from weft.program.lower import lower_all
from weft.program.steps import Post, Step
from weft.report.evidence import Cause
from weft.schedule.measure import attend_works
from weft.simulate.costs import ATTENTIONS, Prices, attend_price
from weft.simulate.events import _Run, simulate
from weft.simulate.sharing import SimulatedTask

FLOPS = 1e12


@dataclass(frozen=True)
class Drawn:
    """A timeline with its cause: the fields of `Cause` that must be named."""

    kinds: tuple[str, ...]
    timeline: Timeline
    schedule: Schedule
    topology: Topology
    names: Mapping[str, Any]

    def holds(self, cause: Cause) -> bool:
        return cause.kind in self.kinds and all(
            getattr(cause, name) == what for name, what in self.names.items()
        )


@dataclass(frozen=True)
class Base:
    """A balanced attention on a cluster whose messages take `ratio` of the time of computing."""

    random: Random
    ratio: float = 0.3
    plan: str = ""
    machines: int = 0
    devices: int = 0

    def drawn(self, mask: Callable[[int, int, int], np.ndarray] | None = None) -> tuple[Schedule, Topology]:
        random = self.random
        machines = self.machines or random.choice([1, 1, 2, 3])
        devices = self.devices or random.choice([2, 3, 4, 5, 8] if machines == 1 else [2, 3, 4])
        ranks = machines * devices
        plan = self.plan or random.choice(["ring", "ulysses", f"usp:{devices}x{machines}", "gather"])
        block = 32
        tokens = ranks * block * random.randint(2, 12)
        heads, dim = ranks * random.randint(1, 3), random.choice([32, 64, 128])
        layout = Layout.even(tokens, ranks)
        problem = Problem(
            batch=1, heads=heads, kv_heads=heads, head_dim=dim, q=layout, kv=layout, dtype="bfloat16"
        )
        active = BlockMask.dense(heads, tokens)
        if mask is not None:
            active = BlockMask.from_tiles(
                mask(heads, tokens // block, ranks), q_len=tokens, kv_len=tokens, block_q=block, block_k=block
            )
        a_step = tokens / ranks if plan.startswith("ring") else tokens / 2
        bandwidth = FLOPS / (self.ratio * a_step)
        if mask is not None:
            bandwidth /= max(active.density, 0.02)
        seconds = 4 * tokens**2 * heads * dim / ranks / FLOPS * active.density
        latency = seconds * random.uniform(1e-4, 2e-3)
        share = random.choice([1.0, 1.0, 0.5])
        topology = Topology(
            name="drawn",
            machines=machines,
            devices=devices,
            intra=Link(latency=latency, bandwidth=bandwidth),
            inter=Link(latency=2 * latency, bandwidth=bandwidth * share),
            flops=FLOPS,
            call_seconds=seconds * 1e-3,
            two_sided=random.random() < 0.5,
            comm_slowdown=random.choice([0.0, 0.1]),
        )
        return build(plan, problem, active, topology), topology


def attend_seconds(schedule: Schedule, topology: Topology) -> dict[int, float]:
    price, works = attend_price(schedule, topology), attend_works(schedule)
    return {i: price(works[i], op) for i, op in schedule.attends()}


def delayed(schedule: Schedule, topology: Topology, delay: Callable[[int, int, Step], float]) -> Timeline:
    """Simulate with a rank that does nothing for some seconds before some of its steps."""
    programs = lower_all(schedule)
    run = _Run(schedule, Prices(schedule, topology, attend_works(schedule)), programs)
    pauses = {
        id(step): pause
        for rank, program in enumerate(programs)
        for number, step in enumerate(program.steps)
        if (pause := delay(rank, number, step))
    }
    price, finish = run.prices.seconds, run._finish
    paused: dict[tuple[int, int], float] = {}

    def finish_and_note(task: SimulatedTask) -> None:
        if id(task.step) in pauses:
            paused[task.rank, len(run.done[task.rank])] = pauses[id(task.step)]
        finish(task)

    run.prices.seconds = lambda step: price(step) + pauses.get(id(step), 0.0)
    run._finish = finish_and_note
    sends = [span for span in run.play() if span.kind == "send"]
    spans = [
        span._replace(start=min(span.end, span.start + paused.get((rank, place), 0.0)))
        for rank, lane in enumerate(run.done)
        for place, span in enumerate(lane)
    ]
    return Timeline(schedule.name, topology.ranks, (*spans, *sends), machines=topology.machines)


def slow_rank(random: Random) -> Drawn:
    schedule, topology = Base(random).drawn()
    rank, factor = random.randrange(topology.ranks), random.uniform(1.4, 3)
    seconds = attend_seconds(schedule, topology)
    seconds = {i: t * factor if schedule.ops[i].rank == rank else t for i, t in seconds.items()}
    timeline = simulate(schedule, topology, seconds=seconds)
    # Of one attention alone, slow and stopped are the same.
    kinds = (
        ("slow rank", "stall") if sum(op.rank == rank for _, op in schedule.attends()) < 2 else ("slow rank",)
    )
    return Drawn(kinds, timeline, schedule, topology, {"rank": rank})


def overloaded(random: Random) -> Drawn:
    """The queries of one rank attend to much more."""
    rank = -1

    def mask(heads: int, blocks: int, ranks: int) -> np.ndarray:
        nonlocal rank
        rank = random.randrange(ranks)
        rng = np.random.default_rng(random.randrange(2**32))
        tiles = np.zeros((1, blocks, blocks), bool)
        every = blocks // ranks
        for row in range(blocks):  # as many tiles in each column group: every ring step is alike
            share = random_share if row // every == rank else 0.25
            for group in range(ranks):
                some = rng.choice(every, max(1, round(share * every)), replace=False)
                tiles[0, row, group * every + some] = True
        return np.repeat(tiles, heads, axis=0)

    random_share = random.uniform(0.6, 1.0)
    schedule, topology = Base(random, plan=random.choice(["ring", "gather"])).drawn(mask)
    timeline = simulate(schedule, topology)
    even = fmean(attend_seconds(schedule, topology).values())
    if (
        timeline.seconds
        < 1.1
        * simulate(
            schedule, topology, seconds=dict.fromkeys(attend_seconds(schedule, topology), even)
        ).seconds
    ):
        return overloaded(random)
    return Drawn(("uneven work",), timeline, schedule, topology, {"rank": rank})


def uneven_heads(random: Random) -> Drawn:
    """Ulysses deals heads, and those of one rank are dense."""
    rank = -1

    def mask(heads: int, blocks: int, ranks: int) -> np.ndarray:
        nonlocal rank
        rank = random.randrange(ranks)
        rng = np.random.default_rng(random.randrange(2**32))
        sparse = np.zeros((1, blocks, blocks), bool)
        for row in range(blocks):
            sparse[0, row, rng.choice(blocks, max(1, blocks // 5), replace=False)] = True
        tiles = np.repeat(sparse, heads, axis=0)
        each = heads // ranks
        tiles[rank * each : (rank + 1) * each] = True
        return tiles

    schedule, topology = Base(random, plan="ulysses").drawn(mask)
    return Drawn(("uneven work by head",), simulate(schedule, topology), schedule, topology, {"rank": rank})


def uneven_step(random: Random) -> Drawn:
    """All ranks have equally much, but one rank has it in another step of the ring."""
    rank = -1

    def mask(heads: int, blocks: int, ranks: int) -> np.ndarray:
        nonlocal rank
        rank, every = random.randrange(ranks), blocks // ranks
        usual, other = random.sample(range(ranks), 2)
        tiles = np.zeros((heads, blocks, blocks), bool)
        for one in range(ranks):
            # What a rank brings into its ring reaches the others step by step, in one direction.
            source = (one - (other if one == rank else usual)) % ranks
            tiles[:, one * every : (one + 1) * every, source * every : (source + 1) * every] = True
            tiles[:, np.arange(one * every, (one + 1) * every), ::every] = True
        return tiles

    while True:
        schedule, topology = Base(random, plan="ring", machines=1, devices=random.choice([4, 5, 8])).drawn(
            mask
        )
        # Without barriers the steps of a ring do not hold each other up, and not all of them with barriers.
        topology = replace(topology, barriers=True)
        timeline = simulate(schedule, topology)
        seconds = attend_seconds(schedule, topology)
        hops = [[seconds[i] for i in seconds if schedule.ops[i].rank == r] for r in range(topology.ranks)]
        even = {i: 0.0 for i in seconds}
        for r in range(topology.ranks):
            own = [i for i in seconds if schedule.ops[i].rank == r]
            even |= {i: fmean(column) for i, column in zip(own, zip(*hops, strict=True), strict=True)}
        if timeline.seconds > 1.1 * simulate(schedule, topology, seconds=even).seconds:
            return Drawn(("uneven work by step",), timeline, schedule, topology, {"rank": rank})


def slow_link(random: Random) -> Drawn:
    schedule, topology = Base(random).drawn()
    clean = simulate(schedule, topology)
    pairs = sorted({(s.rank, s.peer) for s in clean.spans if s.kind == "send"})
    pair = random.choice(pairs)
    link = topology.link(*pair)
    slow = replace(link, bandwidth=link.bandwidth / random.uniform(8, 40))
    topology = replace(topology, links=((*pair, slow),))
    return Drawn(("slow link",), simulate(schedule, topology), schedule, topology, {"link": pair})


def slow_machine(random: Random) -> Drawn:
    """The network card of one machine: all its messages from and to other machines."""
    machines, devices = random.choice([3, 4]), random.choice([2, 3])
    while True:
        plan = random.choice(["ring", "ulysses", "gather"])
        schedule, topology = Base(random, plan=plan, machines=machines, devices=devices).drawn()
        machine, clean = random.randrange(machines), simulate(schedule, topology).seconds
        bandwidth = topology.inter.bandwidth / random.uniform(6, 30)
        slow = replace(topology.inter, bandwidth=bandwidth)
        pairs = [(a, b) for a in range(topology.ranks) for b in range(topology.ranks)]
        links = [
            (a, b, slow)
            for a, b in pairs
            if topology.machine(a) != topology.machine(b) and machine in map(topology.machine, (a, b))
        ]
        topology = replace(topology, links=tuple(links))
        timeline = simulate(schedule, topology)
        if timeline.seconds > 1.1 * clean:  # many messages at once are slow anyway
            return Drawn(("slow machine links",), timeline, schedule, topology, {"machine": machine})


def late_start(random: Random) -> Drawn:
    schedule, topology = Base(random).drawn()
    rank = random.randrange(topology.ranks)
    late = random.uniform(0.3, 1.5) * simulate(schedule, topology).seconds
    timeline = delayed(schedule, topology, lambda r, number, _: late if (r, number) == (rank, 0) else 0.0)
    return Drawn(("late start",), timeline, schedule, topology, {"rank": rank})


def stall(random: Random) -> Drawn:
    """One attention takes much longer, or begins much later."""
    schedule, topology = Base(random, plan="ring", devices=random.choice([3, 4, 5, 8])).drawn()
    rank, seconds = random.randrange(topology.ranks), attend_seconds(schedule, topology)
    chosen = random.choice([i for i in seconds if schedule.ops[i].rank == rank][1:])
    late = random.uniform(0.4, 1.5) * simulate(schedule, topology).seconds
    if random.random() < 0.5:
        timeline = simulate(schedule, topology, seconds=seconds | {chosen: seconds[chosen] + late})
    else:
        timeline = delayed(
            schedule,
            topology,
            lambda _r, _n, step: late if type(step) in ATTENTIONS and step.op == chosen else 0.0,
        )
    return Drawn(("stall",), timeline, schedule, topology, {"rank": rank})


def late_sends(random: Random) -> Drawn:
    """Every message of a rank but the first is posted late."""
    schedule, topology = Base(random, plan="ring", devices=random.choice([4, 5, 8])).drawn()
    rank = random.randrange(topology.ranks)
    late = random.uniform(0.15, 0.5) * simulate(schedule, topology).seconds
    posts = [step for step in lower_all(schedule)[rank].steps if isinstance(step, Post) and step.sends][1:]
    ops = {step.op for step in posts}
    timeline = delayed(
        schedule,
        topology,
        lambda r, _, step: late if r == rank and isinstance(step, Post) and step.op in ops else 0.0,
    )
    return Drawn(("late sends",), timeline, schedule, topology, {"rank": rank})


def latency(random: Random) -> Drawn:
    schedule, topology = Base(random, ratio=0.05).drawn()
    base = simulate(schedule, topology).seconds
    topology = replace(topology, intra=replace(topology.intra, latency=base * random.uniform(0.5, 2)))
    topology = replace(
        topology, inter=replace(topology.inter, latency=topology.intra.latency * random.choice([1, 2]))
    )
    return Drawn(
        ("latency",),
        simulate(schedule, topology),
        schedule,
        topology,
        {"rank": None, "link": None, "machine": None},
    )


def bandwidth(random: Random) -> Drawn:
    schedule, topology = Base(random, ratio=random.uniform(3, 10)).drawn()
    return Drawn(
        ("bandwidth",),
        simulate(schedule, topology),
        schedule,
        topology,
        {"rank": None, "link": None, "machine": None},
    )


def nothing(random: Random) -> Drawn:
    schedule, topology = Base(random, ratio=0.005).drawn()
    return Drawn(
        ("nothing",),
        simulate(schedule, topology),
        schedule,
        topology,
        {"rank": None, "link": None, "machine": None},
    )


CAUSES = (
    slow_rank,
    overloaded,
    uneven_heads,
    uneven_step,
    slow_link,
    slow_machine,
    late_start,
    stall,
    late_sends,
    latency,
    bandwidth,
    nothing,
)
