"""A thousand requests through a storm of half an hour: see `tests.serve.survival`. `make soak`"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("fastapi")

from tests.serve.faults import SOAK_FAULTS  # noqa: E402
from tests.serve.storm import Storm  # noqa: E402
from tests.serve.survival import survive  # noqa: E402

MEMORY = 24 * 2**20
DESCRIPTORS = 24
"""That a server may have more at the end of a life than when it had warmed up."""


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_requests_survive_a_long_storm(tmp_path: Path) -> None:
    requests = int(os.environ.get("WEFT_SOAK_REQUESTS", "1000"))
    storm = Storm(
        requests=requests, specs=20, together=16, steps=8, every=20.0, rank_kills=10**6, server_kills=3,
        patience=7000.0, faults=SOAK_FAULTS,
    )  # fmt: skip
    left = survive(storm, tmp_path)
    assert left.rank_kills >= 3
    for fault in (
        "full disks", "deletions on a full disk", "floods", "rank connections", "streams 503",
        "oversize refused",
    ):  # fmt: skip
        assert left.faults[fault], fault
    for life in left.lives:
        third = len(life) // 3
        if third < 20:
            continue
        # The first third warms up: threads, caches, the allocator.
        early, late = life[third : 2 * third], life[2 * third :]
        assert median(s[1] for s in late) - median(s[1] for s in early) < MEMORY
        assert median(s[2] for s in late) - median(s[2] for s in early) < DESCRIPTORS
