"""The proof of a first forward, and what an attention that fails leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.diffusers.test_refusals import TOY, N, Toy
from tests.diffusers.toys import normal, on_ranks, seeded
from weft.core.errors import CommError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.diffusers.region import ShardedRegion
from weft.diffusers.sampled_check import SampledCheck
from weft.run.world import World
from weft.sparse.context import AttentionContext


def test_what_was_found_wrong_is_found_wrong_again() -> None:
    """A caller that caught the error and goes on is not told that all is well."""
    q, k, v = (normal(1, 2, 6, 4, seed=seed) for seed in (1, 2, 3))
    layout = Layout.even(6, 1)

    def job(world: World) -> SampledCheck:
        proof = SampledCheck()
        for _ in range(2):
            with pytest.raises(CommError, match=r"attn: rows of rank 0 differ"):
                proof.check("attn", (q, k, v), torch.zeros_like(q), None, None, layout, world)
        return proof

    (proof,) = on_ranks(1, job)
    assert not proof.errors
    assert str(proof).startswith("0 attentions checked")


def test_a_method_that_fails_leaves_no_tokens_behind() -> None:
    seen: list[Any] = []

    class Fails:
        def mask(self, ctx: AttentionContext, *_: Tensor) -> BlockMask:
            seen.append(ctx.hidden)
            raise RuntimeError("oops")

    def job(world: World) -> None:
        model = seeded(Toy())
        region = ShardedRegion(model, replace(TOY, grid=lambda *_: (1, 1, N)), sparsity=Fails())
        with pytest.raises(RuntimeError, match="oops"):
            region.run(world, (normal(1, N, 4),), {})
        site: Any = vars(model.attn)["_weft_wrapper"].inner
        assert site.hidden is None

    on_ranks(1, job)
    assert seen[0].shape == (1, N, 4)
