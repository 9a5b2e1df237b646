"""Masks that leave out padded text: read once for each mask, never trusted without a look on the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import weft  # noqa: E402
from tests.diffusers.toys import on_ranks  # noqa: E402
from tests.diffusers.zoo import ZOO  # noqa: E402
from weft.diffusers import padding  # noqa: E402

MASK = "encoder_hidden_states_mask"


def shorter(mask: torch.Tensor) -> torch.Tensor:
    """One text token less in each sample."""
    last = mask.sum(1) - 1
    return mask.scatter(1, last[:, None], 0)


@pytest.mark.parametrize("change", ["none", "another tensor", "in place"])
def test_masks_are_read_again_only_when_they_change(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[tuple[int, str]] = Counter()
    kept = padding._unmasked_rows

    def counting(site: Any, mask: torch.Tensor, q: torch.Tensor) -> Any:
        reads[site.region.shards.world.comm.rank, site.name] += 1
        return kept(site, mask, q)

    monkeypatch.setattr(padding, "_unmasked_rows", counting)

    def steps(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = ZOO["qwen-padded"].inputs()
        inputs[MASK] = inputs[MASK].clone()
        with torch.no_grad():
            first = model(**inputs)[0]
            if change == "another tensor":
                inputs[MASK] = shorter(inputs[MASK])
            elif change == "in place":
                inputs[MASK].copy_(shorter(inputs[MASK]))
            return first, model(**inputs)[0]

    expected = steps(ZOO["qwen-padded"].make())
    for answer in on_ranks(2, lambda world: steps(weft.parallelize(ZOO["qwen-padded"].make(), mesh=world))):
        for one, other in zip(answer, expected, strict=True):
            assert (one - other).abs().max() < 1e-5
    assert set(reads.values()) == {1 if change == "none" else 2}


def test_a_mask_that_its_inputs_do_not_tell_of_is_found_out() -> None:
    """A model that makes another mask of the same inputs: no wrong attention, but an error."""

    def job(world: Any) -> str:
        model: Any = weft.parallelize(ZOO["qwen-padded"].make(), mesh=world)
        inputs = ZOO["qwen-padded"].inputs()
        with torch.no_grad():
            model(**inputs)
            hooks = [vars(module).get("_weft_wrapper") for module in model.modules()]
            site = next(hook.inner for hook in hooks if hasattr(getattr(hook, "inner", None), "padding"))
            known = site.padding
            site.padding = known._replace(mask=~known.mask)
            try:
                model(**inputs)
            except RuntimeError as error:
                return str(error)
        return ""

    assert all("has changed" in said for said in on_ranks(2, job))
