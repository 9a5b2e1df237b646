"""Stop a pipeline after any step and resume it elsewhere, with the result of an uninterrupted call.

    finished = run(pipe, kwargs, on_step=on_step)                  # None: on_step(info) returned True
    data = state.to_bytes()                                        # where on_step stored info.state()
    finished = run(pipe, kwargs, start=PipelineState.from_bytes(data), on_step=…)  # here or on other ranks

Works for every pipeline with Diffusers' `callback_on_step_end`; others run in one go. To resume, the
pipeline is called again: for the steps already done its transformers return zeros without computing, and
after the last of these steps latents, schedulers and generators are restored.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.core.errors import InputError
from weft.generate.pretrained import Kwargs, PretrainedPipeline
from weft.generate.state import PipelineState, Value, copied
from weft.generate.step_cache import has_cache
from weft.hooks.digest import facts
from weft.hooks.module_tree import forward_parameters, set_attribute, unwrapped
from weft.sparse.mask_cache import MaskCache

CALLBACK = "callback_on_step_end"
STAGES = ("encode", "denoise", "decode")
Method = Callable[..., Any]


@dataclass(frozen=True)
class FinishedCall:
    """The result of a call: frames [B, F, H, W, 3], or latents."""

    frames: np.ndarray
    spent: dict[str, float]
    """Seconds of all its parts: encode, denoise, decode."""


@dataclass(frozen=True)
class StepInfo:
    """A finished step, while the pipeline waits."""

    step: int
    """The number of steps done."""
    seconds: float
    """Of the last step."""
    latents: Tensor
    prediction: Tensor
    """The last output of a transformer."""
    state: Callable[[], PipelineState]
    """Return the state to resume from; the same on all ranks."""
    can_stop: bool = True
    """Not with a step cache: its tensors, of each rank's own tokens, are not in a state."""


OnStep = Callable[[StepInfo], bool]
"""Return whether to stop."""


def run(
    pipe: PretrainedPipeline, kwargs: Kwargs, *, start: PipelineState | None = None, on_step: OnStep
) -> FinishedCall | None:
    """Call a pipeline from the beginning or from `start`; return None if `on_step` stops it.

    `kwargs` must be the same each time, with generators in their initial state.
    """
    call = _ResumableCall(pipe, kwargs, start, on_step)
    if CALLBACK not in inspect.signature(type(pipe).__call__).parameters:
        if start is not None:
            raise InputError(f"A {type(pipe).__name__} has no {CALLBACK}, so it cannot resume from a step.")
        return call.finished(pipe(**kwargs))
    call.check()
    if start is not None and call.has_cache:
        raise InputError(
            "A call with a step cache cannot resume: what its ranks had cached is not in the state.",
            hint="Call it from the beginning, or call disable_cache() on the transformers.",
        )
    try:
        with call.intercepting():
            output = pipe(**kwargs, **{CALLBACK: call.after_step})
    except _Stop:
        return None
    return call.finished(output)


class _Stop(Exception):  # noqa: N818 - control flow, not an error
    """`on_step` stops the call."""


class _OutputSpec(TypedDict):
    """The output of a transformer, as it is stored; `alone`: a tensor, not a tuple or an output class."""

    alone: bool
    shapes: list[list[int]]
    dtypes: list[str]


class _ResumableCall:
    def __init__(
        self, pipe: PretrainedPipeline, kwargs: Kwargs, start: PipelineState | None, on_step: OnStep
    ) -> None:
        self.pipe, self.start, self.on_step = pipe, start, on_step
        before = start.values if start else {}
        self.step, self.arguments = 0, facts((), dict(kwargs))
        self.outputs: dict[str, _OutputSpec] = dict(before.get("answers", {}))
        self.prediction: Tensor | None = None
        self.scheduler_outputs: dict[str, list[Value]] = {}
        """What a scheduler's step returns besides latents: some pipelines pass it to the next step."""
        self.generators = [leaf for leaf in tree_leaves(dict(kwargs)) if isinstance(leaf, Generator)]
        self.spent: dict[str, float] = dict.fromkeys(STAGES, 0.0) | before.get("spent", {})
        self.has_cache = has_cache(pipe)
        self._last = time.monotonic()

    def check(self) -> None:
        """Refuse arguments that differ from those of the original call."""
        before = self.start.values["given"] if self.start else self.arguments
        if different := sorted(name for name, _ in before.items() ^ self.arguments.items()):
            name = different[0]
            now, then = (f"{name}={side.get(name, 'nothing')}" for side in (self.arguments, before))
            raise InputError(
                f"A call with {now} cannot resume one with {then}.",
                hint="Pass the arguments of the original call.",
            )

    @property
    def skips(self) -> bool:
        """Whether the current step was done before."""
        return self.start is not None and self.step < self.start.step

    def after_step(self, _pipe: PretrainedPipeline, _index: int, _timestep: Value, kwargs: Kwargs) -> Kwargs:
        self.step += 1
        if self.start is not None and self.step == self.start.step:
            return {**kwargs, "latents": self._restore(self.start)}
        if not self.skips:
            seconds = self._lap("denoise")
            assert self.prediction is not None
            state = partial(self._state, kwargs["latents"])
            can_stop = not self.has_cache
            info = StepInfo(self.step, seconds, kwargs["latents"], self.prediction, state, can_stop)
            if self.on_step(info) and can_stop:
                raise _Stop
        return kwargs

    def finished(self, output: Any) -> FinishedCall:
        frames = output.frames if hasattr(output, "frames") else np.asarray(output.images)[:, None]
        self._lap("decode" if self.step else "denoise")
        return FinishedCall(np.asarray(frames, dtype=np.float32), self.spent)

    def _lap(self, stage: str) -> float:
        seconds = time.monotonic() - self._last
        self.spent[stage] += seconds
        self._last += seconds
        return seconds

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Replace the forwards of transformers and the steps of schedulers."""
        with ExitStack() as stack:
            for name, model in _transformers(self.pipe).items():
                stack.enter_context(_replaced(model, "forward", partial(self._forward, name, model)))
            for name, scheduler in _schedulers(self.pipe).items():
                stack.enter_context(_replaced(scheduler, "step", partial(self._scheduler_step, name)))
            yield

    def _forward(
        self, name: str, model: nn.Module, forward: Method, args: tuple[Value, ...], kwargs: Kwargs
    ) -> Value:
        if self.skips:
            if (handle := getattr(self.pipe, "_weft", None)) is not None:  # masks that depend on the step
                handle.step_counter.tick(dict(zip(forward_parameters(model), args, strict=False)) | kwargs)
            return _zeros(self.outputs[name], next(model.parameters()).device)
        if self.prediction is None:
            self._lap("encode" if self.start is None else "denoise")
        output = forward(*args, **kwargs)
        leaves = tree_leaves(tuple(output.values()) if isinstance(output, dict) else output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.prediction = tensors[0]
        self.outputs[name] = {
            "alone": isinstance(output, Tensor),
            "shapes": [list(x.shape) for x in tensors],
            "dtypes": [str(x.dtype).removeprefix("torch.") for x in tensors],
        }
        return output

    def _scheduler_step(self, name: str, step: Method, args: tuple[Value, ...], kwargs: Kwargs) -> Value:
        output = step(*args, **kwargs)
        if not isinstance(output, tuple) or len(output) == 1:
            return output
        if self.start is not None and self.step == self.start.step - 1:
            output = output[0], *self.start.values["others"].get(name, output[1:])
        self.scheduler_outputs[name] = list(output[1:])
        return output

    def _sparsities(self) -> list[MaskCache]:
        """Return the sparse attentions that reuse masks in later steps."""
        handle = getattr(self.pipe, "_weft", None)
        return [] if handle is None else handle.mask_caches

    def _state(self, latents: Tensor) -> PipelineState:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        values = {  # names of the stored format
            "given": self.arguments,
            "latents": latents,
            "torch": [torch.get_rng_state(), cuda],
            "generators": [generator.get_state() for generator in self.generators],
            "schedulers": {name: _attributes(each) for name, each in _schedulers(self.pipe).items()},
            "answers": self.outputs,
            "others": self.scheduler_outputs,
            "masks": [sparsity.state(self.step) for sparsity in self._sparsities()],
            "spent": self.spent,
        }
        return PipelineState(self.step, copied(values))

    def _restore(self, state: PipelineState) -> Tensor:
        values = copied(state.values)  # schedulers modify their lists
        for generator, rng_state in zip(self.generators, values["generators"], strict=True):
            generator.set_state(rng_state)
        torch.set_rng_state(values["torch"][0])
        if values["torch"][1] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(values["torch"][1])
        for name, scheduler in _schedulers(self.pipe).items():
            vars(scheduler).update(values["schedulers"][name])
        # A state of an older weft has no masks.
        for sparsity, masks in zip(self._sparsities(), values.get("masks", ()), strict=False):
            sparsity.restore(masks)
        self.scheduler_outputs = values["others"]
        return values["latents"]


class _Zeros(tuple[Tensor, ...]):
    """The output of a transformer, as a tuple and with Diffusers' `sample`."""

    @property
    def sample(self) -> Tensor:
        return self[0]


def _zeros(spec: _OutputSpec, device: torch.device) -> Tensor | _Zeros:
    tensors = [
        torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        for shape, dtype in zip(spec["shapes"], spec["dtypes"], strict=True)
    ]
    return tensors[0] if spec["alone"] else _Zeros(tensors)


def _transformers(pipe: PretrainedPipeline) -> dict[str, nn.Module]:
    models = {name: x for name, x in pipe.components.items() if "transformer" in name}
    return {name: unwrapped(model) for name, model in models.items() if isinstance(model, nn.Module)}


def _schedulers(pipe: PretrainedPipeline) -> Kwargs:
    return {name: x for name, x in pipe.components.items() if hasattr(x, "set_timesteps")}


def _attributes(scheduler: Value) -> dict[str, Value]:
    """Return the state of a scheduler: its attributes without configuration and functions."""
    own = vars(scheduler).items()
    return {name: value for name, value in own if name != "_internal_dict" and not callable(value)}


@contextmanager
def _replaced(owner: Value, name: str, function: Method) -> Iterator[None]:
    """Replace a method by function(method, args, kwargs), with its signature, which pipelines inspect."""
    method = getattr(owner, name)
    undo = set_attribute(owner, name, wraps(method)(lambda *args, **kwargs: function(method, args, kwargs)))
    try:
        yield
    finally:
        undo()
