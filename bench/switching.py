"""Switching the sharded dim against Ulysses, ring and Megatron-SP: blocks of one ST-DiT, the same weights.

    python -m bench.switching [--quick] [--json FILE]

Inference is a forward pass of two layers; training is forward and backward, without the sum of the gradients
of parameters over ranks, which does not grow with the video and which megatron needs for few of them. The
methods are those of `bench.baselines`, each checked against one process before any clock starts. They take
turns in rounds, the slowest rank counts, and a ratio is the median over rounds. Two ranks of this machine,
over gloo and over shared memory, and a test bed of two machines with two ranks each and links of 1 Gbit/s
and 400 Mbit/s, over gloo. There four ranks share the cores of this machine, and compute is slow for such
links; at 100 Mbit/s it is to them what that of devices four times as fast would be at 400.

The limit is the longer of two contenders of the same rounds: the blocks on 1/N of the frames by all ranks at
once, with no messages; and the bytes of switching that have to cross, in one message. Where compute is less
than half of Ulysses' time, switching has to be 1.32 times as fast as Ulysses and 3 times as fast as megatron;
nowhere may it be slower than the best of the others. Memory is the largest sum of torch's allocations that
are alive during a method's first call, its weights and input left out; shared memory is not torch's.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench.baselines import METHODS, Trunk, bytes_of_layer
from bench.links import exchange
from bench.rows import (
    Results,
    Round,
    Row,
    Took,
    followed,
    interleave,
    main,
    median_ratio,
    take_turns,
    timed,
    undisturbed,
    walls,
)
from bench.stage import STAGE
from bench.stdit import STDiT
from weft.core.errors import MissingError
from weft.run.spawn.pool import Pool
from weft.run.spawn.testbed import Testbed
from weft.run.world import world_of

WEFT, ULYSSES, MEGATRON, COMPUTE, WIRE = "switching", "ulysses", "megatron", "blocks alone", "bytes alone"
LAYERS, HEADS = 2, 4
TOLERANCE = 1e-4
BAR, OVER_ULYSSES, OVER_MEGATRON = 0.98, 1.32, 3.0
SHAPES = ((2, 32, 64, 64), (2, 32, 128, 64))
"""[B, T, S, C]; on a test bed and in a hurry the first one only."""
PLACES = {"2 ranks, gloo": "group", "2 ranks, shared memory": "auto"}
RATES = {"2x2, 1 Gbit/s": "1gbit", "2x2, 400 Mbit/s": "400mbit", "2x2, 100 Mbit/s": "100mbit"}


@dataclass(frozen=True)
class SwitchCase:
    place: str
    shape: tuple[int, int, int, int]
    training: bool

    def __str__(self) -> str:
        _, T, S, C = self.shape
        return f"{self.place}, {T} x {S} x {C}, {'training' if self.training else 'inference'}"

    @property
    def passes(self) -> int:
        return 2 if self.training else 1

    def formula(self, method: str, ranks: int) -> int:
        """Bytes that a rank sends forward."""
        B, T, S, C = self.shape
        return LAYERS * bytes_of_layer(method, 4 * B * T * S * C, ranks)


class Facts(NamedTuple):
    """What a method was found to do before it was timed."""

    error: float
    forward: int
    """Bytes that this rank sends."""
    step: int
    """Bytes that it sends in all that is timed."""
    peak: int


# On a rank.


def prepare(case: SwitchCase) -> dict[str, Facts]:
    """Run every method for the first time, look at it, and put it on stage."""
    STAGE.clear()
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler's own words would tear the progress bar
    gc.unfreeze()
    gc.collect()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    B, T, _, C = case.shape
    x, condition, weights = torch.randn(case.shape), torch.randn(B, C), _trunk(C).state_dict()
    with torch.no_grad():
        truth = _trunk(C, weights)(x, condition).tensor_split(ranks, 1)[rank]
    facts: dict[str, Facts] = {}
    for name, method in METHODS.items():
        step = partial(_step, method(_trunk(C, weights)), x, condition)
        facts[name] = _look(step, case.training, truth)
        STAGE[name] = partial(step, case.training)
    mine = x.tensor_split(ranks, 1)[rank].contiguous()
    STAGE[COMPUTE] = partial(_step, _trunk(C, weights), mine, condition, case.training)
    STAGE[WIRE] = exchange(crossing(case, ranks), (rank + ranks // 2) % ranks)
    for call in [*STAGE.values()] * 2:
        dist.barrier()
        call()
    gc.collect()
    gc.freeze()
    return facts


def crossing(case: SwitchCase, ranks: int) -> int:
    """Bytes of switching that a rank sends to the other machine; of two ranks, to the other one."""
    return case.passes * case.formula(WEFT, ranks) * (ranks // 2) // (ranks - 1)


def _trunk(width: int, weights: dict[str, Tensor] | None = None) -> Trunk:
    trunk = Trunk(STDiT(width=width, heads=HEADS, depth=LAYERS))
    if weights:
        trunk.load_state_dict(weights)
    else:
        for parameter in trunk.parameters():  # gates would begin at 0
            nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
    return trunk


def _step(model: nn.Module, x: Tensor, condition: Tensor, training: bool) -> Tensor:  # noqa: FBT001
    with torch.set_grad_enabled(training):
        out = model(x, condition)
        if training:
            out.backward(out.detach())
            model.zero_grad()
    return out.detach()


def _look(step: Callable[[bool], Tensor], training: bool, truth: Tensor) -> Facts:  # noqa: FBT001
    world = world_of(None, 60.0)
    comm = world.comm
    world.arena._blocks.clear()  # or only the first method would be seen to fill it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        out = step(training)
    counts = [comm.bytes_sent]
    for backward in (False, training):
        step(backward)
        counts.append(comm.bytes_sent)
    error = float((out - truth).abs().max() / truth.abs().max())
    return Facts(error, counts[1] - counts[0], counts[2] - counts[1], _peak(seen))


def _peak(seen: Any) -> int:
    """The most memory that was allocated and not yet freed, by the events of a profile."""
    alive = most = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


def play(turn: int) -> dict[str, Took]:
    # In no fixed order: who follows a contender that mostly waits finds a core that has gone cold.
    names = random.Random(turn).sample(list(STAGE), len(STAGE))
    return take_turns({name: STAGE[name] for name in names}, 0, before=dist.barrier)


# In the parent.


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - the command line's call
    report = Results()
    rates = {place: rate for place, rate in RATES.items() if not quick or rate == "400mbit"}
    for place, transport in PLACES.items():
        if quick and transport != "group":
            continue
        with Pool(2, threads=1, timeout=120.0, transport=transport) as pool:
            rows(report, pool, place, quick, progress)
    try:
        with Testbed(2) as bed, bed.pool(2, threads=1, timeout=120.0, transport="group") as pool:
            for place, rate in rates.items():
                bed.change_rate(rate)
                rows(report, pool, place, quick, progress)
    except MissingError as error:
        report.rows.extend(_unmeasured(place, str(error)) for place in rates)
    return report


def rows(report: Results, pool: Pool, place: str, quick: bool, progress: Progress) -> None:  # noqa: FBT001
    for shape in SHAPES[:1] if quick or place in RATES else SHAPES:
        for training in (False, True):
            case, seconds = SwitchCase(place, shape, training), 3.0 if quick else 10.0
            task = progress.add_task(str(case), total=seconds)
            facts = pool.run(prepare, case)
            played = followed(interleave(partial(pool.run, play), seconds, least=5), progress, task)
            used = undisturbed(played)
            judge(report, case, facts, walls(used))
            tell(report, case, facts, used)


def judge(
    report: Results, case: SwitchCase, facts: list[dict[str, Facts]], wall: dict[str, list[float]]
) -> None:
    over = {name: median_ratio(wall[name], wall[WEFT]) for name in METHODS if name != WEFT}
    best = min(over, key=lambda name: over[name])
    moving = 1 - median_ratio(wall[COMPUTE], wall[ULYSSES])
    bars = [(f"best/weft ≥ {BAR}", over[best], BAR)]
    if moving >= 0.5:
        bars.append((f"ulysses/weft ≥ {OVER_ULYSSES}", over[ULYSSES], OVER_ULYSSES))
        bars.append((f"megatron/weft ≥ {OVER_MEGATRON:g}", over[MEGATRON], OVER_MEGATRON))
    exact = all(
        fact.error <= TOLERANCE and fact.forward == case.formula(name, len(facts))
        for rank in facts
        for name, fact in rank.items()
    )
    conditions = ", ".join(f"{text} (is {value:.2f})" for text, value, _ in bars)
    exactness = "answers and bytes exact" if exact else "NOT EXACT"
    report.rows.append(
        Row(
            case=str(case),
            measured=median(wall[WEFT]),
            peer=median(wall[best]),
            peer_name=best,
            limit=max(median(wall[COMPUTE]), median(wall[WIRE])),
            bar=f"{conditions}; ulysses moves {moving:.0%}; {exactness}",
            holds=exact and all(value >= bar for _, value, bar in bars),
        )
    )


def tell(report: Results, case: SwitchCase, facts: list[dict[str, Facts]], used: Sequence[Round]) -> None:
    """A line for each contender: time, tokens, bytes, memory."""
    wall, tokens, ranks = walls(used), prod(case.shape[:-1]), len(facts)
    others = median(one.others for one in used)
    notes = {
        COMPUTE: f"on 1/{ranks} of the frames; {len(used)} rounds, {others:.0%} of the machine to others",
        WIRE: f"{crossing(case, ranks) / median(wall[WIRE]) * 8e-3:.0f} Mbit/s a rank",
    }
    for name in METHODS:
        sent, peak = (max(getattr(rank[name], what) for rank in facts) for what in ("step", "peak"))
        speed = tokens / median(wall[name])
        notes[name] = f"{speed:.1f} tokens/ms, sends {sent / 1e6:.2f} MB, memory {peak / 1e6:.1f} MB"
    report.lines.extend([timed(str(case), name, used, WEFT, notes[name]) for name in wall])


def _unmeasured(place: str, why: str) -> Row:
    return Row(case=place, measured=None, bar=f"not measured: {why}", holds=True)


if __name__ == "__main__":
    main(measure, __doc__ or "")
