"""What every test gets: shared worlds, a hypothesis profile, and no soak unless asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.worlds import close_worlds, world
from weft.run.spawn.pool import Pool

# The same examples in every run, so that a change is judged by what it changed; `make soak` takes new ones,
# and a failing one prints the blob that brings it back. No deadline: the machine is shared, and a first
# example may start a world.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("same")
os.environ["WEFT_PLANS"] = "off"  # ranks inherit it: no test begins with another's plans, or the user's


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the tests in the background has them ignore Ctrl-C, which some of them are about.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "soak: runs for minutes, only with -m soak")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" in str(config.getoption("markexpr")):
        return
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="runs for minutes: use -m soak"))


@pytest.fixture(scope="session", autouse=True)
def worlds() -> Iterator[Callable[[int], Pool]]:
    """`worlds(3)` is the session's pool of 3 ranks; autouse ends it for who calls world(3) too."""
    yield world
    close_worlds()
