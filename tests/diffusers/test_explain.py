"""weft.explain: what ran by which plan, on the rank that plans and on the others."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

import weft
from tests.video.test_transformer import CONFIG, inputs, model
from tests.worlds import world
from weft.core.errors import InputError
from weft.plan.explanation import Explanation

STEPS = 4
TOPK = "topk:0.4,tile=1x3x1,block=4,dense_steps=0,refresh=1,recall=0"


def explained() -> tuple[str, dict[str, Any], str, float]:
    """Before and after a run whose masks change in every step, and the largest error of its outputs."""
    split = weft.parallelize(model(), sparse=TOPK, cfg="off")
    before, worst = str(weft.explain(split)), 0.0
    alone = weft.parallelize(model(), sparse=TOPK, cfg="off", mesh=_alone())
    for step in range(STEPS):
        video, times, words = inputs()
        given = video + step, times - 0.1 * step, words
        with torch.no_grad():
            worst = max(worst, float((split(*given) - alone(*given)).abs().max()))
        for one, _ in split._weft.worlds():
            one.planner.finish()
    found = weft.explain(split)
    weft.restore(split)
    return before, {**asdict(found), "gain": found.gain}, str(found), worst


def _alone() -> Any:
    from weft.run.world import LocalComm, World

    return World(LocalComm())


def test_layers_are_explained_after_a_run() -> None:
    (before, planned, told, worst), (_, other, _, _) = world(2).run(explained)
    assert before == "No attention has run yet."
    assert worst < 1e-10
    assert [layer["layer"] for layer in planned["layers"]] == list(range(CONFIG.depth))
    for mine, theirs in zip(planned["layers"], other["layers"], strict=True):
        assert mine["plan"] == theirs["plan"] and mine["changed"] == theirs["changed"]
        assert mine["imbalance"] >= 1 and mine["imbalance_static"] >= 1 and mine["gain"] > 0
        assert theirs["imbalance"] is None, "only rank 0 plans"
        assert mine["why"] in told and mine["plan"] in told
    assert planned["gain"] == pytest.approx(sum(x["gain"] for x in planned["layers"]) / CONFIG.depth)


def test_dense_attention_and_masks_that_stay_are_named_by_their_plan() -> None:
    own = weft.parallelize(model(), sparse="sta:window=1x1x1,tile=1x3x1,block=4,dense_steps=0", mesh=_alone())
    with torch.no_grad():
        own(*inputs())
    found = weft.explain(own)
    assert not found.layers and len(found.fixed) == 1 and found.gain is None
    assert str(found) == f"{found.fixed[0]}: dense attention, and masks that stay"
    assert str(Explanation((), ())) == "No attention has run yet."


def test_what_is_not_parallelized_is_refused() -> None:
    with pytest.raises(InputError, match="not parallelized"):
        weft.explain(model())
