"""Ranks and the server are killed while they work: nothing is lost, made twice, or other than it was."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.serve.survival import Storm, survive  # noqa: E402


@pytest.mark.timeout(900)  # a busy machine; alone it takes less than a minute
def test_a_small_storm_leaves_every_job_as_it_would_have_been(tmp_path: Path) -> None:
    left = survive(Storm(requests=20, rank_kills=2, server_kills=1, patience=800.0), tmp_path)
    assert left.rank_kills == 2
    told = [line for line in left.log if line["message"] == "ranks are started again"]
    assert len(told) >= 2


@pytest.mark.timeout(900)
def test_two_nodes_are_one_server_also_when_a_rank_of_one_is_lost(tmp_path: Path) -> None:
    storm = Storm(requests=4, specs=2, rank_kills=1, server_kills=0, ranks=1, nodes=2, patience=800.0)
    left = survive(storm, tmp_path)
    assert left.rank_kills == 1
    assert left.restarts >= 1
