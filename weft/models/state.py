"""State: what a stopped pipeline needs to go on, as bytes that nobody can run."""

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


@dataclass(frozen=True, eq=False)
class State:
    """Steps that are done, and values: plain ones, tensors and arrays, in lists, tuples and dicts."""

    step: int
    values: dict[str, Any]

    def to_bytes(self) -> bytes:
        """safetensors, with JSON as their metadata."""
        tensors: dict[str, Tensor] = {}
        state = {"step": self.step, "values": pack(self.values, tensors)}
        return save(tensors, {"format": VERSION, "state": json.dumps(state)})

    @staticmethod
    def from_bytes(data: bytes) -> State:
        """Tensors that were on a GPU come to this process's."""
        try:
            tensors = load(data)
            header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")], "Its header")
            metadata = header.get("__metadata__", {})
            if metadata.get("format") != VERSION:
                raise InputError(
                    f"It is of {metadata.get('format')!r}, and this weft goes on from {VERSION!r}."
                )
            state = parse_json(metadata["state"], "Its metadata")
            return State(int(state["step"]), unpack(state["values"], tensors))
        except (SafetensorError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            hint = "Begin at step 0, without a state."
            raise InputError(f"{len(data)} bytes are no state of a pipeline: {error}", hint=hint) from error


def copied(value: Any) -> Any:
    """A copy of all that can be stored; anything else is refused."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple  # sizes and named tuples come back as tuples
        return kind(copied(each) for each in value)
    if isinstance(value, Tensor):
        # Contiguous and on their own: torch 2.13 crashes when a generator is given a view.
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, np.ndarray | np.generic):
        return value.copy()
    if isinstance(value, bool | int | float | str | None):
        return value
    raise InputError(
        f"A {type(value).__name__} cannot be stored, so its pipeline cannot stop and go on.",
        hint="States are of numbers, texts, tensors, arrays, lists, tuples and dicts.",
    )


def pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The same as JSON, in which tensors are names: each list, tuple, dict and tensor is {what: …}."""
    if isinstance(value, dict):
        return {"dict": {name: pack(each, tensors) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [pack(each, tensors) for each in value]}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        name, what = str(len(tensors)), "tensor"
        if not isinstance(value, Tensor):
            value, what = torch.from_numpy(np.array(value)), "array"
        tensors[name] = value.cpu().contiguous()
        return {"gpu" if value.is_cuda else what: name}
    return value


def unpack(said: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(said, dict):
        return said
    ((what, held),) = said.items()
    if what == "dict":
        return {name: unpack(each, tensors) for name, each in held.items()}
    if what in CONTAINERS:
        return CONTAINERS[what](unpack(each, tensors) for each in held)
    if what == "array":
        return tensors[held].numpy()[()]  # of no dims a number
    return tensors[held].cuda() if what == "gpu" else tensors[held]
