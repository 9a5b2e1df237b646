"""Clock: which denoising step a transformer's call belongs to, seen from its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor

from weft.models.adapter import put


class Clock:
    """One for all transformers of a pipeline: Wan 2.2 changes from one to another in the middle of a run.

    steps   of a run, where they are known.
    now     the step, and which of its calls by the prompt: with it or without it. A step begins when the
            scheduler has made one, or, where none is followed, when the timestep changes. A run begins when
            that is told; where nobody tells, when the timestep rises.

    Reading a timestep waits for the device, so it is read only where nothing else tells.
    """

    def __init__(self) -> None:
        self._unfollow: Callable[[], Any] | None = None
        self.reset()

    def reset(self, steps: int | None = None, *, told: bool = False) -> None:
        """A run of so many steps, if that is known; `told` if the next one will be told too.

        Only then timesteps may rise in a run, as Mochi's do.
        """
        self.steps, self.is_told, self.now = steps, told, (0, 0)
        self._time: float | None = None
        self._last: tuple[Any, int | None] | None = None
        self._prompts: list[int] = []
        self._scheduled: bool | None = None
        if self._unfollow is not None:
            self._unfollow()
            self._unfollow = None

    def follow(self, scheduler: Any) -> None:
        """Count the steps of a scheduler until the next run."""
        plain = getattr(scheduler, "step", None)
        if plain is None:
            return

        @wraps(plain)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._scheduled = True  # some pipelines step twice, for video and for sound
            return plain(*args, **kwargs)

        self._scheduled, self._unfollow = False, put(scheduler, "step", step)

    def tick(self, given: Mapping[str, Any]) -> None:
        prompt, step = given.get("encoder_hidden_states"), self.now[0]
        if self._scheduled is None:
            step = self._by_time(given.get("timestep"), step)
        elif self._scheduled:
            step, self._scheduled = step + 1, False
        where = prompt.data_ptr() if isinstance(prompt, Tensor) else 0
        if where not in self._prompts:
            self._prompts.append(where)
        self.now = (step, self._prompts.index(where))

    def _by_time(self, time: Any, step: int) -> int:
        before, self._last = self._last, (time, _version(time))
        if before is not None and before[0] is time and None is not before[1] == self._last[1]:
            return step
        # Where each token has its own, those of an image that a video begins with are 0 in every step.
        found = float(time.max()) if isinstance(time, Tensor) else float(time or 0)
        if self._time is not None and found > self._time and not self.is_told:
            step, self._prompts = 0, []
        elif self._time not in (None, found):
            step += 1
        self._time = found
        return step


def _version(time: Any) -> int | None:
    """How often a tensor was written, where that is counted."""
    return time._version if isinstance(time, Tensor) and not time.is_inference() else None
