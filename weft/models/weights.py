"""Weights: tensors in a safetensors file, written whole or not at all; needs torch and nothing else.

The format is a length (8 bytes), a JSON header with dtype, shape and place of each tensor, and their bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from weft.core.errors import InputError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, parts, offset = dict[str, object](), list[bytes](), 0
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        place = [offset, offset := offset + len(data)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        parts.append(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # numbers begin where they can be read from directly
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(b"".join((len(head).to_bytes(8, "little"), head, *parts)))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Tensor]:
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        return {name: _tensor(memoryview(data)[start:], **said) for name, said in header.items()}
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{path} is no whole safetensors file.", hint="Copy it again.") from error


def _tensor(data: memoryview, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    start, stop = data_offsets
    return torch.frombuffer(data[start:stop], dtype=DTYPES[dtype]).reshape(shape)
