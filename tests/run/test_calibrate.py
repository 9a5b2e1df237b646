"""Calibration: numbers that a Topology accepts, and a file that the planner reads back."""

import torch

from tests.worlds import world
from weft.core.topology import Topology
from weft.run.calibrate import calibrate, measure_card, measure_kernel


def test_two_ranks_measure_one_topology(tmp_path):
    first, second = world(2).run(calibrate)
    assert first == second
    assert first.ranks == 2
    assert first.cores >= 1
    assert 1e6 < first.intra.bandwidth < 1e13
    assert 0 < first.intra.latency < 1
    path = tmp_path / "here.toml"
    path.write_text(first.to_toml())
    assert Topology.from_toml(path) == first


def test_the_devices_of_a_machine_share_its_card():
    cards = world(4).run(measure_card, 2, torch.device("cpu"))
    assert len(set(cards)) == 1
    assert 1e6 < cards[0] < 1e13


def test_a_kernel_has_a_speed_and_a_cost_of_calling():
    found = measure_kernel(16, "float32", torch.device("cpu"))
    assert found.flops > 1e8
    assert 0 < found.call < 1
    assert 0 <= found.tile < 1 and 0 <= found.row < 1
