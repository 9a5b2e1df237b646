"""What `weft.attention` refuses, on one rank: each refusal says what was given and what would work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.plan.choose import build

NAN, INF = float("nan"), float("inf")


def tensors(*shapes: tuple[int, ...], **kind: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(shape, **kind) for shape in shapes)


def q_k_v(q: tuple[int, ...] = (1, 3, 5, 4), k: tuple[int, ...] = (1, 3, 5, 4)) -> tuple[torch.Tensor, ...]:
    return tensors(q, k, k)


def schedule(**sizes: Any) -> Schedule:
    layout = Layout.even(sizes.pop("tokens", 5), sizes.pop("ranks", 1))
    rest = {"batch": 1, "heads": 3, "kv_heads": 3, "head_dim": 4, "q": layout, "kv": layout}
    problem = Problem(**(rest | sizes))
    return build("ring", problem, BlockMask.dense(problem.heads, layout.size))


BAD_TENSORS = {
    "three dims": (
        tensors((3, 5, 4), *[(1, 3, 5, 4)] * 2),
        r"q has shape \[3, 5, 4\].*\[batch, heads, local tokens",
    ),
    "five dims": (
        tensors(*[(1, 3, 5, 4)] * 2, (1, 1, 3, 5, 4)),
        r"v has shape \[1, 1, 3, 5, 4\].*\[batch, heads",
    ),
    "k is not v": (
        tensors(*[(1, 3, 5, 4)] * 2, (1, 3, 6, 4)),
        r"k has shape \[1, 3, 5, 4\], v \[1, 3, 6, 4\].*same",
    ),
    "batch": (q_k_v(k=(2, 3, 5, 4)), r"q \[1, 3, 5, 4\] and k \[2, 3, 5, 4\] differ in batch.*same"),
    "head_dim": (q_k_v(k=(1, 3, 5, 8)), r"k \[1, 3, 5, 8\] differ in batch or head_dim.*same"),
    "kv heads": (q_k_v(k=(1, 2, 5, 4)), r"3 query heads cannot share 2 key/value heads.*one of \[1, 3\]"),
    "no heads": (q_k_v(q=(1, 0, 5, 4), k=(1, 0, 5, 4)), r"heads must be ≥ 1, got 0"),
    "no batch": (q_k_v(q=(0, 3, 5, 4), k=(0, 3, 5, 4)), r"batch must be ≥ 1, got 0"),
    "dtypes": (
        (*tensors((1, 3, 5, 4)), *tensors(*[(1, 3, 5, 4)] * 2, dtype=torch.float64)),
        r"one dtype, got \['torch.float32', 'torch.float64', 'torch.float64'\].*Cast",
    ),
    "integers": (
        tensors(*[(1, 3, 5, 4)] * 3, dtype=torch.int32),
        r"int32.*float64, float32, bfloat16, float16",
    ),
    "complex": (tensors(*[(1, 3, 5, 4)] * 3, dtype=torch.complex64), r"complex64.*float64, float32"),
    "devices": (
        (*tensors(*[(1, 3, 5, 4)] * 2), *tensors((1, 3, 5, 4), device="meta")),
        r"one device, got \['cpu', 'cpu', 'meta'\]",
    ),
}

BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "mask's length": (
        {"mask": BlockMask.dense(3, 6), "tokens": 5, "kv_tokens": 5},
        r"3 heads, 6 × 6 tokens;.*3 heads, 5 × 5",
    ),
    "mask's heads": ({"mask": BlockMask.dense(2, 5)}, r"mask is for 2 heads.*have 3 heads.*whole sequence"),
    "rows": ({"mask": BlockMask.dense(3, 6)}, r"Rank 0's q have 5 tokens.*expects 6.*tokens="),
    "mask's type": ({"mask": torch.ones(5, 5)}, r"mask is a Tensor.*BlockMask.from_tiles"),
    "scale nan": ({"scale": NAN}, r"scale=nan.*1/√head_dim"),
    "scale inf": ({"scale": -INF}, r"scale=-inf.*1/√head_dim"),
    "scale's type": ({"scale": "big"}, r"scale='big'.*1/√head_dim"),
    "plan": ({"plan": "ulises"}, r"'ulises'.*auto, ring, ulysses, gather, zigzag, usp:UxR"),
    "plan's type": ({"plan": None}, r"plan=None.*strategy's name, a Plan or a Schedule"),
    "usp": ({"plan": "usp:2x3"}, r"usp:2x3 needs 6 ranks; there are 1.*Legal here: usp:1x1"),
    "usp of nothing": ({"plan": "usp:0x0"}, r"usp:0x0.*Legal here: usp:1x1"),
    "backend": ({"backend": "flash9"}, r"backend='flash9'.*auto, exact, flash, cudnn, fa4, .*reference"),
    "tokens": ({"tokens": 7}, r"Rank 0's q have 5 tokens; tokens 7 over 1 ranks.*expects 7.*Layout"),
    "kv_tokens": ({"tokens": 5, "kv_tokens": 7}, r"k and v have 5 tokens.*expects 7"),
    "tokens 0": ({"tokens": 0}, r"tokens must be an integer > 0 or a Layout, got 0.*length of the whole"),
    "tokens' type": ({"tokens": "5"}, r"tokens must be .* got '5'.*length of the whole"),
    "kv_tokens' type": (
        {"tokens": 5, "kv_tokens": "5"},
        r"kv_tokens must be .* got '5'.*length of the whole",
    ),
    "layout's ranks": ({"tokens": Layout.even(5, 2)}, r"layout is for 2 ranks, this world has 1"),
    "long prefix": (
        {"prefix": 4, "suffix": 2},
        r"prefix=4 and suffix=2 are more than rank 0's 5 rows.*part of",
    ),
    "long prefix of a length": ({"prefix": 6, "tokens": 5}, r"prefix=6 and suffix=0 do not fit into 5"),
    "negative prefix": ({"prefix": -1, "tokens": 5}, r"prefix must be an integer >= 0, got -1"),
    "timeout 0": ({"timeout": 0}, r"timeout must be > 0, got 0"),
    "timeout nan": ({"timeout": NAN}, r"timeout must be > 0, got nan"),
    "timeout's type": ({"timeout": None}, r"timeout must be > 0, got None"),
    "mesh's type": ({"mesh": "cpu"}, r"mesh='cpu' is a str.*DeviceMesh, a process group"),
    "mesh's order": ({"mesh": Mesh.of(ulysses=2, ring=2)}, r"4 ranks, this world has 1"),
    "mesh of ring and ulysses": ({"mesh": Mesh.of(ring=2, ulysses=2)}, r"4 ranks, this world has 1"),
    "plan's ranks": ({"plan": schedule(ranks=2)}, r"plan is for 2 ranks, this world has 1"),
    "plan's sizes": ({"plan": schedule(head_dim=8)}, r"plan is for .*8, 'float32'.*have .*4, 'float32'"),
    "plan's dtype": ({"plan": schedule(dtype="float64")}, r"'float64'\), the tensors have .*'float32'\)"),
    "plan's tokens": ({"plan": schedule(tokens=7)}, r"Rank 0's q have 5 tokens.*expects 7"),
    "plan's mask": (
        {"plan": schedule(), "mask": BlockMask.dense(3, 5, block=2)},
        r"plan was made for another mask.*Leave mask out",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_break_a_rule_are_refused(case: str) -> None:
    given, said = BAD_TENSORS[case]
    with pytest.raises(InputError, match=said):
        weft.attention(*given)


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options_that_break_a_rule_are_refused(case: str) -> None:
    given, said = BAD_OPTIONS[case]
    with pytest.raises(InputError, match=said):
        weft.attention(*q_k_v(), **given)


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_what_is_refused_once_is_refused_again(case: str) -> None:
    for _ in range(2):
        with pytest.raises(InputError):
            weft.attention(*q_k_v(), **BAD_OPTIONS[case][0])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mask": np.ones((5, 5), dtype=bool)}, "mask is a ndarray.*BlockMask.from_tiles"),
        ({"tokens": [5]}, r"tokens must be .* Layout, got \[5\]"),
        ({"prefix": "two"}, "prefix must be an integer >= 0, got 'two'"),
    ],
    ids=["mask", "tokens", "prefix"],
)
def test_options_that_cannot_be_hashed_or_counted_are_refused_too(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        weft.attention(*q_k_v(), **given)


@pytest.mark.parametrize(("rows", "said"), [((0, 0), "0 × 0 tokens"), ((5, 0), "5 × 0 tokens")])
def test_sequences_of_no_tokens_are_refused(rows: tuple[int, int], said: str) -> None:
    q, k = ((1, 3, count, 4) for count in rows)
    with pytest.raises(InputError, match=said):
        weft.attention(*q_k_v(q, k))


def test_a_negative_prefix_is_named_also_where_rows_are_counted() -> None:
    with pytest.raises(InputError, match="prefix must be an integer >= 0, got -1"):
        weft.attention(*q_k_v(), prefix=-1)


@pytest.mark.parametrize("options", [{"mesh": Mesh.of(x=4)}, {"mesh": Mesh.of(ring=4), "plan": "ring"}])
def test_a_mesh_of_more_ranks_than_there_are_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="4 ranks.*1"):
        weft.attention(*q_k_v(), **options)


def test_a_schedule_that_leaves_tiles_out_is_refused() -> None:
    whole = schedule()
    hollow = Schedule(whole.name, whole.problem, whole.mask, whole.mesh, ())
    with pytest.raises(weft.WeftError, match="never computed"):
        weft.attention(*q_k_v(), plan=hollow)
