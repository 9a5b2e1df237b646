"""`weft.attention` in a graph of torch.compile: one operation that makes the call when the graph runs.

A graph takes lengths and layouts as numbers: they may change from run to run. Other options are constants.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from weft.core.layout import Layout
from weft.run import opaque
from weft.run.attention import attention

SIZES = ("tokens", "kv_tokens", "prefix", "suffix")
OPTIONS = ("mask", "plan", *SIZES, "backend", "topology", "scale", "grid", "mesh", "timeout")
MAX_RUNS = 64
"""Of a layout that a graph takes as numbers; longer ones are constants."""

_layout = lru_cache(1024)(Layout)


def attention_in_graph(qkv: opaque.QKV, options: tuple[Any, ...]) -> Tensor:
    """Put a call with OPTIONS into the graph that torch.compile traces; sizes may be symbols here."""
    constants: dict[str, Any] = dict(zip(OPTIONS, options, strict=True))
    names = ""
    numbers: list[int] = []
    for name in SIZES:
        if (sizes := _as_numbers(constants[name])) is not None:
            names, constants[name] = f"{names} {name}{sizes[0]}", None
            numbers += sizes[1]
        elif isinstance(constants[name], Layout):
            layout = constants[name]
            constants[name] = layout.size, layout.shards, layout.dim, layout.padding
    for name in ("scale", "timeout"):  # in hex they are no symbols, unlike by float()
        if isinstance(constants[name], int | float):
            constants[name] = float(constants[name]).hex()
    return opaque.call(_constant_callee(names, *constants.values()), qkv, numbers=numbers)


def _as_numbers(tokens: Any) -> tuple[str, list[int]] | None:
    """Return an option as numbers, after the count of runs of each rank if it is a layout that has few."""
    if isinstance(tokens, int):
        return "", [tokens]
    if not isinstance(tokens, Layout) or tokens.padding:
        return None
    if sum(len(shard) for shard in tokens.shards) > MAX_RUNS:
        return None
    runs = [size for shard in tokens.shards for run in shard for size in run]
    return ":" + ",".join(str(len(shard)) for shard in tokens.shards), [tokens.size, *runs]


class _Callee:
    """A call of a compiled graph, but for its tensors and sizes."""

    def __init__(self, names: str, options: dict[str, Any]) -> None:
        self.names, self.options = names.split(), options

    def called(self, qkv: opaque.QKV, options: opaque.CallOptions) -> Tensor:
        numbers = iter(options.numbers)
        arguments = dict(self.options)
        for each in self.names:
            name, _, counts = each.partition(":")
            arguments[name] = next(numbers)
            if counts:
                runs = ([(next(numbers), next(numbers)) for _ in range(int(n))] for n in counts.split(","))
                arguments[name] = _layout(arguments[name], tuple(map(tuple, runs)))
        return attention(*qkv, **arguments)


_callees: list[_Callee] = []
"""A compiled graph has their numbers for ever."""


def _constant_callee(names: str, *values: Any) -> int:
    """Number what a compiled graph calls; torch.compile runs this while it traces, with plain values only."""
    options: dict[str, Any] = dict(zip(OPTIONS, values, strict=True))
    mesh = options["mesh"]
    for name in ("scale", "timeout"):
        if isinstance(options[name], str):
            options[name] = float.fromhex(options[name])
    for name in ("tokens", "kv_tokens"):
        if isinstance(options[name], tuple):
            options[name] = Layout(*options[name])
    options["mesh"] = getattr(mesh, "real_obj", mesh)  # of a process group, torch.compile has a stand-in
    _callees.append(_Callee(names, options))
    return opaque.number_of(_callees[-1])


# What torch.compiler.assume_constant_result does; its import alone costs every rank two seconds.
_constant_callee._dynamo_marked_constant = True  # type: ignore[attr-defined]
