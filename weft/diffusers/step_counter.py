"""StepCounter: the denoising step that a transformer's call belongs to, read from its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps

from torch import Tensor
from torch.utils._pytree import PyTree

from weft.hooks.digest import version_of
from weft.hooks.module_tree import set_attribute
from weft.hooks.wrap import Target


class StepCounter:
    """One for all transformers of a pipeline: Wan 2.2 changes from one to another in the middle of a run.

    steps   of a run, where they are known.
    now     the step, and which of its calls by the prompt: with it or without it. A step begins after the
            scheduler has stepped, or, without a scheduler, when the timestep changes. A run begins with
            `reset`; if runs are not announced, when the timestep rises.

    Reading a timestep waits for the device, so it is the last resort.
    """

    def __init__(self) -> None:
        self._unfollow: Callable[[], None] | None = None
        self.reset()

    def reset(self, steps: int | None = None, *, announced: bool = False) -> None:
        """Begin a run of so many steps, if that is known; `announced` if the next run calls `reset` too.

        Only then may timesteps rise in a run, as Mochi's do.
        """
        self.steps, self.is_announced, self.now = steps, announced, (0, 0)
        self._time: float | None = None
        self._last: tuple[PyTree, int | None] | None = None
        self._prompts: list[int] = []
        self._scheduled: bool | None = None
        if self._unfollow is not None:
            self._unfollow()
            self._unfollow = None

    def follow(self, scheduler: Target) -> None:
        """Count the steps of a scheduler until the next run."""
        plain = getattr(scheduler, "step", None)
        if plain is None:
            return

        @wraps(plain)
        def step(*args: PyTree, **kwargs: PyTree) -> PyTree:
            self._scheduled = True  # some pipelines step twice, for video and for sound
            return plain(*args, **kwargs)

        self._scheduled, self._unfollow = False, set_attribute(scheduler, "step", step)

    def tick(self, arguments: Mapping[str, PyTree]) -> None:
        """Count a call."""
        prompt, step = arguments.get("encoder_hidden_states"), self.now[0]
        if self._scheduled is None:
            step = self._by_time(arguments.get("timestep"), step)
        elif self._scheduled:
            step, self._scheduled = step + 1, False
        address = prompt.data_ptr() if isinstance(prompt, Tensor) else 0
        if address not in self._prompts:
            self._prompts.append(address)
        self.now = (step, self._prompts.index(address))

    def _by_time(self, time: Tensor | float | None, step: int) -> int:
        before, self._last = self._last, (time, version_of(time))
        if before is not None and before[0] is time and None is not before[1] == self._last[1]:
            return step
        # Where each token has its own, those of an image that a video begins with are 0 in every step.
        timestep = float(time.max()) if isinstance(time, Tensor) else float(time or 0)
        if self._time is not None and timestep > self._time and not self.is_announced:
            step, self._prompts = 0, []
        elif self._time not in (None, timestep):
            step += 1
        self._time = timestep
        return step
