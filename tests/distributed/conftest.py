"""What ranks need before they start."""

from __future__ import annotations

import pytest

from weft.run.kernels import choose


@pytest.fixture(scope="session", autouse=True)
def kernel() -> None:
    """Built here, once: ranks that build it while others wait for them may run into a short time-out."""
    choose("auto")
