"""The part `links`: the steps of a calibration, and after a crash those that the topology needs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worlds import world
from weft.core.topology import Topology
from weft.doctor import check_links
from weft.doctor.suite import Check, CheckContext
from weft.run.measure.calibrate import Calibration

NAMES = ["0→1", "0→2", "1→2", "all-to-all", "post", "ring", "dense", "sparse", "copy", "topology"]


def ctx(rank: int, ranks: int, **options: Any) -> CheckContext:
    place = {"device": torch.device("cpu"), "dtype": "float32", "machines": 1}
    return CheckContext(rank=rank, ranks=ranks, deadline=time.monotonic() + 60, **place, **options)


def run(rank: int) -> list[Check]:
    return list(check_links.checks(ctx(rank, 3)))


def test_every_step_is_a_check_and_the_topology_is_the_last(tmp_path: Path) -> None:
    ranks = world(3).run(run, per_rank=[(rank,) for rank in range(3)])
    assert [check.name for check in ranks[0]] == NAMES
    assert [[check.numbers for check in checks if "→" in check.name] for checks in ranks[1:]] == [
        [check.numbers for check in ranks[0] if "→" in check.name]
    ] * 2
    by_name = {check.name: check for check in ranks[0]}
    assert set(by_name["0→1"].numbers) == {"gbytes_per_s", "microseconds"}
    assert by_name["all-to-all"].numbers["gbytes_per_s"] > 0
    assert by_name["dense"].numbers["tflops"] > 0 and by_name["sparse"].numbers["tflops"] > 0
    path = tmp_path / "topology.toml"
    path.write_text(by_name["topology"].data)
    assert Topology.from_toml(path).devices == 3


def test_after_a_crash_its_step_is_left_out_and_those_before_are_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank has the steps dense, sparse and copy; the process before this one died in sparse."""
    taken: list[str] = []
    real = Calibration.steps

    def steps(self: Calibration) -> dict[str, Any]:
        return {
            name: lambda name=name, step=step: taken.append(name) or step()
            for name, step in real(self).items()
        }

    monkeypatch.setattr(Calibration, "steps", steps)
    found = list(check_links.checks(ctx(0, 1, finished=frozenset({"dense", "sparse"}))))
    assert taken == ["dense", "copy"]
    assert [check.name for check in found] == ["copy", "topology"]


def test_what_is_known_is_told_before_the_step_that_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs the topology comes twice; of one rank the last counts."""
    monkeypatch.setattr(Calibration, "steps", lambda _: {"copy": lambda: {"x": 1.0}, "symmetric": dict})
    found = list(check_links.checks(ctx(0, 1)))
    assert [(check.name, check.status) for check in found] == [
        ("copy", "measured"), ("topology", "measured"), ("symmetric", "skipped"), ("topology", "measured")
    ]  # fmt: skip
