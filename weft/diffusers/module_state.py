"""ModuleState: number the states of a model: all that its output depends on besides the arguments.

    state = ModuleState(model)
    before = state.number()
    model.blocks[3].scale = 0.5                # or an adapter's weight, a processor, a hook, a weight
    assert state.number() != before

A state is the attributes of all modules, with the lists and dicts in them, weights (which tensor, and whether
it was written), processors, hooks, and the attributes and closures of these. Not included: globals, and
weights that are written through `.data` or in inference mode. To check a model that has not been changed,
dicts are compared with copies of them, in C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from operator import attrgetter, getitem, is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import PyTree

from weft.hooks.step_cache import cache_dit_manager
from weft.hooks.wrap import Kwargs

DEPTH = 3
"""Of objects in objects: a registry has hooks, a hook has a config."""
MAX_SNAPSHOTS = 4  # a guider may use up to four states per step
OPAQUE = frozenset({"torch", "weft", "builtins", "numpy"})
"""Packages whose objects are compared by identity only."""
UNUSED = frozenset(vars(nn.Module())) - {
    "training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"
}  # fmt: skip
"""Attributes of torch's modules that a forward without gradients does not read."""

Cell = CellType | partial[PyTree]


class ModuleState:
    """Numbers of the states that a model was in; None where its output depends on earlier calls."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.forget()

    def forget(self) -> None:
        """Drop the snapshots, which hold on to what was replaced in the model."""
        self._snapshots: dict[int, StateSnapshot] = {}
        self._last = 0

    def number(self) -> int | None:
        """Return the same number as before if the model is as it was then."""
        at = next((at for at, state in reversed(self._snapshots.items()) if state.is_current()), 0)
        if not at:
            # A state with other weights would keep them in memory, and does not come back.
            self._snapshots = {at: state for at, state in self._snapshots.items() if state.has_tensors()}
            self._last = at = self._last + 1
        state = self._snapshots.pop(at, None) or StateSnapshot.of(self._model)
        self._snapshots[at] = state  # the latest comes last
        if len(self._snapshots) > MAX_SNAPSHOTS:
            del self._snapshots[next(iter(self._snapshots))]
        return None if state.is_stateful else at

    def __deepcopy__(self, memo: dict[int, PyTree]) -> ModuleState:
        return ModuleState(deepcopy(self._model, memo))


class StateSnapshot(NamedTuple):
    """Dicts and cells that were reached from a model, and copies of them.

    owners, keys, tensors   where a tensor lies: tensors must not be compared by value, which waits for a GPU.
    """

    objects: list[PyTree]
    copies: list[Kwargs]
    cells: list[Cell]
    contents: list[PyTree]
    owners: list[PyTree]
    keys: list[str | int]
    tensors: list[Tensor]
    versioned: list[Tensor]
    versions: list[int]
    is_stateful: bool

    @staticmethod
    def of(model: nn.Module) -> StateSnapshot:
        state = StateSnapshot([], [], [], [], [], [], [], [], [], False)  # noqa: FBT003
        visited: set[int] = set()
        modules = list(model.modules())
        leaves = [leaf for module in modules for leaf in state._add(module, vars(module), UNUSED)]
        for _ in range(DEPTH):
            leaves = [inner for leaf in leaves for inner in state._visit(leaf, visited)]
        state.versions.extend(map(_version, state.versioned))
        hooks = state.objects[len(modules) :]
        is_stateful = any(getattr(hook, "_is_stateful", None) is True for hook in hooks)
        return state._replace(is_stateful=is_stateful or cache_dit_manager(model) is not None)

    def has_tensors(self) -> bool:
        """Return whether each tensor lies where it did."""
        try:
            return all(map(is_, map(getitem, self.owners, self.keys), self.tensors))
        except (KeyError, IndexError):
            return False

    def is_current(self) -> bool:
        try:
            return (
                self.has_tensors()
                and list(map(_version, self.versioned)) == self.versions
                and list(map(vars, self.objects)) == self.copies
                and list(map(_contents, self.cells)) == self.contents
            )
        except (ValueError, RuntimeError):  # arrays, tensors of other shapes
            return False

    def _visit(self, leaf: PyTree, visited: set[int]) -> Iterable[PyTree]:
        """Add the contents of an object, if a forward may read it; return its leaves."""
        if id(leaf) in visited or isinstance(leaf, type | ModuleType | Tensor | nn.Module):
            return ()
        visited.add(id(leaf))
        if isinstance(leaf, MethodType):
            return (leaf.__self__, leaf.__func__)
        if isinstance(leaf, partial):
            return (leaf.func, *self._add_cell(leaf))
        package = str(getattr(leaf if isinstance(leaf, FunctionType) else type(leaf), "__module__", ""))
        if package.split(".")[0] in OPAQUE:
            return ()
        cells = leaf.__closure__ or () if isinstance(leaf, FunctionType) else ()
        leaves = [inner for cell in cells for inner in self._add_cell(cell)]
        if isinstance(own := getattr(leaf, "__dict__", None), dict):
            leaves += self._add(leaf, own, frozenset())
        return leaves

    def _add_cell(self, cell: Cell) -> list[PyTree]:
        leaves: list[PyTree] = []
        self.cells.append(cell)
        self.contents.append(self._copied(cell, "", _contents(cell), leaves))
        return leaves

    def _add(self, owner: PyTree, own: Kwargs, skipped: frozenset[str]) -> list[PyTree]:
        leaves: list[PyTree] = []
        self.objects.append(owner)
        self.copies.append(
            {k: v if k in skipped else self._copied(own, k, v, leaves) for k, v in own.items()}
        )
        return leaves

    def _copied(self, owner: PyTree, key: str | int, value: PyTree, leaves: list[PyTree]) -> PyTree:
        """Return a value that does not change when the one in the model is written."""
        if isinstance(value, dict):
            return {k: self._copied(value, k, v, leaves) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied(value, at, v, leaves) for at, v in enumerate(value))
        if isinstance(value, set):
            return set(value)
        if isinstance(value, Tensor):
            if not value.is_inference():
                self.versioned.append(value)
            if not isinstance(owner, CellType):
                self.owners.append(owner)
                self.keys.append(key)
                self.tensors.append(value)
        elif callable(value) or hasattr(value, "__dict__"):
            leaves.append(value)
        return value


_version: Callable[[Tensor], int] = attrgetter("_version")  # in C: it reads each weight in each call


def _contents(cell: Cell) -> PyTree:
    if isinstance(cell, partial):
        return cell.args, cell.keywords
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
