"""Clock: which denoising step a transformer's call belongs to, seen from its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Clock:
    """One for all transformers of a pipeline: Wan 2.2 changes from one to another in the middle of a run.

    steps   of a run, where they are known.
    now     the step, and which of its calls by the prompt: with it or without it. A step begins when the
            timestep changes, a run when it rises.
    """

    def __init__(self) -> None:
        self.now = (0, 0)
        self.steps: int | None = None
        self._time: float | None = None
        self._prompts: list[int] = []

    def tick(self, given: Mapping[str, Any]) -> None:
        time, prompt = given.get("timestep"), given.get("encoder_hidden_states")
        found = float(time.flatten()[0]) if isinstance(time, Tensor) else float(time or 0)
        step = self.now[0]
        if self._time is None or found > self._time:
            step, self._prompts = 0, []
        elif found < self._time:
            step += 1
        self._time = found
        where = prompt.data_ptr() if isinstance(prompt, Tensor) else 0
        if where not in self._prompts:
            self._prompts.append(where)
        self.now = (step, self._prompts.index(where))
