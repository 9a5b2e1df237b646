"""What a health probe takes for false."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.probe import judge

READY = {"status": "ok", "restarts": 1}
AGAIN = {"status": "ok", "restarts": 2}
STARTING = {"status": "starting", "restarts": 2}


@pytest.mark.parametrize(
    ("state", "before", "after", "disk", "wrong"),
    [
        ("ok", READY, READY, "room", ""),
        ("ok", READY, READY, "full", "the disk is full"),
        ("disk_full", READY, READY, "full", ""),
        ("disk_full", READY, READY, "room", "the disk has room"),
        ("disk_full", READY, READY, "", ""),
        ("starting", READY, READY, "", "the ranks are ready"),
        ("starting", READY, AGAIN, "", ""),
        ("starting", STARTING, STARTING, "full", ""),
        ("ok", STARTING, STARTING, "", "the ranks are not ready"),
        ("ok", READY, STARTING, "", ""),
        ("ok", {}, STARTING, "full", ""),
    ],
)
def test_answers_of_health_that_contradict_the_status_are_false(
    state: str, before: dict[str, Any], after: dict[str, Any], disk: str, wrong: str
) -> None:
    code = 200 if state == "ok" else 503
    assert judge(code, {"status": state}, before, after, disk) == wrong
    assert judge(703 - code, {"status": state}, before, after, disk) == "the status code and the text differ"
