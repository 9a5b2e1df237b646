"""Arguments, caches and plans that cannot be split are refused by name, before anything wrong is computed."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")
from diffusers import hooks  # noqa: E402

import weft  # noqa: E402
from tests.diffusers.toys import normal, on_ranks  # noqa: E402
from tests.diffusers.zoo import ZOO  # noqa: E402
from weft.core.errors import InputError  # noqa: E402
from weft.core.layout import Layout  # noqa: E402
from weft.core.mask import BlockMask  # noqa: E402
from weft.core.problem import Problem  # noqa: E402
from weft.diffusers.adapters import ADAPTERS  # noqa: E402
from weft.diffusers.checks import check_plan  # noqa: E402
from weft.diffusers.guidance import Guidance, Halves  # noqa: E402
from weft.plan.choose import build  # noqa: E402
from weft.train.dsv import DSV  # noqa: E402
from weft.train.recipe import SparseConfig  # noqa: E402

Change = Callable[[Any], Any]


def run(
    name: str, ranks: int = 2, *, before: Change | None = None, after: Change | None = None, **how: Any
) -> Any:
    """The outputs of two calls on all ranks, by a model that is changed before or after `parallelize`."""
    given = how.pop("given", {})

    def job(world: Any) -> Tensor:
        model = ZOO[name].make()
        if before:
            before(model)
        weft.parallelize(model, mesh=world, **{"cfg": "off", **how})
        if after:
            after(model)
        with torch.no_grad():
            model(**ZOO[name].inputs(), **given)
            return model(**ZOO[name].inputs(), **given)[0]

    return on_ranks(ranks, job)


REFUSED = {
    "zimage": {"siglip_feats": [[normal(2, 4, 36)]]},
    "flux2": {"kv_cache_mode": "extract", "num_ref_tokens": 3},
    "ltx2": {"spatio_temporal_guidance_blocks": [0]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_are_not_cut_are_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=f"called with ({'|'.join(REFUSED[name])}), which weft cannot split"):
        run(name, given=REFUSED[name])


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ltx2", {"spatio_temporal_guidance_blocks": None}),
        ("flux2", {"kv_cache": None, "kv_cache_mode": None, "num_ref_tokens": 0, "ref_fixed_timestep": 0.0}),
    ],
)
def test_defaults_may_be_given(name: str, given: dict[str, Any]) -> None:
    run(name, given=given)


def test_every_argument_of_the_models_is_known() -> None:
    """What a new release of Diffusers adds is looked at before it is let through."""
    left: dict[str, set[str]] = {}
    for name, adapter in ADAPTERS.items():
        kind = getattr(diffusers, name, None)
        if kind is None or not adapter.attention:
            continue
        plan = getattr(kind, "_cp_plan", None) or {}
        assert adapter.replicated is not None
        known = {"self", *adapter.replicated, *adapter.inputs.get("", {}), *plan.get("", {})}
        if unknown := set(signature(kind.forward).parameters) - known:
            left[name] = unknown
    assert left == {
        "Flux2Transformer2DModel": {"kv_cache", "kv_cache_mode", "num_ref_tokens", "ref_fixed_timestep"},
        "GlmImageTransformer2DModel": {"kv_caches"},
        "Kandinsky5Transformer3DModel": {"sparse_params"},
        "LTX2VideoTransformer3DModel": {
            "perturbation_mask",
            "spatio_temporal_guidance_blocks",
            "video_self_attention_mask",
        },
        "StableAudio3DiTModel": {"local_add_cond"},
        "ZImageTransformer2DModel": {"image_noise_mask", "siglip_feats"},
    }


def test_an_argument_of_a_subclass_is_let_through() -> None:
    class Scaled(diffusers.WanTransformer3DModel):
        def forward(self, *args: Any, scale: float = 1.0, **kwargs: Any) -> Any:
            out, *rest = super().forward(*args, **kwargs)
            return (out * scale, *rest)

    plain, doubled = (
        run("wan", before=lambda m: setattr(m, "__class__", Scaled), given={"scale": scale})[0]
        for scale in (1.0, 2.0)
    )
    torch.testing.assert_close(doubled, plain * 2)


def sea(model: Any) -> None:
    model.enable_cache(hooks.SeaCacheConfig())


def own_cache(model: Any) -> None:
    """A cache of the user's own, with another measure of change."""

    class Largest(hooks.first_block_cache.FBCHeadBlockHook):
        def _should_compute_remaining_blocks(self, hidden_states_residual: Tensor) -> bool:
            return bool(hidden_states_residual.abs().max() > 1)

    registry = hooks.HookRegistry.check_if_exists_or_initialize(model.transformer_blocks[0])
    registry.register_hook(
        Largest(hooks.hooks.StateManager(hooks.first_block_cache.FBCSharedBlockState), 0.1), "own"
    )


REFUSED_CACHES: dict[str, tuple[str, Change, str]] = {
    "sea": ("wan", sea, r"A SeaCacheRootHook is on a WanTrans.* frequencies .* disable_cache\(\)"),
    "own": ("flux", own_cache, r"A Largest is on a FluxTransformerBlock: .* not known .*remove_hook\('own'"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", REFUSED_CACHES)
def test_caches_that_mix_tokens_are_refused_by_name(name: str, when: str) -> None:
    """By weft: not by time-out, when ranks have decided differently."""
    model, change, words = REFUSED_CACHES[name]
    with pytest.raises(InputError, match=f"(?s){words}"):
        run(model, **{when: change})


def test_cache_dit_on_a_parallelized_model_is_refused() -> None:
    cache_dit = pytest.importorskip("cache_dit")
    with pytest.raises(InputError, match=r"(?s)enabled on a parallelized Wan.* before weft.parallelize"):
        run("wan", after=cache_dit.enable_cache)


def test_cache_dit_that_fits_over_tokens_is_refused() -> None:
    cache_dit = pytest.importorskip("cache_dit")
    config = cache_dit.DMDCalibratorConfig()
    with pytest.raises(InputError, match=r"(?s)CachedContextManager with DMD.* TaylorSeerCalibratorConfig"):
        run("wan", before=lambda model: cache_dit.enable_cache(model, calibrator_config=config))


def test_what_the_sentence_says_takes_a_cache_off() -> None:
    def off(model: Any) -> None:
        own_cache(model)
        registry = hooks.HookRegistry.check_if_exists_or_initialize(model)
        registry.remove_hook("own", recurse=True)

    torch.testing.assert_close(run("flux", after=off)[0], run("flux")[0])


@pytest.mark.parametrize(
    ("ranks", "plan", "words"),
    [
        (1, "usp:4x1", r"usp:4x1 needs 4 ranks; there are 1\. Legal here: usp:1x1"),
        (2, "usp:4x1", r"usp:4x1 needs 4 ranks; there are 2\. Legal here: usp:1x2, usp:2x1"),
        (2, "ulysses=3", "no strategy 'ulysses=3'"),
        (2, "usp:3x1", r"usp:3x1 needs 3 ranks; there are 2\. Legal here: usp:1x2, usp:2x1"),
        (3, "usp:2x2+balanced", "needs 4 ranks; there are 3"),
        (2, ("ulysses", 2), "plan must be .* a tuple"),
        (3, "a schedule for 2", "The plan is for 2 ranks, this world has 3"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_by_parallelize(ranks: int, plan: Any, words: str) -> None:
    if plan == "a schedule for 2":
        tokens = Layout.even(8, 2)
        problem = Problem(batch=1, heads=3, kv_heads=3, head_dim=8, q=tokens, kv=tokens, dtype="float64")
        plan = build("ring", problem, BlockMask.dense(3, 8))

    with pytest.raises(InputError, match=words):
        on_ranks(ranks, lambda world: weft.parallelize(ZOO["wan"].make(), mesh=world, plan=plan))


def test_guidance_on_halves_that_a_plan_does_not_fit() -> None:
    def halves(plan: str, asked: str) -> bool:
        guidance = Guidance(nn.Identity(), None, Halves(0, None, None))
        check_plan(plan, 4, guidance, cfg=asked)
        return guidance.halves is not None

    assert halves("ulysses", "auto") and halves("ring+balanced", "on") and halves("usp:1x2", "on")
    assert not halves("usp:2x2", "auto"), "nobody asked for them"
    with pytest.raises(InputError, match="needs 4 ranks; there are 2"):
        halves("usp:2x2", "on")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"heads": 2}, r"heads=2, width=36, depth=2; blocks.0.attn1 has 3 heads of 12 .* heads=3, width=36"),
        ({"width": 24}, "heads=3, width=24, depth=2; .* width=36, depth=2"),
        ({"depth": 1}, "depth=1; .* one of 2 attention modules"),
        ({"depth": 3}, "depth=3; .* one of 2 attention modules"),
    ],
)
@pytest.mark.parametrize("source", ["qk", "hidden"])
def test_dsv_of_other_sizes_is_refused(sizes: dict[str, int], words: str, source: Any) -> None:
    def dsv() -> DSV:
        return DSV(
            SparseConfig(cube=(1, 2, 2), source=source, profile_every=1),
            **{"heads": 3, "width": 36, "depth": 2, **sizes},
        )

    def job(world: Any) -> None:
        model = weft.parallelize(ZOO["wan"].make().train(), mesh=world, sparse=dsv())
        model(**ZOO["wan"].inputs())

    with pytest.raises(InputError, match=words):
        on_ranks(2, job)
