"""Whole attentions by the Triton kernels, in the interpreter, with threads as ranks: against float64.

Strategies, masks, layouts and head dims are crossed: each with each in `make soak`, each pair in `make test`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor

from tests.adversary import run_adversary
from tests.cases import machines
from tests.run.dense import Truth
from tests.run.interpreted import OneAtATime, failures, report
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.plan.choose import build
from weft.run.execute import Executor

TOLERANCE = {"float32": 1e-5, "float16": 5e-3}
STRATEGIES = {"usp:2x2": (4, 2, 2), "ring": (3, 2, 1), "ulysses+balanced": (2, 3, 3), "torus:2x2": (4, 2, 2)}
"""Ranks, heads, and heads of keys and values."""
MASKS = {"dense": (0, 0), "sparse": (64, 64), "empty rows": (64, 64), "small blocks": (32, 16)}
LAYOUTS = ("even", "ragged", "prefix")
HEAD_DIMS = (64, 72, 96, 128)
OPERANDS = (("sm_90", "float32"), ("sm_80", "float32"), ("sm_90", "float16"))
"""Read by tensor-memory descriptors on sm_90, by pointers on sm_80."""


class Case(NamedTuple):
    strategy: str
    mask: str
    layout: str
    head_dim: int
    operands: tuple[str, str]

    def __str__(self) -> str:
        return " · ".join(map(str, (*self[:-1], *self.operands)))


EVERY = [Case(*each) for each in product(STRATEGIES, MASKS, LAYOUTS, HEAD_DIMS, OPERANDS)]


def sample(cases: list[Case]) -> Iterator[Case]:
    """Few cases in which each pair of values occurs, by greed."""

    def pairs(case: Case) -> set[Any]:
        return set(combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, cases))
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        yield best


def layout_of(kind: str, ranks: int) -> Layout:
    if kind == "prefix":
        return Layout.even(150, ranks, prefix=20)
    if kind == "ragged":  # and the last rank has nothing
        return Layout.uneven([70, *[41] * (ranks - 2), 0] if ranks > 2 else [133, 0])
    return Layout.even(128, ranks)


def mask_of(kind: str, heads: int, tokens: int) -> BlockMask:
    block_q, block_k = MASKS[kind]
    if not block_q:
        return BlockMask.dense(heads, tokens)
    tiles = np.random.default_rng(2).random((heads, -(-tokens // block_q), -(-tokens // block_k))) < 0.6
    tiles[:, :, 0] = True
    if kind == "empty rows":
        tiles[0, 0], tiles[-1, :, -1] = False, False
    return BlockMask.from_tiles(tiles, q_len=tokens, kv_len=tokens, block_q=block_q, block_k=block_k)


def equals_float64(case: Case) -> None:
    """Forward and backward of all ranks."""
    ranks, heads, kv_heads = STRATEGIES[case.strategy]
    layout, (target, dtype) = layout_of(case.layout, ranks), case.operands
    problem = Problem(
        batch=1, heads=heads, kv_heads=kv_heads, head_dim=case.head_dim, q=layout, kv=layout, dtype=dtype
    )
    mask = mask_of(case.mask, heads, layout.size)
    truth = Truth.of(problem, mask, scale=case.head_dim**-0.5)
    schedule = build(case.strategy, problem, mask, machines(ranks))
    kernel = OneAtATime(interpreted_as=target)

    def job(comm: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        executor, inputs = Executor(schedule, comm, kernel), truth.inputs(comm.rank)
        out, saved = executor.forward(*inputs, truth.scale, keep=True)
        return out, executor.backward(truth.slope(comm.rank), inputs, out, saved, truth.scale)

    results = run_adversary(ranks, job)
    assert truth.output_error([out for out, _ in results]) <= TOLERANCE[dtype]
    assert truth.gradient_error([grads for _, grads in results]) <= TOLERANCE[dtype] * truth.size


def named(cases: list[Case]) -> dict[str, Any]:
    return {str(case): partial(equals_float64, case) for case in cases}


SAMPLE = list(named(list(sample(EVERY))))
REST = [name for name in named(EVERY) if name not in SAMPLE]


@pytest.fixture(scope="module")
def failed() -> dict[str, str]:
    return failures("tests.run.test_triton_executor", SAMPLE)


@pytest.fixture(scope="module")
def failed_of_rest() -> dict[str, str]:
    return failures("tests.run.test_triton_executor", REST, timeout=3600)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SAMPLE)
def test_executor_equals_float64(failed: dict[str, str], name: str) -> None:
    assert name not in failed, failed[name]


@pytest.mark.soak
@pytest.mark.parametrize("name", REST)
def test_executor_equals_float64_in_every_case(failed_of_rest: dict[str, str], name: str) -> None:
    assert name not in failed_of_rest, failed_of_rest[name]


if __name__ == "__main__":
    report(named(EVERY))
