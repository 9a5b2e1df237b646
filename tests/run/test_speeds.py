"""Speeds: from times of a few calls to the fields of a Topology, and times of real calls."""

from __future__ import annotations

import pytest
import torch

from weft.run.kernels.speeds import Speeds, TimingSizes

CPU = torch.device("cpu")
SIZES = TimingSizes(2, 512, repeats=2, some=4)


def speeds(device: torch.device = CPU) -> Speeds:
    found = Speeds("auto", "float32", 16, CPU, SIZES, None)
    found.device = device
    return found


def times(tile: float, row: float, extra: float, back: float, call: float = 1e-5) -> dict[str, float]:
    """What a kernel would take that has these costs."""
    rows, tiles, around = SIZES.rows, SIZES.tiles, call + SIZES.rows * row
    few, some = SIZES.few * rows, SIZES.some * rows
    return {
        "call": call,
        "dense": around + tiles * tile,
        "few": around + few * (tile + extra),
        "some": around + some * (tile + extra),
        "dense backward": around + tiles * back,
        "some backward": around + some * (back + extra),
    }


@pytest.mark.parametrize("extra", [0.0, 1e-6])
def test_costs_of_tiles_and_rows_are_told_apart(extra: float) -> None:
    found = speeds().fields(times(tile=4e-6, row=6.4e-7, extra=extra, back=15e-6))
    flops = 4 * 16 * 64 * 64
    # Without the extra of a sparse tile the result is exact; with it, dense tiles seem a little cheaper.
    assert found["flops"] == pytest.approx(flops / 4e-6, rel=0.05)
    assert found["tile_seconds"] == pytest.approx(extra, rel=0.2)
    assert found["row_seconds"] == pytest.approx(6e-7, abs=3e-7 if extra else 1e-9)
    assert found["backward_flops"] == pytest.approx(2.5 * flops / 15e-6, rel=0.01)
    assert found["sparse_backward_flops"] == pytest.approx(found["backward_flops"], rel=0.01)


def test_differences_below_the_resolution_are_none() -> None:
    found = speeds().fields(times(tile=4e-6, row=0.0, extra=1e-7, back=2.5 * 4.1e-6))
    assert found["tile_seconds"] == 0
    assert found["flops"] == pytest.approx(found["backward_flops"])
    assert 0 <= float(found["row_seconds"]) < 2e-7


def test_a_gpu_has_a_kernel_for_each_kind_of_tiles() -> None:
    flops = 4 * 16 * 64 * 64
    found = speeds(torch.device("cuda")).fields(times(tile=4e-6, row=0.0, extra=4e-6, back=20e-6))
    assert found["flops"] == pytest.approx(flops / 4e-6)
    assert found["sparse_flops"] == pytest.approx(flops / 8e-6)
    assert found["backward_flops"] == pytest.approx(2.5 * flops / 20e-6)
    assert found["sparse_backward_flops"] == pytest.approx(2.5 * flops / 24e-6)
    assert found["kernel"] == found["sparse_kernel"] == "cpu, measured"


def test_real_calls_take_time() -> None:
    found = speeds()
    taken = found.dense_times() | found.sparse_times()
    assert set(taken) == set(times(1, 1, 1, 1))
    assert all(0 < seconds < 1 for seconds in taken.values())
    assert found.torch_flops() > 1e6
