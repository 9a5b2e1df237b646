"""Tests with threads as ranks."""

from tests.diffusers.conftest import one_thread_a_rank

__all__ = ["one_thread_a_rank"]
