"""Every way to say which ranks take part."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.jobs import Answer, Worlds, attend, check, problem, tiles_with_empty_rows
from tests.run.dense import Truth
from tests.worlds import SIZES
from weft.core.mesh import Mesh
from weft.run.world import axes_of, world_of

MASK = tiles_with_empty_rows(4, 37, 37, 4)
RING_AND_ULYSSES = (("ring", 2), ("ulysses", 2))


def on_a_device_mesh(truth: Truth, axes: tuple[tuple[str, int], ...]) -> tuple[Answer, str | None]:
    names, sizes = zip(*axes, strict=True)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return attend(truth, {"mesh": mesh, "mask": truth.mask}), axes_of(mesh)


def in_the_default_group(truth: Truth) -> Answer:
    return attend(truth, {"mesh": dist.group.WORLD, "mask": truth.mask})


def in_groups_of_two(truths: list[Truth], options: dict[str, Any]) -> tuple[Answer, int]:
    """Ranks 0 and 1 attend over one sequence while 2 and 3 attend over another."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    pair, rank = divmod(dist.get_rank(), 2)
    mesh, before = groups[pair], world_of(None, 60.0).comm.bytes_sent
    for _ in range(3):
        answer = attend(truths[pair], {"mesh": mesh, **options}, rank)
    return answer, world_of(None, 60.0).comm.bytes_sent - before


def on_an_axis(truths: list[Truth]) -> Answer:
    """The columns of a 2 × 2 mesh attend, each over a sequence of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "data"))
    rank, column = divmod(dist.get_rank(), 2)
    return attend(truths[column], {"mesh": mesh["sequence"]}, rank)


@pytest.mark.parametrize("size", SIZES)
def test_a_device_mesh_of_one_axis_is_its_ranks(worlds: Worlds, size: int) -> None:
    truth = Truth.of(problem(size, 37, heads=4), MASK)
    answers, asked = zip(*worlds(size).run(on_a_device_mesh, truth, (("anything", size),)), strict=True)
    check(truth, list(answers), 5e-6)
    assert set(asked) == {None}


def test_a_device_mesh_with_ring_and_ulysses_asks_for_that_usp(worlds: Worlds) -> None:
    truth = Truth.of(problem(4, 37, heads=4), MASK)
    answers, asked = zip(*worlds(4).run(on_a_device_mesh, truth, RING_AND_ULYSSES), strict=True)
    check(truth, list(answers), 5e-6)
    assert set(asked) == {"usp:2x2"}


def test_a_device_mesh_with_names_of_its_own_asks_for_nothing(worlds: Worlds) -> None:
    truth = Truth.of(problem(4, 37, heads=4), MASK)
    answers, asked = zip(*worlds(4).run(on_a_device_mesh, truth, (("node", 2), ("gpu", 2))), strict=True)
    check(truth, list(answers), 5e-6)
    assert set(asked) == {None}


@pytest.mark.parametrize("mesh", [Mesh(RING_AND_ULYSSES), Mesh.of(ring=4), Mesh.of(ulysses=4), Mesh.of(x=4)])
def test_a_mesh_of_weft_serves(worlds: Worlds, mesh: Mesh) -> None:
    truth = Truth.of(problem(4, 37, heads=4), MASK)
    check(truth, worlds(4).run(attend, truth, {"mesh": mesh, "mask": MASK}), 5e-6)


def test_the_default_group_may_be_given(worlds: Worlds) -> None:
    truth = Truth.of(problem(3, 37, heads=4), MASK)
    check(truth, worlds(3).run(in_the_default_group, truth), 5e-6)


@pytest.mark.parametrize("plan", ["auto", "ulysses", "ring", "gather"])
def test_two_groups_attend_at_once_and_know_nothing_of_each_other(worlds: Worlds, plan: str) -> None:
    truths = [Truth.of(problem(2, tokens, heads=heads)) for tokens, heads in ((13, 3), (29, 2))]
    answers, others = zip(*worlds(4).run(in_groups_of_two, truths, {"plan": plan}), strict=True)
    check(truths[0], list(answers[:2]), 5e-6)
    check(truths[1], list(answers[2:]), 5e-6)
    assert set(others) == {0}


def test_an_axis_of_a_device_mesh_is_a_group(worlds: Worlds) -> None:
    truths = [Truth.of(problem(2, tokens)) for tokens in (13, 29)]
    answers = worlds(4).run(on_an_axis, truths)
    check(truths[0], [answers[0], answers[2]], 5e-6)
    check(truths[1], [answers[1], answers[3]], 5e-6)
