"""Every rank agrees or nobody moves: a rank that asks for something else stops all, by name."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.distributed.jobs import Worlds, tiles_with_empty_rows, works
from tests.worlds import SIZES
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.run.spawn.pool import CallFailure, Pool, RankFailure

ODD = 1
MASK, OTHER_MASK = (tiles_with_empty_rows(3, 15, 15, block) for block in (4, 5))
SHUFFLED = Layout.permuted([[4, 3, 2, 1, 0], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
Sizes = dict[str, Any]

DIFFERENCES: dict[str, tuple[Sizes, Sizes, str]] = {
    "mask": ({"mask": MASK}, {"mask": OTHER_MASK}, "rank 1 has mask BlockMask(3 heads, 15×15 tokens, "),
    "scale": ({}, {"scale": 0.25}, "rank 1 has scale 0.25, the others None"),
    "dtype": ({}, {"dtype": torch.float64}, "rank 1 has dtype float64, the others float32"),
    "plan": ({"plan": "ulysses"}, {"plan": "ring"}, "rank 1 has strategy ring"),
    "heads": ({}, {"heads": 6}, "rank 1 has heads 6/6, the others 3/3"),
    "kv heads": ({}, {"kv_heads": 1}, "rank 1 has heads 3/1, the others 3/3"),
    "head_dim": ({}, {"head_dim": 8}, "rank 1 has head_dim 8, the others 4"),
    "batch": ({}, {"batch": 2}, "rank 1 has batch 2, the others 1"),
    "tokens": ({"tokens": 15}, {"tokens": 16}, "rank 1 has tokens 16×16, the others 15×15"),
    "layout": ({"tokens": 15}, {"tokens": SHUFFLED}, "rank 1 has layout tokens 15 over 3 ranks: 4-4,3-3,2-2"),
    "backend": (
        {"backend": "exact"},
        {"backend": "reference"},
        "rank 1 has kernel reference, the others exact",
    ),
}

REFUSALS: dict[str, tuple[Sizes, str]] = {
    "rows": ({"rows": 6}, "Rank 1's q have 6 tokens"),
    "integers": ({"dtype": torch.int64}, "q, k, v are int64"),
    "kv heads": ({"kv_heads": 2}, "3 query heads cannot share 2 key/value heads"),
    "scale": ({"scale": float("inf")}, "scale=inf"),
    "plan": ({"plan": "ulises"}, "There is no strategy 'ulises'"),
    "usp": ({"plan": "usp:2x2"}, "usp:2x2 needs 4 ranks; there are 3"),
    "backend": ({"backend": "flash9"}, "backend='flash9' is unknown"),
    "mask's heads": ({"mask": BlockMask.dense(4, 15)}, "mask is for 4 heads"),
    "prefix": ({"prefix": 16}, "prefix=16 and suffix=0 do not fit"),
}


def call(common: Sizes, odd: Sizes, times: int = 1) -> None:
    """The same call on every rank but one."""
    sizes = {"batch": 1, "heads": 3, "rows": 5, "head_dim": 4, "dtype": torch.float32, "timeout": 10.0}
    sizes |= common | (odd if dist.get_rank() == ODD else {})
    batch, heads, rows, head_dim, dtype = (
        sizes.pop(name) for name in ("batch", "heads", "rows", "head_dim", "dtype")
    )
    kv_heads = sizes.pop("kv_heads", heads)
    q, k, v = (torch.zeros(batch, h, rows, head_dim, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    for _ in range(times):
        weft.attention(q, k, v, **sizes)


def failures(pool: Pool, *args: Any) -> dict[int, CallFailure]:
    with pytest.raises(RankFailure) as caught:
        pool.run(call, *args)
    return caught.value.failures


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_rank_that_differs_is_named_on_every_rank(worlds: Worlds, difference: str) -> None:
    pool = worlds(3)
    before = pool.run(works) and pool.pids
    common, odd, said = DIFFERENCES[difference]
    found = failures(pool, common, odd)
    assert {rank: failure.kind for rank, failure in found.items()} == dict.fromkeys(
        range(3), "AgreementError"
    )
    assert all(said in failure.message for failure in found.values())
    assert pool.run(works) == [True] * 3
    assert pool.pids == before


@pytest.mark.parametrize("size", SIZES)
def test_worlds_of_any_size_disagree_alike(worlds: Worlds, size: int) -> None:
    found = failures(worlds(size), {}, {"scale": 0.25})
    assert sorted(found) == list(range(size))
    assert all("scale" in failure.message for failure in found.values())
    assert worlds(size).run(works) == [True] * size


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_rank_that_refuses_its_call_tells_the_others_why(worlds: Worlds, refusal: str) -> None:
    pool = worlds(3)
    before = pool.run(works) and pool.pids
    odd, said = REFUSALS[refusal]
    found = failures(pool, {"tokens": 15}, odd)
    assert {rank: failure.kind for rank, failure in found.items()} == {
        0: "AgreementError",
        1: "InputError",
        2: "AgreementError",
    }
    assert all(said in failure.message for failure in found.values())
    assert "Rank 1 cannot take part" in found[0].message
    assert pool.run(works) == [True] * 3
    assert pool.pids == before


def test_a_call_that_every_rank_refuses_is_an_input_error_everywhere(worlds: Worlds) -> None:
    found = failures(worlds(3), {"plan": "ulises"}, {})
    assert [failure.kind for failure in found.values()] == ["InputError"] * 3
    assert worlds(3).run(works) == [True] * 3


def test_a_plan_that_was_refused_once_can_be_agreed_on_later(worlds: Worlds) -> None:
    failures(worlds(3), {"plan": "ring"}, {"plan": "ulysses"})
    worlds(3).run(call, {"plan": "ring"}, {})
    worlds(3).run(call, {"plan": "ulysses"}, {})


@pytest.mark.parametrize("odd", [{"tokens": 15}, {"mask": MASK}])
def test_only_one_rank_saying_the_length_is_a_difference_too(worlds: Worlds, odd: Sizes) -> None:
    found = failures(worlds(3), {}, odd)
    assert [failure.kind for failure in found.values()] == ["AgreementError"] * 3
    assert all("Ranks [0, 2] do not say how long" in failure.message for failure in found.values())
    assert worlds(3).run(works) == [True] * 3


KNOWN: dict[str, tuple[Sizes, Sizes, Sizes]] = {
    "mask": ({"plan": "ring"}, {"mask": MASK}, {"mask": OTHER_MASK}),
    "scale": ({"plan": "ulysses", "tokens": 15}, {"scale": 0.5}, {"scale": 0.25}),
    "strategy": ({"tokens": 15}, {"plan": "ulysses"}, {"plan": "ring"}),
}


@pytest.mark.parametrize("difference", KNOWN)
def test_known_calls_that_differ_are_named_at_once(worlds: Worlds, difference: str) -> None:
    # Calls are compared when they are new; later on, messages of two calls do not meet.
    assert worlds(3).run(works) == [True] * 3  # new ranks first load what they need
    common, usual, odd = KNOWN[difference]
    common = common | {"timeout": 50.0 + len(difference)}  # longer than the test may take, and a new world
    for each in (usual, odd):
        worlds(3).run(call, common | each, {})
    found = failures(worlds(3), common | usual, odd)
    assert [failure.kind for failure in found.values()] == ["CommError"] * 3
    assert all(f"rank 1 has {difference} " in failure.message for failure in found.values())


def test_a_new_plan_of_one_rank_stops_the_others_in_their_known_one(worlds: Worlds) -> None:
    assert worlds(3).run(works) == [True] * 3  # new ranks first load what they need
    common = {"plan": "ulysses", "mask": MASK, "timeout": 5.0}
    worlds(3).run(call, common, {})
    found = failures(worlds(3), common, {"mask": OTHER_MASK})
    assert [failure.kind for failure in found.values()] == ["CommError"] * 3
    assert "waited for all 3 ranks to agree on a plan" in found[ODD].message
    assert all("rank 1 has program not agreed on yet" in failure.message for failure in found.values())


def test_an_option_of_no_known_type_stops_all_ranks(worlds: Worlds) -> None:
    found = failures(worlds(3), {"tokens": 15}, {"tokens": [15]})
    assert {rank: failure.kind for rank, failure in found.items()} == {
        0: "AgreementError",
        1: "InputError",
        2: "AgreementError",
    }


def test_a_time_out_may_be_endless(worlds: Worlds) -> None:
    worlds(2).run(call, {"timeout": float("inf")}, {})


def with_a_transport_of_its_own() -> None:
    if dist.get_rank() == ODD:
        os.environ["WEFT_TRANSPORT"] = "group"
    try:
        weft.attention(*torch.zeros(3, 1, 3, 5, 4), tokens=15, timeout=9.0)  # a new time-out is a new world
    finally:
        if dist.get_rank() == ODD:
            del os.environ["WEFT_TRANSPORT"]


def test_a_rank_with_another_transport_is_named(worlds: Worlds) -> None:
    with pytest.raises(RankFailure) as caught:
        worlds(3).run(with_a_transport_of_its_own)
    found = caught.value.failures
    assert sorted(found) == [0, 1, 2]
    assert all("rank 1 has transport group, the others shm" in one.message for one in found.values())


def known_over_the_group() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_TRANSPORT", "group")
        for scale in (0.5, 0.25, 0.25 if dist.get_rank() == ODD else 0.5):
            call({"plan": "ulysses", "tokens": 15, "scale": scale, "timeout": 8.0}, {})


def test_known_calls_that_differ_are_named_where_messages_have_no_tags(worlds: Worlds) -> None:
    with pytest.raises(RankFailure) as caught:
        worlds(3).run(known_over_the_group)
    assert sorted(caught.value.failures) == [0, 1, 2]
    said = "about to run different calls: rank 1 has scale 0.25, the others 0.5."
    assert all(said in failure.message for failure in caught.value.failures.values())
