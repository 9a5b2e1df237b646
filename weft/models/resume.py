"""Resume: a pipeline stops after any step and goes on elsewhere, to the result of an undisturbed call.

    ended = run(pipe, given, on_step=lambda moment: moment.step == 3)        # True: stop here
    data = ended.state.to_bytes()                                            # it was stopped: a Stopped
    ended = run(pipe, given, start=State.from_bytes(data), on_step=…)        # here or on other ranks

Works for every pipeline that has Diffusers' `callback_on_step_end`; others run in one go. To go on, the
pipeline is called again: its transformers answer the steps that were done with zeros, for nothing, and after
the last of them latents, schedulers and generators are put back.
"""

from __future__ import annotations

import inspect
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.core.errors import InputError
from weft.models.adapter import parameters, put, unwrapped
from weft.models.guidance import PLAIN
from weft.models.randomness import facts
from weft.models.sparsity import Sparsity
from weft.models.state import State, copied

CALLBACK = "callback_on_step_end"
STAGES = ("encode", "denoise", "decode")
PROMPTS = 16
"""Of which a pipeline remembers what its text encoders said."""


@dataclass(frozen=True)
class Made:
    """A call that came to its end: frames [B, F, H, W, 3], or whatever latents look like."""

    frames: np.ndarray
    spent: dict[str, float]
    """Seconds of all calls that it took: encode, denoise, decode."""


@dataclass(frozen=True)
class Stopped:
    """A call that was stopped."""

    state: State


@dataclass(frozen=True)
class Moment:
    """After a step, while the pipeline waits."""

    step: int
    """Steps that are done."""
    seconds: float
    """That the last one took."""
    latents: Tensor
    answer: Tensor
    """What a transformer said last."""
    state: Callable[[], State]
    """What is needed to go on from here; all ranks have the same."""


OnStep = Callable[[Moment], bool]
"""Whether to stop."""


def run(
    pipe: Any, given: Mapping[str, Any], *, start: State | None = None, on_step: OnStep
) -> Made | Stopped:
    """Call a pipeline, from the beginning or from where it was stopped, until its end or until it is stopped.

    `given` must be the same each time, with generators as they were at the beginning.
    """
    call = _Call(pipe, given, start, on_step)
    if CALLBACK not in inspect.signature(type(pipe).__call__).parameters:
        if start is not None:
            raise InputError(f"A {type(pipe).__name__} has no {CALLBACK}, so it cannot go on from a step.")
        return call.ended(pipe(**given))
    call.check()
    try:
        with call.watching():
            made = pipe(**given, **{CALLBACK: call.after_step})
    except _Stop as stop:
        return Stopped(stop.state)
    return call.ended(made)


class _Stop(Exception):  # noqa: N818 - it takes the way of an error, and is none
    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state


class _Call:
    """One call of a pipeline."""

    def __init__(self, pipe: Any, given: Mapping[str, Any], start: State | None, on_step: OnStep) -> None:
        self.pipe, self.start, self.on_step = pipe, start, on_step
        before = start.values if start else {}
        self.step, self.facts = 0, facts((), dict(given))
        self.answers: dict[str, Any] = dict(before.get("answers", {}))
        self.answer: Tensor | None = None
        self.others: dict[str, Any] = {}
        """What a scheduler's step returns besides latents: some pipelines give it to the next."""
        self.generators = [leaf for leaf in tree_leaves(dict(given)) if isinstance(leaf, Generator)]
        self.spent: dict[str, float] = dict.fromkeys(STAGES, 0.0) | before.get("spent", {})
        self._last = time.monotonic()

    def check(self) -> None:
        """Arguments are those that the call was begun with."""
        before = self.start.values["given"] if self.start else self.facts
        if other := sorted(name for name, _ in before.items() ^ self.facts.items()):
            told = [f"{other[0]}={side.get(other[0], 'nothing')}" for side in (self.facts, before)]
            raise InputError(
                f"A call with {told[0]} cannot go on from one with {told[1]}.",
                hint="Give the arguments that it was begun with.",
            )

    @property
    def skips(self) -> bool:
        return self.start is not None and self.step < self.start.step

    def after_step(self, _: Any, index: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        self.step += 1
        if self.start is not None and self.step == self.start.step:
            given = {**given, "latents": self._put_back()}
        elif not self.skips:
            seconds = self._lap("denoise")
            assert self.answer is not None
            state = partial(self._state, given["latents"])
            if self.on_step(Moment(self.step, seconds, given["latents"], self.answer, state)):
                raise _Stop(state())
        return given

    def ended(self, made: Any) -> Made:
        frames = made.frames if hasattr(made, "frames") else np.asarray(made.images)[:, None]
        self._lap("decode" if self.step else "denoise")
        return Made(np.asarray(frames, dtype=np.float32), self.spent)

    def _lap(self, stage: str) -> float:
        seconds = time.monotonic() - self._last
        self.spent[stage] += seconds
        self._last += seconds
        return seconds

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Be in the way of what transformers and schedulers say."""
        with ExitStack() as stack:
            for name, model in _transformers(self.pipe).items():
                stack.enter_context(_instead(model, "forward", partial(self._forward, name, model)))
            for name, scheduler in _schedulers(self.pipe).items():
                stack.enter_context(_instead(scheduler, "step", partial(self._scheduled, name)))
            yield

    def _forward(
        self, name: str, model: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self.skips:
            self._tick(dict(zip(parameters(model), args, strict=False)) | kwargs)
            return _zeros(self.answers[name], next(model.parameters()).device)
        if self.answer is None:
            self._lap("encode" if self.start is None else "denoise")
        out = plain(*args, **kwargs)
        leaves = tree_leaves(tuple(out.values()) if isinstance(out, dict) else out)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.answer = tensors[0]
        self.answers[name] = {
            "alone": isinstance(out, Tensor),
            "shapes": [list(x.shape) for x in tensors],
            "dtypes": [str(x.dtype).removeprefix("torch.") for x in tensors],
        }
        return out

    def _scheduled(self, name: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if not isinstance(out, tuple) or len(out) == 1:
            return out
        if self.start is not None and self.step == self.start.step - 1:
            out = out[0], *self.start.values["others"].get(name, out[1:])
        self.others[name] = list(out[1:])
        return out

    def _tick(self, given: dict[str, Any]) -> None:
        """Masks that depend on the step are told of those that are left out."""
        if (woven := getattr(self.pipe, "_weft", None)) is not None:
            woven.clock.tick(given)

    def _masked(self) -> list[Sparsity]:
        """Who keeps masks from one step for later ones."""
        woven = getattr(self.pipe, "_weft", None)
        return [] if woven is None else woven.sparsities

    def _state(self, latents: Tensor) -> State:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        values = {
            "given": self.facts,
            "latents": latents,
            "torch": [torch.get_rng_state(), cuda],
            "generators": [generator.get_state() for generator in self.generators],
            "schedulers": {name: _attributes(each) for name, each in _schedulers(self.pipe).items()},
            "answers": self.answers,
            "others": self.others,
            "masks": [sparsity.state(self.step) for sparsity in self._masked()],
            "spent": self.spent,
        }
        return State(self.step, copied(values))

    def _put_back(self) -> Tensor:
        assert self.start is not None
        kept = copied(self.start.values)  # schedulers write into their lists
        for generator, state in zip(self.generators, kept["generators"], strict=True):
            generator.set_state(state)
        torch.set_rng_state(kept["torch"][0])
        if kept["torch"][1] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(kept["torch"][1])
        for name, scheduler in _schedulers(self.pipe).items():
            vars(scheduler).update(kept["schedulers"][name])
        # None in a state of an older weft.
        for sparsity, masks in zip(self._masked(), kept.get("masks", ()), strict=False):
            sparsity.go_on(masks)
        self.others = kept["others"]
        return kept["latents"]


class _Zeros(tuple[Tensor, ...]):
    """The answer of a transformer, asked for a tuple or not."""

    @property
    def sample(self) -> Tensor:
        return self[0]


def _zeros(said: Mapping[str, Any], device: torch.device) -> Any:
    made = [
        torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        for shape, dtype in zip(said["shapes"], said["dtypes"], strict=True)
    ]
    return made[0] if said["alone"] else _Zeros(made)


def _transformers(pipe: Any) -> dict[str, nn.Module]:
    parts = {name: part for name, part in pipe.components.items() if "transformer" in name}
    return {name: unwrapped(part) for name, part in parts.items() if isinstance(part, nn.Module)}


def _schedulers(pipe: Any) -> dict[str, Any]:
    return {name: part for name, part in pipe.components.items() if hasattr(part, "set_timesteps")}


def _attributes(scheduler: Any) -> dict[str, Any]:
    """What a scheduler has beside its configuration; functions do not change."""
    own = vars(scheduler).items()
    return {name: value for name, value in own if name != "_internal_dict" and not callable(value)}


@contextmanager
def _instead(owner: Any, name: str, does: Callable[..., Any]) -> Iterator[None]:
    """A method of one object by a function of the method and its arguments; pipelines look at signatures."""
    plain = getattr(owner, name)
    undo = put(owner, name, wraps(plain)(lambda *args, **kwargs: does(plain, *args, **kwargs)))
    try:
        yield
    finally:
        undo()


def remember_prompts(pipe: Any) -> None:
    """Text encoders run once for a prompt, however often a pipeline is called with it."""
    plain = getattr(pipe, "encode_prompt", None)
    if plain is None:
        return
    known: OrderedDict[str, Any] = OrderedDict()

    @wraps(plain)
    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        if not all(isinstance(leaf, PLAIN) for leaf in tree_leaves((args, kwargs))):
            return plain(*args, **kwargs)
        key = repr((args, sorted(kwargs.items())))
        known[key] = known.pop(key) if key in known else plain(*args, **kwargs)
        if len(known) > PROMPTS:
            known.popitem(last=False)
        return known[key]

    pipe.encode_prompt = encode_prompt
