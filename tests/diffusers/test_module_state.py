"""Settings: a number that is another when anything is changed that a model's answer depends on."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.diffusers.module_state import MAX_SNAPSHOTS, ModuleState


class Processor:
    """As a processor, or a hook that is an object."""

    def __call__(self, *_: Any) -> None:
        return None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Sequential(nn.Linear(2, 2)), nn.BatchNorm1d(2)
        self.processor, self.scaling, self.layers = Processor(), {"lora": [1.0]}, [3]
        self.table, self.empty = torch.ones(2), None
        self.flag = {"on": False}
        flag = self.flag
        self.inner[0].register_forward_hook(lambda *_: flag["on"] or None)
        self.bound = partial(Processor(), [1])
        self.hook = Processor()
        self.inner.register_forward_pre_hook(self.hook.__call__)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))


def write(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(2)


def hooked(model: Model) -> None:
    model.inner[0].register_forward_hook(lambda *_: None)


def unhooked(model: Model) -> None:
    model.inner[0]._forward_hooks.clear()


CHANGES: dict[str, Callable[[Model], Any]] = {
    "attribute": lambda m: setattr(m.inner[0], "scale", 2.0),
    "attribute of a processor": lambda m: setattr(m.processor, "scale", 2.0),
    "processor": lambda m: setattr(m, "processor", Processor()),
    "list in a dict": lambda m: m.scaling["lora"].append(2.0),
    "list": lambda m: m.layers.append(2),
    "mode": lambda m: m.norm.train(),
    "hook": hooked,
    "hook gone": unhooked,
    "attribute of a hook": lambda m: setattr(m.hook, "on", True),
    "closure of a hook": lambda m: m.flag.update(on=True),
    "argument of a partial": lambda m: m.bound.args[0].append(2),
    "forward": lambda m: setattr(m.inner, "forward", lambda x: x),
    "module": lambda m: m.inner.append(nn.Linear(2, 2)),
    "weight written": lambda m: write(m.inner[0].weight),
    "weight replaced": lambda m: setattr(m.inner[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "buffer written": lambda m: write(m.norm.running_mean),
    "tensor written": lambda m: write(m.table),
    "tensor replaced": lambda m: setattr(m, "table", torch.ones(2)),
    "tensor instead of nothing": lambda m: setattr(m, "empty", torch.ones(2)),
    "attribute gone": lambda m: delattr(m, "layers"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name: str) -> None:
    state = ModuleState(model := Model().eval())
    before = state.number()
    with torch.no_grad():
        model(torch.ones(3, 2))
    assert state.number() == before
    CHANGES[name](model)
    after = state.number()
    assert None is not after != before
    assert state.number() == after


def test_states_that_come_back_have_their_number() -> None:
    state, seen = ModuleState(model := Model()), list[Any]()
    for scale in (1.0, 2.0, 3.0) * 2 + tuple(range(10, 20)) + (1.0,):
        model.scaling["lora"][0] = scale
        seen.append(state.number())
    assert seen[:6] == [1, 2, 3, 1, 2, 3]
    assert seen[-1] == 14  # forgotten by then
    assert len(state._snapshots) == MAX_SNAPSHOTS


def test_an_equal_dict_in_the_place_of_another_is_watched_from_then_on() -> None:
    state = ModuleState(model := Model())
    before = state.number()
    model.scaling = copy.deepcopy(model.scaling)
    assert state.number() == before
    model.scaling["lora"][0] = 2.0
    assert state.number() != before


def test_replaced_weights_are_let_go() -> None:
    state = ModuleState(model := Model())
    state.number()
    old = weakref.ref(model.inner[0].weight)
    model.inner[0].weight = nn.Parameter(torch.ones(2, 2))
    state.number()
    gc.collect()
    assert old() is None


def test_a_copy_watches_the_copy() -> None:
    pair = copy.deepcopy([model := Model(), state := ModuleState(model)])
    before = state.number(), pair[1].number()
    pair[0].layers.append(1)
    assert state.number() == before[0]
    assert pair[1].number() != before[1]
