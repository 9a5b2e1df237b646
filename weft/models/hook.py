"""ModuleHook: what happens around the forward of one module of a sharded model, in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from weft.models.adapter import Cut, Cuts
from weft.models.wrap import Around, Method

if TYPE_CHECKING:
    from weft.models.attend import Site
    from weft.models.dropout import Dropped
    from weft.models.region import Region


class ModuleHook(Around):
    """Arguments are cut, the module runs (as an attention, beside others, as a dropout), its output is cut
    or put together.

    what   the module, in errors; the same for all that one pattern names: torch.compile compiles one of them.
    """  # noqa: D205

    def __init__(self, region: Region, what: str) -> None:
        self.region, self.what = region, what
        self.inner: Site | Region | Dropped | None = None
        self.order: Sequence[str] = ()
        """The names of the module's arguments."""
        self.inputs: Mapping[str, Cuts] = {}
        self.output: Cuts = None
        self.gather: Cut | None = None

    def around(self, forward: Method, args: Any, kwargs: Any) -> Any:
        region = self.region
        if not region.active and not _is_backward():  # called alone, by the user: on whole tokens
            return forward(*args, **kwargs)
        if self.inputs:
            args, kwargs = self._cut(args, kwargs)
        out = forward(*args, **kwargs) if self.inner is None else self.inner.around(forward, args, kwargs)
        if self.output is not None:
            out = region.shards.cut(out, self.output, f"The output of {self.what}")
        if self.gather is not None:
            out = region.shards.gather(out, self.gather, f"The output of {self.what}")
            region.remember(out)
        return out

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shards, cuts = self.region.shards, self.inputs
        given = [*zip_longest(self.order[: len(args)], args, fillvalue=""), *kwargs.items()]
        own = [shards.cut(value, cuts.get(name), f"{name} of {self.what}") for name, value in given]
        return tuple(own[: len(args)]), dict(zip(kwargs, own[len(args) :], strict=True))


def _is_backward() -> bool:
    """Whether a module runs once more for its gradients, because a checkpoint kept nothing of it."""
    return torch._C._current_graph_task_id() != -1
