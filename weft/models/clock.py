"""Clock: which denoising step a transformer's call belongs to, seen from its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Clock:
    """One for all transformers of a pipeline: Wan 2.2 changes from one to another in the middle of a run.

    steps   of a run, where they are known.
    now     the step, and which of its calls by the prompt: with it or without it. A step begins when the
            timestep changes. A run begins when that is told; where nobody tells, when the timestep rises.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, steps: int | None = None, *, told: bool = False) -> None:
        """A run of so many steps, if that is known; `told` if the next one will be told too.

        Only then timesteps may rise in a run, as Mochi's do.
        """
        self.steps, self._told, self.now = steps, told, (0, 0)
        self._time: float | None = None
        self._prompts: list[int] = []

    def tick(self, given: Mapping[str, Any]) -> None:
        time, prompt = given.get("timestep"), given.get("encoder_hidden_states")
        # Where each token has its own, those of an image that a video begins with are 0 in every step.
        found = float(time.max()) if isinstance(time, Tensor) else float(time or 0)
        step = self.now[0]
        if self._time is not None and found > self._time and not self._told:
            step, self._prompts = 0, []
        elif self._time not in (None, found):
            step += 1
        self._time = found
        where = prompt.data_ptr() if isinstance(prompt, Tensor) else 0
        if where not in self._prompts:
            self._prompts.append(where)
        self.now = (step, self._prompts.index(where))
