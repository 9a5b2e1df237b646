"""Rows of the table in `around`: hooks of others."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from accelerate import hooks as accelerate
from torch import Tensor, nn

from tests.diffusers.around import Run, row
from tests.diffusers.around_copies import blocks


def scaled(factor: float, value: Any) -> Any:
    """What a hook may do to tokens, wherever they are."""
    if isinstance(value, Tensor):
        return value * factor if value.is_floating_point() else value
    return type(value)(scaled(factor, each) for each in value) if isinstance(value, list | tuple) else value


def places(model: Any) -> dict[str, nn.Module]:
    """The root, a block, an attention, and modules at both ends: where weft itself is."""
    found = {"": model, "block": blocks(model)[0]}
    ends = ("proj_out", "context_embedder", "norm_out")
    found |= {name: part for name, part in model.named_children() if name in ends}
    attention = (module for module in model.modules() if hasattr(module, "to_q"))
    return {**found, "attention": next(attention)}


class Hooks:
    """Hooks of all kinds, which change what they see, and count."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def put(self, model: Any) -> Any:
        for name, module in places(model).items():
            module.register_forward_pre_hook(partial(self._pre, name), with_kwargs=True)
            module.register_forward_hook(partial(self._post, name))
            if name not in ("", "attention"):
                module.register_full_backward_hook(partial(self._backward, name))
        return model

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def _pre(self, name: str, _: Any, args: Any, kwargs: Any) -> Any:
        self._count(f"pre {name}")
        tokens = {"hidden_states": scaled(1.1, kwargs["hidden_states"])} if "hidden_states" in kwargs else {}
        return (scaled(1.1, args[0]), *args[1:]) if args else args, {**kwargs, **tokens}

    def _post(self, name: str, _: Any, __: Any, out: Any) -> Any:
        self._count(f"post {name}")
        return scaled(0.95, out)

    def _backward(self, name: str, _: Any, into: Any, __: Any) -> Any:
        self._count(f"backward {name}")
        return tuple(scaled(1.2, x) for x in into)

    def keep(self, run: Run) -> None:
        run.keep("calls", *(self.calls[name] for name in sorted(self.calls)))


@row()
def hooks_before(run: Run) -> None:
    hooks = Hooks()
    run.step("hooked", run.split(hooks.put(run.model())))
    hooks.keep(run)


@row()
def hooks_after(run: Run) -> None:
    hooks = Hooks()
    run.step("hooked", hooks.put(run.split(run.model())))
    hooks.keep(run)


@row(splits=False)
def hooks_and_restore(run: Run) -> None:
    hooks = Hooks()
    model = hooks.put(run.split(hooks.put(run.model())))
    run.out("split", model)
    run.step("restored", run.restore(model))
    hooks.keep(run)


class Scales(accelerate.ModelHook):
    """As of offloading: around each call, by a forward of the instance."""

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        return (scaled(1.05, args[0]), *args[1:]) if args else args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:  # noqa: ARG002
        return scaled(0.9, output)


def _accelerated(model: Any) -> Any:
    for module in places(model).values():
        accelerate.add_hook_to_module(module, Scales())
    return model


def _released(model: Any) -> Any:
    for module in places(model).values():
        accelerate.remove_hook_from_module(module)
    return model


@row()
def accelerate_before(run: Run) -> None:
    model = run.split(_accelerated(run.model()))
    run.step("hooked", model)
    run.step("copy", copy.deepcopy(model))
    run.out("restored", run.restore(model))


@row()
def accelerate_before_and_removed(run: Run) -> None:
    model = run.split(_accelerated(run.model()))
    run.out("hooked", model)
    run.step("removed", _released(model))


@row()
def accelerate_after(run: Run) -> None:
    model = _accelerated(run.split(run.model()))
    run.step("hooked", model)
    run.step("copy", copy.deepcopy(model))
    run.step("removed", _released(model))


@row(splits=False)
def accelerate_after_and_restore(run: Run) -> None:
    model = _accelerated(run.split(run.model()))
    run.out("hooked", model)
    run.step("restored", run.restore(model))
    run.step("removed", _released(model))


@row()
def accelerate_put_on_again(run: Run) -> None:
    """As offloading does after each call of a pipeline."""
    model = run.split(_accelerated(run.model()))
    run.out("hooked", model)
    run.step("again", _accelerated(_released(model)))
