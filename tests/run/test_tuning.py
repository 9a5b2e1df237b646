"""Configurations of the Triton kernels: measured by one rank, the same on all, and never waited for in vain.

Nothing is measured here: what a measurement says is made up, differently on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.jobs import Worlds, works
from weft.core.mask import BlockMask
from weft.masks.random import random_mask
from weft.run import attention
from weft.run.agree import count_rows
from weft.run.call import AttentionCall
from weft.run.kernels import tuning
from weft.run.kernels.composite import Composite
from weft.run.kernels.triton_attention import TritonAttention
from weft.run.kernels.triton_configs import configs
from weft.run.kernels.tuning import TuningKey, density_class, fastest, length_class
from weft.run.world import World, world_of

pytest.importorskip("triton")

CPU = torch.device("cpu")
EVEN, RAGGED, EMPTY = [(300, 300)] * 3, [(2000, 100), (400, 400), (33, 900)], [(300, 300), (0, 0), (40, 40)]
"""Rows of queries and of keys, by rank."""


@contextmanager
def made_up_gpu(*, can_measure: bool = True) -> Iterator[list[TuningKey]]:
    """Executors get Triton kernels on the CPU; yield the keys that this rank measures."""
    measured: list[TuningKey] = []

    def measure(key: TuningKey, config: Any, device: torch.device) -> tuple[float, tuple[torch.Tensor, ...]]:
        del device
        place = tuning.candidates(key).index(config)
        if not place:
            measured.append(key)
        # Each rank finds another configuration fastest.
        return float((place - dist.get_rank() - 1) % len(tuning.candidates(key))), (torch.ones(1),)

    kernel = TritonAttention()
    with ExitStack() as stack:
        stack.enter_context(patch.object(TritonAttention, "target", lambda *_: "sm_90"))
        stack.enter_context(patch.object(tuning, "_can_measure", lambda _: can_measure))
        stack.enter_context(patch.object(tuning, "measure", measure))
        stack.enter_context(
            patch.object(attention, "choose_kernel", lambda *_: Composite((kernel, kernel), (kernel, kernel)))
        )
        yield measured


def make_executor(world: World, rows: list[tuple[int, int]], plan: str, mask: BlockMask | None = None) -> Any:
    """Make the executor of a call, as `weft.attention` does; return the table that its kernel has."""
    q_rows, k_rows = rows[world.comm.rank]
    shapes = [(1, 6, n, 96) for n in (q_rows, k_rows, k_rows)]
    options = (mask, plan, None, None, 0, 0, "auto", None)
    call = AttentionCall(*shapes, (torch.bfloat16,) * 3, (CPU,) * 3, *options, None)
    counts = count_rows(world.comm, q_rows, k_rows) if mask is None else None
    executor = attention._new_executor(call, world, counts, None)
    return dict(executor.kernel.pair(sparse=mask is not None)[0].tuned)


def tune(
    rows: list[tuple[int, int]], plan: str, able: tuple[int, ...] = (0, 1, 2), times: int = 1
) -> tuple[dict[TuningKey, Any], list[TuningKey], int]:
    """Make executors; return the table, what this rank measured, and how often ranks met beyond agreeing."""
    tuning._tables.clear()
    tuning._measured.clear()
    world = world_of(None, 20.0)
    mask = random_mask(6, 900, 900, block=64, density=0.3) if plan == "usp:1x3" else None
    with (
        made_up_gpu(can_measure=dist.get_rank() in able) as measured,
        patch.object(tuning, "gather_text", wraps=tuning.gather_text) as meetings,
    ):
        for _ in range(times):
            table = make_executor(world, rows, plan, mask)
    return table, measured, meetings.call_count  # pyright: ignore[reportPossiblyUnboundVariable]


@pytest.mark.parametrize(
    ("rows", "plan"),
    [(EVEN, "ring"), (RAGGED, "ring"), (RAGGED, "ulysses"), (EMPTY, "ring"), (EVEN, "usp:1x3")],
)
def test_ranks_have_the_same_table_though_they_measure_differently(
    worlds: Worlds, rows: list[tuple[int, int]], plan: str
) -> None:
    results = worlds(3).run(tune, rows, plan)
    table = results[0][0]
    assert all(result[0] == table for result in results)
    measured = [key for result in results for key in result[1]]
    assert sorted(measured) == sorted(table), "each key is measured by one rank"
    assert {key.kernel for key in table} == {"forward", "grad_queries", "grad_keys"}
    assert sum(bool(result[1]) for result in results) > 1, "the work is spread"
    assert any(config != configs(*key[:5])[0] for key, config in table.items())
    assert worlds(3).run(works) == [True] * 3


def test_a_second_executor_measures_nothing_and_its_ranks_do_not_meet_again(worlds: Worlds) -> None:
    once, thrice = (worlds(3).run(tune, RAGGED, "ring", (0, 1, 2), times) for times in (1, 3))
    assert once == thrice
    assert [result[2] for result in thrice] == [1, 1, 1]


def tune_in_a_second_world() -> tuple[dict[TuningKey, Any], int, int]:
    """Tune in a world of two ranks, then in that of all three: two of them know what they measured."""
    tuning._tables.clear()
    tuning._measured.clear()
    pair = dist.new_group([0, 1])
    with made_up_gpu() as measured:
        if dist.get_rank() < 2:
            make_executor(world_of(pair, 20.0), EVEN[:2], "ulysses")
        before = len(measured)
        table = make_executor(world_of(None, 20.0), EVEN, "ulysses")
    if dist.get_rank() < 2:
        dist.destroy_process_group(pair)
    return table, before, len(measured) - before


def test_a_rank_that_knows_a_key_from_another_world_does_not_measure_it_again(worlds: Worlds) -> None:
    results = worlds(3).run(tune_in_a_second_world)
    assert all(table == results[0][0] and len(table) == 3 for table, _, _ in results)
    assert [(before, after) for _, before, after in results] == [(2, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize("able", [(0,), (1, 2), ()])
def test_ranks_that_cannot_measure_get_what_the_others_found(worlds: Worlds, able: tuple[int, ...]) -> None:
    results = worlds(3).run(tune, RAGGED, "ring", able)
    assert all(table == results[0][0] and bool(table) == bool(able) for table, _, _ in results)
    assert all(rank in able for rank, (_, measured, _) in enumerate(results) if measured)
    assert [meetings for *_, meetings in results] == [int(bool(able))] * 3


def test_gradients_are_left_out_where_none_are_computed() -> None:
    with made_up_gpu(), torch.no_grad():
        tuning._tables.clear()
        with patch.object(dist, "get_rank", lambda: 0):
            table = make_executor(World(world_of(None, 20.0).comm), [(300, 300)], "ring")
    assert {key.kernel for key in table} == {"forward"}


KEY = TuningKey("sm_90", "forward", 128, 128, 128, "bfloat16", 1, 0, 10, 10)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    tuning._measured.clear()
    yield
    tuning._measured.clear()
    tuning._tables.clear()


def chosen(outcomes: list[Any], deadline: float = float("inf")) -> int:
    """What is fastest by outcomes of the configurations: seconds, an error, or seconds and a result."""

    def measure(key: TuningKey, config: Any, device: torch.device) -> tuple[float, tuple[torch.Tensor, ...]]:
        del key, device
        outcome = outcomes[tuning.candidates(KEY).index(config)]
        if isinstance(outcome, Exception):
            raise outcome
        seconds, result = outcome if isinstance(outcome, tuple) else (outcome, 1.0)
        return seconds, (torch.tensor([result]),)

    with patch.object(tuning, "measure", measure):
        return fastest(KEY, CPU, deadline)


def test_the_fastest_that_runs_and_is_right_is_taken() -> None:
    count = len(tuning.candidates(KEY))
    assert count >= 3
    rest: list[Any] = [9.0] * (count - 3)
    cases: list[tuple[list[Any], int]] = [
        ([3.0, 1.0, 2.0], 1),
        ([3.0, RuntimeError("out of shared memory"), 2.0], 2),
        ([3.0, (1.0, 1.5), 2.0], 2),
        ([3.0, (1.0, torch.nan), 4.0], 0),
        ([RuntimeError("no"), 4.0, 2.0], 2),
    ]
    for outcomes, place in cases:
        tuning._measured.clear()
        assert chosen(outcomes + rest) == place
    tuning._measured.clear()
    assert chosen([RuntimeError("no")] * count) == 0


def test_when_the_time_is_over_the_first_is_taken() -> None:
    assert chosen([3.0] + [1.0] * (len(tuning.candidates(KEY)) - 1), deadline=0.0) == 0


def test_kinds_of_work_have_bounded_classes() -> None:
    assert [length_class(n) for n in (0, 1, 127, 128, 4096, 75_600)] == [7, 7, 7, 8, 13, 14]
    masks = [random_mask(4, 2048, 2048, block=64, density=share) for share in (0.9, 0.4, 0.2, 0.1, 0.01)]
    assert [density_class(mask) for mask in masks] == [1, 2, 3, 4, 5]
    assert density_class(BlockMask.dense(4, 2048)) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_launch_takes_what_was_measured_for_its_kind_of_work(dtype: str) -> None:
    first, *_, last = configs("sm_90", "forward", 128, 64, 64)
    kernel = TritonAttention()
    kernel.density = 2
    kernel.tuned = {TuningKey("sm_90", "forward", 128, 64, 64, dtype, 2, 2, 10, 11): last}
    shape = {"DPAD": 128, "BLOCK_Q": 64, "BLOCK_K": 64, "DENSE": False, "GROUP": 2}
    q, k = (torch.empty(1, 1, n, 1, dtype=getattr(torch, dtype)) for n in (600, 1200))
    with patch.object(TritonAttention, "target", lambda *_: "sm_90"):
        assert kernel._config("forward", shape, q, k) == last
        assert (
            kernel._config("forward", shape | {"DENSE": True}, q, k)
            == configs("sm_90", "forward", 128, 64, 64)[0]
        )
        assert kernel._config("forward", shape, k, k) == first
        kernel.density = 3
        assert kernel._config("forward", shape, q, k) == first


def test_nothing_is_measured_on_cpus_or_when_asked_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not tuning._can_measure(CPU)
    assert tuning._can_measure(torch.device("cuda"))
    monkeypatch.setenv("WEFT_TUNE", "0")
    assert not tuning._can_measure(torch.device("cuda"))
    monkeypatch.setenv("WEFT_TUNE", "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not tuning._can_measure(torch.device("cuda"))
