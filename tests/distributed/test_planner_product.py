"""Masks that change every step, through `weft.parallelize` on real ranks: balanced, exact and saved."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import weft
from tests.diffusers.toys import normal, seeded
from tests.worlds import world
from weft.core.errors import CommError
from weft.core.mask import BlockMask
from weft.plan.place import StepReport
from weft.run.spawn.pool import RankFailure
from weft.run.world import LocalComm, World, world_of
from weft.sparse.context import AttentionContext
from weft.video.transformer import DiTConfig, VideoDiT

CONFIG = DiTConfig(words=11, length=8, video=(6, 20, 32), patch=(1, 2, 2), width=48, depth=1, heads=6)
BLOCK = 16
STEPS = 30
TOPK = f"topk:0.2,block={BLOCK},tile=1x4x4,dense_steps=0,refresh=1,recall=0"
EXACT = 1e-10


class Evolving:
    """Heads of different density, of whose tiles a twentieth changes in each step.

    `wrong` is a rank that has a mask of its own.
    """

    def __init__(self, wrong: int | None = None) -> None:
        self.wrong = wrong

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask:  # noqa: ARG002
        is_wrong = ctx.step == 2 and ctx.world.comm.rank == self.wrong
        return evolving(ctx.layer + 1 + 7 * is_wrong, ctx.heads, ctx.layout.size)[ctx.step]


@cache
def evolving(seed: int, heads: int, tokens: int) -> list[BlockMask]:
    """By step."""
    random, blocks = np.random.default_rng(seed), -(-tokens // BLOCK)
    share, scores = random.uniform(0.1, 0.6, (heads, 1, 1)), random.random((heads, blocks, blocks))
    scores *= random.uniform(0.7, 1.3, (heads, blocks, 1)) * random.uniform(0.7, 1.3, (heads, 1, blocks))
    found: list[BlockMask] = []
    for _ in range(STEPS):
        is_new = random.random(scores.shape) < 0.05
        scores = np.where(is_new, random.permuted(scores, axis=2), scores)
        share = np.clip(share * random.lognormal(0, 0.02, share.shape), 0.02, 0.9)
        tiles = scores < share
        found.append(BlockMask.from_tiles(tiles, q_len=tokens, kv_len=tokens, block_q=BLOCK))
    return found


class Shifting:
    """Masks of the first layer that fill up in the middle of a run; those of the second stay diagonals."""

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask:  # noqa: ARG002
        return shifting(ctx.layer, ctx.heads, ctx.layout.size)[ctx.step]


@cache
def shifting(layer: int, heads: int, tokens: int) -> list[BlockMask]:
    blocks = -(-tokens // BLOCK)
    found: list[BlockMask] = []
    for step in range(STEPS):
        tiles = np.tile(np.eye(blocks, dtype=bool), (heads, 1, 1))
        tiles[step % heads, 1, 2] = True
        if step >= 2 and layer == 0:
            tiles |= np.random.default_rng(step).random(tiles.shape) < 0.3
        found.append(BlockMask.from_tiles(tiles, q_len=tokens, kv_len=tokens, block_q=BLOCK))
    return found


SPARSE: dict[str, Any] = {"evolving": Evolving(), "shifting": Shifting(), "topk": TOPK}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of a model, and what may happen in it."""

    sparse: str = "evolving"
    plan: str = "usp:2x2+balanced"
    steps: int = 6
    depth: int = 1
    heads: int = 6
    settles: bool = True
    """Whether each step waits for the plans of the one before; no run does, but then numbers repeat."""
    asleep: int | None = None
    """A rank that is late by a second."""
    late: int | None = None
    """The step before which nothing is planned."""
    wrong: int | None = None
    """A rank that has another mask than others."""
    dies: int | None = None
    """A rank that is gone in the middle of the run, while rank 0 plans."""
    folder: str = "off"
    """Of stored plans."""


class Run(NamedTuple):
    """What one rank saw of a run."""

    outs: list[Tensor]
    plans: list[list[tuple[int, str]]]
    """By step and layer, the version and the strategy."""
    why: list[str]
    judged: list[list[StepReport]]
    """By layer, on rank 0."""


class Pipeline:
    """As little of one as `weft.parallelize` takes."""

    def __init__(self, depth: int, heads: int) -> None:
        made: Any = seeded(VideoDiT(replace(CONFIG, depth=depth, heads=heads, width=8 * heads))).eval()
        for block in made.blocks:  # attention that has something to select
            block.attn.norm_q.weight.data += 3
        self.components = {"transformer": made}

    def __call__(self, steps: int, before: Any, after: Any) -> list[Tensor]:
        """A video that drifts, at timesteps that fall."""
        outs: list[Tensor] = []
        T, H, W = CONFIG.video
        for step in range(steps):
            before(step)
            video = normal(1, T, 3, H, W) + 0.05 * step * normal(1, T, 3, H, W, seed=2)
            with torch.no_grad():
                time = torch.tensor([1 - step / 100]).double()
                outs.append(self.components["transformer"](video, time, torch.arange(8)[None]))
            after(step)
        return outs


def run(case: Case, mesh: World | None = None) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_PLANS", case.folder)
        here = mesh or World(world_of(None, 60.0).comm)
        rank, planner, gate = here.comm.rank, here.planner, threading.Event()
    sparse = SPARSE[case.sparse] if case.wrong is None else Evolving(case.wrong)
    made = Pipeline(case.depth, case.heads)
    pipe = weft.parallelize(made, mesh=here, sparse=sparse, plan=case.plan, cfg="off")
    if case.late is not None and rank == 0:
        planner._background.submit(gate.wait)
    plans: list[list[tuple[int, str]]] = []

    def before(step: int) -> None:
        if step == case.late:
            gate.set()
        if step == case.steps // 2 and rank == case.asleep:
            time.sleep(1.0)
        if step == case.steps // 2 and rank == case.dies:
            os._exit(3)

    def after(_: int) -> None:
        if case.settles:
            planner.finish()
        entries = planner.entries.values()
        plans.append([(entry.plan.version, str(entry.plan.strategy)) for entry in entries])

    try:
        outs = pipe(case.steps, before, after)
    finally:
        gate.set()
    planner.finish()
    entries = list(planner.entries.values())
    return Run(outs, plans, [entry.plan.why for entry in entries], [list(entry.judged) for entry in entries])


@cache
def alone(sparse: str, depth: int, heads: int) -> list[Tensor]:
    """What one process computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    case = Case(sparse=sparse, plan="auto", steps=STEPS, depth=depth, heads=heads)
    found = run(case, World(LocalComm())).outs
    torch.set_num_threads(threads)
    return found


def on_ranks(case: Case) -> Run:
    """Rank 0's run, when all ranks have what one process has, and changed plans at the same calls."""
    found, expected = world(4).run(run, case), alone(case.sparse, case.depth, case.heads)
    for each in found:
        for step, (out, wanted) in enumerate(zip(each.outs, expected, strict=False)):
            assert (out - wanted).abs().max() < EXACT * wanted.abs().max(), f"step {step}"
        assert each.plans == found[0].plans
    return found[0]


@pytest.mark.parametrize(
    ("sparse", "plan"), [("evolving", "usp:2x2+balanced"), ("topk", "usp:2x2+balanced"), ("topk", "auto")]
)
def test_masks_that_change_stay_balanced_and_exact(sparse: str, plan: str) -> None:
    found = on_ranks(Case(sparse=sparse, plan=plan, steps=STEPS))
    (judged,) = found.judged
    assert [each.step for each in judged] == list(range(STEPS))
    now, static, moved = (
        np.mean([getattr(each, name) for each in judged])
        for name in ("imbalance", "imbalance_static", "moved")
    )
    assert now <= 1.03 and moved <= 0.03
    if plan != "auto":
        assert found.plans[-1][0][0] > 1, "assignments have changed"
        assert static > now + 0.01, "which was needed"


def test_a_rank_that_is_late_by_a_second_changes_nothing() -> None:
    found = on_ranks(Case(asleep=2, settles=False))
    assert found.plans[0] == [(0, "usp:2x2+balanced")]


def test_a_plan_that_is_late_holds_later() -> None:
    found = on_ranks(Case(late=3, settles=False))
    assert all(version == 0 for step in found.plans[:3] for version, _ in step)


def test_layers_change_to_other_strategies_while_others_stay() -> None:
    found = on_ranks(Case(sparse="shifting", plan="auto", depth=2, heads=8))
    first, last = found.plans[0], found.plans[-1]
    assert first[0][1] == first[1][1] == last[1][1] != last[0][1], found.plans
    assert f"{last[0][1]} is" in found.why[0] and f"ahead of {first[0][1]}" in found.why[0]
    assert found.why[1] != found.why[0]
    judged = found.judged[0][-1]
    assert judged.seconds * 1.02 < judged.seconds_static


def test_another_mask_on_one_rank_raises_on_all_and_names_it() -> None:
    with pytest.raises(RankFailure) as caught:
        world(4).run(run, Case(wrong=2))
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    for failure in caught.value.failures.values():
        assert failure.kind == "AgreementError"
        assert "Ranks [2] have another mask than rank 0: step 2" in failure.message


def bereaved(case: Case) -> None:
    here = World(world_of(None, 6.0).comm)
    try:
        run(case, here)
    except CommError as error:
        here.close()
        threads = list(here.planner._background._threads)
        for thread in threads:
            thread.join(15.0)
        alive = sum(thread.is_alive() for thread in threads)
        raise CommError(f"{error} {alive} of {len(threads)} threads go on.") from error


@pytest.mark.parametrize(("dies", "late"), [pytest.param(0, None, marks=pytest.mark.soak), (2, STEPS)])
def test_a_rank_that_dies_while_others_plan_fails_the_call_and_ends_their_threads(
    dies: int, late: int | None
) -> None:
    with pytest.raises(RankFailure) as caught:
        world(4).run(bereaved, Case(dies=dies, late=late, settles=late is None))
    failures = caught.value.failures
    assert sorted(failures) == [0, 1, 2, 3] and failures.pop(dies).kind == "exited"
    for rank, failure in failures.items():
        threads = int(dies == 0 or rank == 0)  # whoever had something to plan or to fetch
        assert failure.kind == "CommError" and f"0 of {threads} threads go on" in failure.message


def test_the_next_run_starts_with_the_plans_of_the_last(tmp_path: Path) -> None:
    case = Case(plan="auto", folder=str(tmp_path), steps=3)
    assert "earlier run" not in on_ranks(case).why[0]
    (file,) = tmp_path.iterdir()
    second = on_ranks(case)
    assert second.why == ["as in an earlier run"]
    assert second.judged[0][0].imbalance <= 1.03
    file.write_text(file.read_text().replace('"rows"', '"rovs"'))
    assert "earlier run" not in on_ranks(case).why[0]
