"""Ranks and the server are killed while they work: nothing is lost, made twice, or other than it was."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.serve.faults import SMALL_FAULTS  # noqa: E402
from tests.serve.storm import Left, Storm  # noqa: E402
from tests.serve.survival import survive  # noqa: E402


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Left:
    storm = Storm(
        requests=20, rank_kills=2, sure_kills=2, server_kills=1, patience=800.0, faults=SMALL_FAULTS
    )
    return survive(storm, tmp_path_factory.mktemp("small"))


@pytest.mark.timeout(900)  # a busy machine; alone it takes less than a minute
def test_a_small_storm_leaves_every_job_as_it_would_have_been(small: Left) -> None:
    assert small.rank_kills == 2
    told = [line for line in small.log if line["message"] == "ranks are started again"]
    assert len(told) >= 2
    assert small.probes["ok"]
    assert small.faults["floods"] == 1
    assert small.faults["rank connections"]
    assert small.faults["oversize refused"]


@pytest.mark.timeout(900)
def test_two_nodes_make_what_one_makes_also_when_a_rank_of_one_is_lost(small: Left, tmp_path: Path) -> None:
    """Every job on ranks of both, which send as ranks of two machines would."""
    storm = Storm(
        requests=2, specs=2, rank_kills=1, sure_kills=1, server_kills=0, ranks=1, nodes=2, policy="all",
        transport="group", patience=800.0,
    )  # fmt: skip
    left = survive(storm, tmp_path)
    assert left.expected == {spec: small.expected[spec] for spec in left.expected}
    assert left.widest == 2
    assert left.rank_kills == 1
    assert left.restarts >= 1
