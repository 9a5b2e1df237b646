"""Links by pair: which pairs are measured, and what the numbers of a machine become."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.fake_nccl import run_nccl
from tests.worlds import world
from weft.core.topology import Link, Topology
from weft.run.comm.group import GroupComm
from weft.run.measure.hosts import _exchange_costs
from weft.run.measure.links import (
    MAX_PAIRS,
    MessageSizes,
    measure_all_to_all,
    measure_card,
    measure_pairs,
    pairs,
    topology_fields,
)
from weft.run.world import world_of

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(("devices", "count"), [(1, 0), (2, 1), (8, 28), (9, 36), (16, 30), (72, 36)])
def test_all_pairs_of_a_machine_or_a_sample_of_them(devices: int, count: int) -> None:
    found = pairs(devices)
    assert len(set(found)) == count <= MAX_PAIRS
    assert all(0 <= a < b < devices for a, b in found)


def box(rates: dict[tuple[int, int], float]) -> dict[tuple[int, int], Link]:
    """Four devices whose pairs have 100 GB/s, but for some."""
    return {pair: Link(latency=1e-5, bandwidth=rates.get(pair, 100) * 1e9) for pair in pairs(4)}


def test_pairs_that_differ_are_written_one_by_one() -> None:
    found = topology_fields(box({(0, 1): 200, (2, 3): 90}), 4, GPU, 100e9)
    topology = Topology(devices=4, **found)
    assert topology.intra.bandwidth == topology.inter.bandwidth == 100e9
    assert [link[:2] for link in topology.links] == [(0, 1), (1, 0)]
    assert topology.link(1, 0).bandwidth == 200e9


def test_pairs_with_links_of_their_own_are_not_the_whole_of_a_device() -> None:
    """MI300X: 64 GB/s a pair, 448 in all."""
    found = topology_fields(box({}), 4, GPU, 290e9)
    assert (found["intra"].bandwidth, found["pair_bandwidth"], found["links"]) == (290e9, 100e9, ())


def test_devices_that_share_a_bridge_have_what_they_have_together() -> None:
    """PCIe: a pair alone has it all."""
    found = topology_fields(box({(0, 1): 50}), 4, GPU, 40e9)
    assert found["intra"].bandwidth == pytest.approx(40e9)
    assert found["links"][0][2].bandwidth == pytest.approx(20e9)
    assert found["pair_bandwidth"] == 0


def test_ranks_of_a_cpu_are_alike() -> None:
    found = topology_fields(box({(0, 1): 900}), 4, CPU, 10e9)
    assert set(found) == {"intra", "inter"}
    assert found["intra"].bandwidth == 100e9


def test_links_between_machines_are_their_own() -> None:
    links = {(0, 1): Link(latency=1e-5, bandwidth=1e11), (0, 2): Link(latency=5e-5, bandwidth=1e10)}
    found = topology_fields(links, 2, GPU)
    assert (found["intra"].bandwidth, found["inter"].bandwidth) == (1e11, 1e10)
    assert topology_fields({}, 1, GPU) == {}


def measured_apart() -> tuple[list[Link], int]:
    """On a rank: rank 0 cannot read rank 1's memory, rank 2 has nobody to read."""
    comm = world_of(None, 60.0).comm
    begun = getattr(comm, "calls", 0)
    with patch("weft.run.measure.links._reads_in_place", lambda comm, *_: comm.rank == 2):
        found = measure_pairs(comm, CPU, [(0, 1)], MessageSizes.of(CPU, quick=True))
    return found, getattr(comm, "calls", 0) - begun


def test_ranks_that_take_part_begin_as_many_calls_as_those_that_speak() -> None:
    """A transport whose calls are of all ranks would wait for ever."""
    found = world(3).run(measured_apart)
    assert found == [found[0]] * 3
    assert found[0][1] > MessageSizes.of(CPU, quick=True).large_repeats


def test_a_calibration_over_nccl_is_right_and_never_blocks_the_host() -> None:
    """The adversary delivers as late as NCCL may; threads are ranks, so they gather through a list."""
    ranks, own = 3, threading.local()
    values: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks, timeout=20)

    def gather(value: Any) -> list[Any]:
        values[own.rank] = value
        barrier.wait()
        found = list(values)
        barrier.wait()
        return found

    def job(comm: GroupComm) -> list[Any]:
        own.rank = comm.rank
        comm.warm_up(torch.device("meta"))
        sizes = MessageSizes.of(CPU, quick=True)
        found: list[Any] = [measure_pairs(comm, CPU, [pair], sizes) for pair in pairs(ranks)]
        found.append(measure_all_to_all(comm, CPU, ranks, sizes))
        found.append(measure_card(comm, CPU, ranks, sizes))
        assert set(_exchange_costs(comm, CPU)) == {"message", "post", "collective"}
        return found

    with patch("weft.run.measure.links.all_gather_json", gather):
        results, nccl = run_nccl(ranks, job)
    assert results == [results[0]] * ranks
    assert nccl.host_waits == 0
