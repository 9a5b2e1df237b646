"""Exchanges between all ranks of a group as one collective: the same results, the same bytes, fewer calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import weft
from tests.cases import random_case
from tests.distributed.jobs import attend, check, problem
from tests.distributed.test_switch import GRID, there_and_back
from tests.run.dense import Truth
from weft.run.comm.group import GroupComm
from weft.run.spawn.pool import Pool
from weft.run.world import world_of


@pytest.fixture(scope="module", params=[2, 3, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(request.param, threads=1, timeout=20.0, limit=60.0, transport="group") as pool:
        yield pool


def counted(job: Any, *args: Any) -> tuple[Any, int, int]:
    """What a job answers, and the collectives and messages that its transport was asked for."""
    comm = world_of(None, 60.0).comm
    assert isinstance(comm, GroupComm)
    calls = {"all_to_all": 0, "post": 0}

    def counting(name: str) -> Any:
        plain = getattr(GroupComm, name)

        def call(*given: Any, **more: Any) -> Any:
            calls[name] += 1
            return plain(comm, *given, **more)

        return call

    for name in calls:
        setattr(comm, name, counting(name))
    try:
        answer = job(*args)
    finally:
        for name in calls:
            delattr(comm, name)
    return answer, calls["all_to_all"], calls["post"]


def switched() -> bool:
    shape = list(GRID.values())
    x = torch.arange(float(np.prod(shape))).view(shape)
    mine = x.tensor_split(dist.get_world_size(), 1)[dist.get_rank()]
    out = weft.switch(mine, "time", "space", dims=GRID)
    return torch.equal(out, x.tensor_split(dist.get_world_size(), 2)[dist.get_rank()])


def test_a_switch_is_one_collective(pool: Pool) -> None:
    assert pool.run(counted, switched) == [(True, 1, 0)] * pool.size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_switches_that_overtake_each_other_are_right(pool: Pool, dtype: torch.dtype) -> None:
    assert all(right for right, _ in pool.run(there_and_back, dtype))


def test_ulysses_is_two_collectives_forward(pool: Pool) -> None:
    truth = Truth.of(problem(pool.size, 23, heads=2 * pool.size))
    answers = pool.run(counted, attend, truth, {"plan": "ulysses"})
    check(truth, [answer for answer, _, _ in answers], 5e-6)
    # Forward: scatter and return. Backward: output gradients, gradients of keys home, and those of queries.
    assert {(collectives, posts) for _, collectives, posts in answers} == {(5, 0)}


def test_random_attentions_are_right(pool: Pool) -> None:
    rng = np.random.default_rng(7)
    for _ in range(12):
        case = random_case(rng, 90, max_ranks=pool.size, dtype="float32")
        if case.problem.ranks != pool.size:
            continue
        truth = Truth.of(case.problem, case.mask)
        check(truth, pool.run(attend, truth, {"plan": case.schedule}), 1e-5)
