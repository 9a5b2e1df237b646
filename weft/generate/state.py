"""PipelineState: the state of a stopped pipeline, as bytes that contain no code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from weft.core.errors import InputError
from weft.core.files import parse_json

VERSION = "weft state 1"
CONTAINERS = {"list": list, "tuple": tuple}
Value = Any
"""Numbers, strings, tensors and arrays, in lists, tuples and dicts with string keys."""


@dataclass(frozen=True, eq=False)
class PipelineState:
    """The number of steps done, and all values that the next one depends on."""

    step: int
    values: dict[str, Value]

    def to_bytes(self) -> bytes:
        """Return safetensors with JSON as their metadata."""
        tensors: dict[str, Tensor] = {}
        state = {"step": self.step, "values": pack(self.values, tensors)}
        return save(tensors, {"format": VERSION, "state": json.dumps(state)})

    @staticmethod
    def from_bytes(data: bytes) -> PipelineState:
        """Read `to_bytes`; tensors that were on a GPU are moved to this process's."""
        try:
            tensors = load(data)
            header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")], "Its header")
            metadata = header.get("__metadata__", {})
            if metadata.get("format") != VERSION:
                raise InputError(f"Its format is {metadata.get('format')!r}, this weft reads {VERSION!r}.")
            state = parse_json(metadata["state"], "Its metadata")
            return PipelineState(int(state["step"]), unpack(state["values"], tensors))
        except (SafetensorError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            hint = "Start from step 0, without a state."
            raise InputError(
                f"{len(data)} bytes are not a state of a pipeline: {error}", hint=hint
            ) from error


def copied(value: Value) -> Value:
    """Return a deep copy; refuse values that cannot be stored."""
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple  # torch.Size and named tuples become tuples
        return kind(copied(item) for item in value)
    if isinstance(value, Tensor):
        # Contiguous, and no view: torch 2.13 crashes on views in Generator.set_state.
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, np.ndarray | np.generic):
        return value.copy()
    if isinstance(value, bool | int | float | str | None):
        return value
    raise InputError(
        f"A {type(value).__name__} cannot be stored, so its pipeline cannot be stopped and resumed.",
        hint="States consist of numbers, strings, tensors, arrays, lists, tuples and dicts.",
    )


def pack(value: Value, tensors: dict[str, Tensor]) -> Value:
    """Return JSON, where lists, tuples, dicts and names in `tensors` are {type: …}."""
    if isinstance(value, dict):
        return {"dict": {name: pack(item, tensors) for name, item in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [pack(item, tensors) for item in value]}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        name, kind = str(len(tensors)), "tensor"
        if not isinstance(value, Tensor):
            value, kind = torch.from_numpy(np.array(value)), "array"
        tensors[name] = value.cpu().contiguous()
        return {"gpu" if value.is_cuda else kind: name}
    return value


def unpack(packed: Value, tensors: dict[str, Tensor]) -> Value:
    """Invert `pack`."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "dict":
        return {name: unpack(item, tensors) for name, item in content.items()}
    if kind in CONTAINERS:
        return CONTAINERS[kind](unpack(item, tensors) for item in content)
    if kind == "array":
        return tensors[content].numpy()[()]  # a number, if it has no dims
    return tensors[content].cuda() if kind == "gpu" else tensors[content]
