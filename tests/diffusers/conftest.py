"""What tests with threads as ranks need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread_a_rank() -> Iterator[None]:
    """Ranks that each have threads of their own would wait for each other's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
