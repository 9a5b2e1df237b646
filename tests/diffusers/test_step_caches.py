"""Step caches: on any number of ranks every step decides as on one process, with its latents."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import weft  # noqa: E402
from tests.diffusers.caching import (  # noqa: E402
    MODELS,
    STEPS,
    Apply,
    Clock,
    Run,
    alone,
    blocks,
    decisions,
    divisive_threshold,
    faster,
    first_block,
    mag,
    on,
    pyramid,
    steps,
    taylor,
)
from tests.diffusers.toys import on_ranks  # noqa: E402
from tests.diffusers.zoo import ZOO  # noqa: E402
from weft.core.errors import InputError  # noqa: E402
from weft.hooks.step_cache import WholeReductions  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.meshgrid")  # of FasterCache
RANKS = (2, 3, 4)
CACHES: dict[str, Any] = {
    "pyramid": lambda _: pyramid,
    "mag": lambda _: mag,
    "taylor": lambda _: taylor(),
    "taylor-lite": lambda _: taylor(lite=True),
    "faster": faster,
}
"""Caches that decide by the number of the step, by the name of a model."""
TABLE = [*product(CACHES, MODELS, RANKS)]
SAMPLE = {row for at, row in enumerate(TABLE) if at % 7 == 0}


def sampled(rows: Any, sample: Any) -> list[Any]:
    return [pytest.param(*row, marks=() if row in sample else pytest.mark.soak) for row in rows]


def check(first: Run, runs: list[Run]) -> None:
    for run in runs:
        assert run.computed == first.computed
        assert (run.latents - first.latents).abs().max() <= 2e-5 * first.latents.abs().max()


@pytest.mark.parametrize(("cache", "name", "ranks"), sampled(TABLE, SAMPLE))
def test_a_cache_that_decides_by_step(cache: str, name: str, ranks: int) -> None:
    apply: Apply = CACHES[cache](name)
    first = alone(name, apply)
    assert min(first.computed) < max(first.computed), "the cache skips something"
    check(first, on(ranks, name, apply))


FIRST_BLOCK = [*product(MODELS, RANKS)]


@pytest.mark.parametrize(
    ("name", "ranks"),
    sampled(FIRST_BLOCK, {row for at, row in enumerate(FIRST_BLOCK) if at % 3 == at // 3 % 3}),
)
def test_a_cache_that_decides_by_tokens(name: str, ranks: int) -> None:
    """At a threshold by which some rank would decide otherwise by its own tokens."""
    threshold = divisive_threshold(name, ranks)
    seen = decisions(name, ranks, threshold)
    near = [value for value in seen.whole if abs(value - threshold) < 1e-6]
    assert not near, f"{len(near)} decisions of {len(seen.whole)} are within rounding of the threshold"
    together, own = seen.whole[0] > threshold, [each > threshold for each in seen.ranks[0]]
    assert not all(each == together for each in own), "one rank would decide otherwise"
    first = alone(name, first_block(threshold))
    check(first, on(ranks, name, first_block(threshold)))


@pytest.mark.parametrize(
    ("name", "ranks"), sampled(FIRST_BLOCK, {row for at, row in enumerate(FIRST_BLOCK) if at % 4 == 0})
)
def test_cache_dit(name: str, ranks: int) -> None:
    """At the same thresholds: it compares the same residuals of the first block."""
    pytest.importorskip("cache_dit")
    apply = blocks(min(divisive_threshold(name, ranks), 0.99))
    check(alone(name, apply), on(ranks, name, apply))


def test_without_shared_decisions_the_ranks_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeReductions, "_add", lambda _, *numbers: list(numbers))
    threshold = divisive_threshold("wan", 2)
    with pytest.raises(Exception, match=r"Waited|ranks?|computed"):
        check(alone("wan", first_block(threshold)), on(2, "wan", first_block(threshold), timeout=1.0))


@pytest.mark.parametrize(
    ("name", "apply"), [("wan", first_block(0.15)), ("flux", taylor()), ("ltx", pyramid)]
)
def test_a_cache_that_is_applied_to_a_parallelized_model(name: str, apply: Apply) -> None:
    check(alone(name, apply), on(2, name, apply, late=True))


def test_a_probe_leaves_the_state_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second kind of arguments is probed in the middle of a run."""

    def job(world: Any) -> list[int]:
        model, clock = ZOO["wan"].make(torch.float32), Clock()
        mag(model, clock)
        weft.parallelize(model, mesh=world, cfg="off")
        (region,) = model._weft.regions.values()  # pyright: ignore
        steps(model, "wan", clock, region._probed.clear)
        return region.caches.summary().forwards

    expected = alone("wan", mag).computed
    assert on_ranks(2, job, timeout=60.0) == [expected] * 2


def test_a_cache_beside_sparse_attention() -> None:
    """As on one rank with the same masks."""
    apply, options = first_block(0.15), {"sparse": "sta:dense_steps=1"}
    (one,) = on(1, "wan", apply, **options)
    assert min(one.computed) < max(one.computed)
    check(one, on(3, "wan", apply, **options))


def test_each_branch_of_guidance_decides_for_itself() -> None:
    """Its calls are those of one context each; all ranks compute both."""

    def run(model: Any) -> list[torch.Tensor]:
        given = ZOO["wan"].inputs(dtype=torch.float32)
        x, words = given.pop("hidden_states"), given.pop("encoder_hidden_states")
        outs: list[torch.Tensor] = []
        with torch.no_grad():
            for step in range(STEPS):
                given["timestep"] = torch.full_like(given["timestep"], 1000.0 - 150 * step)
                for branch, text in (("cond", words), ("uncond", -3 * words)):
                    with model.cache_context(branch):
                        outs.append(model(hidden_states=x, encoder_hidden_states=text, **given)[0])
                x = x - 0.15 * (3 * outs[-2] - 2 * outs[-1])
        return outs

    def job(world: Any) -> list[torch.Tensor]:
        model = ZOO["wan"].make(torch.float32)
        first_block(0.15)(model, Clock())
        return run(weft.parallelize(model, mesh=world, cfg="on"))

    model = ZOO["wan"].make(torch.float32)
    first_block(0.15)(model, Clock())
    expected = run(model)
    for outs in on_ranks(2, job, timeout=60.0):
        for out, one in zip(outs, expected, strict=True):
            assert (out - one).abs().max() <= 2e-5 * one.abs().max()


def test_a_short_text_that_all_ranks_have_is_refused_where_it_would_count_twice() -> None:
    def job(world: Any) -> None:
        model = ZOO["flux"].make(torch.float32)
        first_block(0.1)(model, Clock())
        weft.parallelize(model, mesh=world, cfg="off")
        given = ZOO["flux"].inputs(dtype=torch.float32, text=2)
        with torch.no_grad(), model.cache_context("cond"):  # pyright: ignore
            for _ in range(2):
                model(**given)

    with pytest.raises(InputError, match="over tokens of text that every one of 3 ranks has"):
        on_ranks(3, job)


def test_the_account_of_a_run() -> None:
    def job(world: Any) -> str:
        model, clock = ZOO["wan"].make(torch.float32), Clock()
        weft.parallelize(model, mesh=world, cfg="off")
        mag(model, clock)
        steps(model, "wan", clock)
        (region,) = model._weft.regions.values()  # pyright: ignore
        return str(region.caches.summary())

    first = alone("wan", mag).computed
    skipped = sum(each < 2 for each in first)
    words = f"MagCacheHeadHook, MagCacheBlockHook: {skipped} of 6 forwards skipped blocks, "
    assert on_ranks(2, job) == [f"{words}{1 - sum(first) / 12:.1%} of all attentions"] * 2
