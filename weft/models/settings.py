"""Settings: what the answer of a model depends on besides its arguments, numbered.

    settings = Settings(model)
    before = settings.number()
    model.blocks[3].scale = 0.5                # or an adapter's weight, a processor, a hook, a weight
    assert settings.number() != before

Looked at are the attributes of all modules, with the lists and dicts in them, weights (which tensor, and
whether it was written), processors, hooks, and the attributes and closures of these. Not seen: globals, and
weights that are written through `.data` or in inference mode. A look at a model that has not been changed
compares dicts with copies of them, in C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from operator import attrgetter, getitem, is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

DEPTH = 3
"""Of objects in objects: a registry has hooks, a hook has a config."""
STATES = 4  # that are known again: a guider may have as many in a step
OPAQUE = frozenset({"torch", "weft", "builtins", "numpy"})
"""Packages whose objects are told apart by identity only."""
UNUSED = frozenset(vars(nn.Module())) - {
    "training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"
}  # fmt: skip
"""What torch keeps in a module and a forward without gradients does not read."""


class Settings:
    """Numbers of the states that a model was in; None where its answer depends on earlier calls."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.forget()

    def forget(self) -> None:
        """Drop the copies, which hold on to what was replaced in the model."""
        self._states: dict[int, _State] = {}
        self._last = 0

    def number(self) -> int | None:
        """The same as before if the model is as it was then."""
        at = next((at for at, state in reversed(self._states.items()) if state.is_now()), 0)
        if not at:
            # A state with other weights would keep them in memory, and does not come back.
            self._states = {at: state for at, state in self._states.items() if state.has_tensors()}
            self._last = at = self._last + 1
        state = self._states.pop(at, None) or _State.of(self._model)
        self._states[at] = state  # the latest comes last
        if len(self._states) > STATES:
            del self._states[next(iter(self._states))]
        return None if state.is_stateful else at

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return Settings(deepcopy(self._model, memo))


class _State(NamedTuple):
    """Dicts and cells that were reached from a model, and copies of them.

    owners, keys, tensors   where a tensor lies: tensors must not be compared by value, which waits for a GPU.
    """

    objects: list[Any]
    copies: list[dict[str, Any]]
    cells: list[CellType | partial[Any]]
    contents: list[Any]
    owners: list[Any]
    keys: list[Any]
    tensors: list[Tensor]
    counted: list[Tensor]
    versions: list[int]
    is_stateful: bool

    @staticmethod
    def of(model: nn.Module) -> _State:
        state = _State([], [], [], [], [], [], [], [], [], False)  # noqa: FBT003
        seen: set[int] = set()
        modules = list(model.modules())
        leaves = [leaf for module in modules for leaf in state._add(module, vars(module), UNUSED)]
        for _ in range(DEPTH):
            leaves = [inner for leaf in leaves for inner in state._look(leaf, seen)]
        state.versions.extend(map(_version, state.counted))
        hooks = state.objects[len(modules) :]
        return state._replace(is_stateful=any(getattr(hook, "_is_stateful", None) is True for hook in hooks))

    def has_tensors(self) -> bool:
        """Whether each tensor lies where it did."""
        try:
            return all(map(is_, map(getitem, self.owners, self.keys), self.tensors))
        except (KeyError, IndexError):
            return False

    def is_now(self) -> bool:
        try:
            return (
                self.has_tensors()
                and list(map(_version, self.counted)) == self.versions
                and list(map(vars, self.objects)) == self.copies
                and list(map(_contents, self.cells)) == self.contents
            )
        except (ValueError, RuntimeError):  # arrays, tensors of other shapes
            return False

    def _look(self, leaf: Any, seen: set[int]) -> Iterable[Any]:
        """What is in an object, if a forward may read it; its leaves."""
        if id(leaf) in seen or isinstance(leaf, type | ModuleType | Tensor | nn.Module):
            return ()
        seen.add(id(leaf))
        leaves: list[Any] = []
        if isinstance(leaf, MethodType):
            return (leaf.__self__, leaf.__func__)
        if isinstance(leaf, partial):
            return (leaf.func, *self._hold(leaf, leaves))
        package = str(getattr(leaf if isinstance(leaf, FunctionType) else type(leaf), "__module__", ""))
        if package.split(".")[0] in OPAQUE:
            return ()
        for cell in leaf.__closure__ or () if isinstance(leaf, FunctionType) else ():
            self._hold(cell, leaves)
        if isinstance(own := getattr(leaf, "__dict__", None), dict):
            leaves += self._add(leaf, own, frozenset())
        return leaves

    def _hold(self, cell: CellType | partial[Any], leaves: list[Any]) -> list[Any]:
        self.cells.append(cell)
        self.contents.append(self._copied(cell, "", _contents(cell), leaves))
        return leaves

    def _add(self, owner: Any, own: dict[str, Any], skipped: frozenset[str]) -> list[Any]:
        leaves: list[Any] = []
        self.objects.append(owner)
        self.copies.append(
            {k: v if k in skipped else self._copied(own, k, v, leaves) for k, v in own.items()}
        )
        return leaves

    def _copied(self, owner: Any, key: Any, value: Any, leaves: list[Any]) -> Any:
        """A value that stays what it is when the one in the model is written."""
        if isinstance(value, dict):
            return {k: self._copied(value, k, v, leaves) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied(value, at, v, leaves) for at, v in enumerate(value))
        if isinstance(value, set):
            return set(value)
        if isinstance(value, Tensor):
            if not value.is_inference():
                self.counted.append(value)
            if not isinstance(owner, CellType):
                self.owners.append(owner)
                self.keys.append(key)
                self.tensors.append(value)
        elif callable(value) or hasattr(value, "__dict__"):
            leaves.append(value)
        return value


_version: Callable[[Tensor], int] = attrgetter("_version")


def _contents(cell: CellType | partial[Any]) -> Any:
    if isinstance(cell, partial):
        return cell.args, cell.keywords
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
