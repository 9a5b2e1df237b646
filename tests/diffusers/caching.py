"""Runs of some steps with a step cache, on one process and on ranks, and what each step computed.

first = alone("wan", first_block(0.1))
assert first.computed == [2, 1, 2, 1, 1, 2]             # attentions over the video, in each forward
for run in on(3, "wan", first_block(0.1)):
    assert run.computed == first.computed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import hooks
from torch import Tensor

import weft
from tests.diffusers.toys import on_ranks
from tests.diffusers.zoo import ZOO
from weft.core.indices import split_evenly
from weft.hooks.step_cache import cache_hooks
from weft.hooks.wrap import Args, FunctionMode, Kwargs

STEPS = 6
VIDEO = 45
"""Tokens of the zoo's grid."""
MODELS = ("wan", "flux", "hunyuan", "cogvideox-rotary", "ltx")


class Clock:
    """The timestep of a run, which pipelines have as `current_timestep`."""

    now = 1000.0


Apply = Callable[[Any, Clock], object]


class Run(NamedTuple):
    latents: Tensor
    computed: list[int]
    """Attentions over the video in each forward."""


class Calls(FunctionMode):
    """Counts attentions over the video, as one process computes them."""

    functions = frozenset({F.scaled_dot_product_attention})

    def __init__(self) -> None:
        super().__init__()
        self.counts = [0]

    def call(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        q, k = (args + (kwargs.get("query"), kwargs.get("key")))[:2]
        self.counts[-1] += q.shape[2] == k.shape[2] >= VIDEO
        return func(*args, **kwargs)


def steps(model: Any, name: str, clock: Clock, after: Callable[[], None] = lambda: None) -> Tensor:
    """Latents after some steps of a model."""
    given = ZOO[name].inputs(dtype=torch.float32)
    x = given.pop("hidden_states")
    full = 1.0 if name == "flux" else 1000.0
    with torch.no_grad():
        for step in range(STEPS):
            clock.now = 1000.0 - 150 * step
            given["timestep"] = torch.full_like(given["timestep"], clock.now * full / 1000)
            with model.cache_context("cond"):
                x = x - 0.15 * model(hidden_states=x, **given)[0]
            after()
    return x


def alone(name: str, apply: Apply) -> Run:
    """One process without weft."""
    model, clock = ZOO[name].make(torch.float32), Clock()
    apply(model, clock)
    with Calls() as calls:
        latents = steps(model, name, clock, lambda: calls.counts.append(0))
    return Run(latents, calls.counts[:-1])


def on(
    ranks: int, name: str, apply: Apply, *, late: bool = False, timeout: float = 60.0, **options: Any
) -> list[Run]:
    """All ranks; late: the cache is applied after `parallelize`."""

    def job(world: Any) -> Run:
        model, clock = ZOO[name].make(torch.float32), Clock()
        if not late:
            apply(model, clock)
        weft.parallelize(model, mesh=world, **{"cfg": "off", **options})
        if late:
            apply(model, clock)
        latents = steps(model, name, clock)
        (region,) = model._weft.regions.values()  # pyright: ignore
        return Run(latents, region.caches.summary().forwards)

    return on_ranks(ranks, job, timeout=timeout)


def first_block(threshold: float) -> Apply:
    return lambda model, _: model.enable_cache(hooks.FirstBlockCacheConfig(threshold))


def pyramid(model: Any, clock: Clock) -> None:
    model.enable_cache(
        hooks.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            cross_attention_block_skip_range=3,
            spatial_attention_timestep_skip_range=(100, 900),
            current_timestep_callback=lambda: clock.now,
        )
    )


def mag(model: Any, _: Clock) -> None:
    ratios = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0]
    model.enable_cache(
        hooks.MagCacheConfig(
            num_inference_steps=STEPS, mag_ratios=ratios, threshold=0.05, retention_ratio=0.0
        )
    )


def taylor(*, lite: bool = False) -> Apply:
    return lambda model, _: model.enable_cache(
        hooks.TaylorSeerCacheConfig(
            cache_interval=2,
            disable_cache_before_step=2,
            taylor_factors_dtype=torch.float32,
            cache_identifiers=None if lite else [r".*blocks\.\d+\.attn1?"],
            use_lite_mode=lite,
        )
    )


def faster(name: str) -> Apply:
    """With approximated guidance where the model's output is [batch, …, rows, columns]."""
    return lambda model, clock: model.enable_cache(
        hooks.FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 900),
            unconditional_batch_skip_range=3,
            unconditional_batch_timestep_skip_range=(-1, 900),
            current_timestep_callback=lambda: clock.now,
            attention_weight_callback=lambda _: 0.3,
            tensor_format="BCFHW" if name == "wan" else "BFCHW",
            is_guidance_distilled=name not in ("wan", "cogvideox-rotary"),
        )
    )


class Decisions(NamedTuple):
    """What first-block caching compares with its threshold in each step after the first."""

    whole: list[float]
    ranks: list[list[float]]
    """What each rank would compare by its own tokens."""


def decisions(name: str, ranks: int, threshold: float) -> Decisions:
    model, clock = ZOO[name].make(torch.float32), Clock()
    first_block(threshold)(model, clock)
    head = next(each.hook for each in cache_hooks(model.modules()) if each.kind == "FBCHeadBlockHook")
    plain, seen = head._should_compute_remaining_blocks, Decisions([], [])

    def record(now: Tensor) -> bool:
        before = head.state_manager.get_state().head_block_residual
        if before is not None:
            spans = [(0, now.shape[1]), *split_evenly(now.shape[1], ranks)]
            whole, *own = (_ratio(now[:, a:b].double(), before[:, a:b].double()) for a, b in spans)
            seen.whole.append(whole)
            seen.ranks.append(own)
        return plain(now)

    head._should_compute_remaining_blocks = record
    steps(model, name, clock)
    return seen


def _ratio(now: Tensor, before: Tensor) -> float:
    return ((now - before).abs().mean() / before.abs().mean()).item()


def divisive_threshold(name: str, ranks: int) -> float:
    """A threshold by which some rank alone would decide otherwise than all together, in the second step."""
    seen = decisions(name, ranks, 0.0)
    whole = seen.whole[0]
    return (whole + max(seen.ranks[0], key=lambda own: abs(own - whole))) / 2


def blocks(threshold: float) -> Apply:
    """cache-dit: as first-block caching, after a step of warm-up."""

    def apply(model: Any, _: Clock) -> None:
        import cache_dit

        config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=1,
            Bn_compute_blocks=0,
            residual_diff_threshold=threshold,
            max_warmup_steps=1,
            enable_separate_cfg=False,
            num_inference_steps=STEPS,
        )
        cache_dit.enable_cache(model, cache_config=config)

    return apply
