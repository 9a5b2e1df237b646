"""One configuration of a Diffusers class, and its inputs; `zoo` has them by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import diffusers
import torch
from diffusers.utils.logging import set_verbosity_error
from torch import nn

from tests.diffusers.given import Grid, Size
from tests.diffusers.toys import seeded

set_verbosity_error()  # it would warn of every model in float64


@dataclass(frozen=True)
class Entry:
    """One configuration of one class."""

    model: str
    config: dict[str, Any]
    given: Callable[[Size], dict[str, Any]]

    def make(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """A new one, with the same weights each time."""
        return copy.deepcopy(self._made).to(dtype)

    @cached_property
    def _made(self) -> nn.Module:
        return seeded(getattr(diffusers, self.model)(**self.config)).eval()

    def inputs(
        self, batch: int = 2, text: int = 7, grid: Grid = (3, 3, 5), dtype: torch.dtype = torch.float64
    ) -> dict[str, Any]:
        return {**self.given(Size(batch, text, grid, dtype)), "return_dict": False}
