"""Sharded state: tensors in safetensors files, one for each rank, and other values in JSON.

    copy = copy_shards(state, rank=0, ranks=2)    # what this rank writes
    files = write(folder, copy, rank=0)           # rank-00000.safetensors, and values.json on rank 0
    fill(state, folder, files)                    # in place, on any number of ranks

A file has one rank's chunk of each tensor, by its name; the metadata `chunks` has the shape of the whole
tensor and the offset of the chunk. Nothing in it is code: a forged file is refused or has other numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.core.errors import InputError
from weft.core.files import parse_json, read_json
from weft.generate.state import copied, pack, unpack

VALUES, MAX_VALUES_BYTES = "values.json", 256 << 20
"""The file of all values but tensors, and its largest size."""
FILE_NAME = re.compile(r"values\.json|rank-\d{5,8}\.safetensors")
"""The files of a checkpoint beside its manifest; other names, and paths to elsewhere, are refused."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
FORMAT = "weft checkpoint 1"
HEADER_BYTES = 256
"""Approximate size of a tensor's entry in the header of each file."""
MISMATCH_HINT = "Resume with the recipe and the version of weft that wrote it."

StateDict = dict[str, Any]
Sizes = tuple[int, ...]


class Fingerprint(NamedTuple):
    """Size and digest of a file."""

    size: int
    digest: str

    @staticmethod
    def of(file: Path) -> Fingerprint:
        with file.open("rb") as stream:
            return _fingerprint(iter(lambda: stream.read(1 << 20), b""))


class Chunk(NamedTuple):
    """A rectangle of a tensor; `shape` is that of the whole tensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor


class ShardCopy(NamedTuple):
    """A copy of what one rank writes; `num_bytes` is about what all ranks write together."""

    chunks: dict[str, Chunk]
    values: str
    num_bytes: int


def copy_shards(state: StateDict, *, rank: int, ranks: int) -> ShardCopy:
    """Copy what this rank writes of `state` to host memory; all but DTensors is the same on all ranks."""
    chunks, values, total = dict[str, Chunk](), dict[str, Any](), 0
    for turn, (name, (table, key)) in enumerate(_leaves(state).items()):
        tensor = table[key]
        if not isinstance(tensor, Tensor):
            inside = dict[str, Tensor]()
            values[name] = pack(copied(tensor), inside)
            if inside:
                raise InputError(f"{name} contains a tensor or an array.", hint="Save it under its own name.")
            continue
        if tensor.dtype not in DTYPES:
            raise InputError(f"{name} has dtype {tensor.dtype}.", hint=f"Use {', '.join(map(str, DTYPES))}.")
        total += tensor.numel() * tensor.element_size() + HEADER_BYTES * ranks
        chunk, first = _local(tensor), _is_first_copy(tensor, turn % ranks == rank)
        if chunk is not None and first and (chunk.data.numel() or not tensor.numel()):
            chunks[name] = chunk._replace(data=chunk.data.to("cpu", copy=True).contiguous())
    text = json.dumps(values)
    if len(text) > MAX_VALUES_BYTES:
        raise InputError(
            f"Values are {len(text):,} bytes, {MAX_VALUES_BYTES:,} are allowed.", hint="Save tensors."
        )
    parse_json(text, "The values")  # to save nothing that cannot be loaded
    return ShardCopy(chunks, text if rank == 0 else "", total + len(text))


def write(folder: Path, copy: ShardCopy, *, rank: int) -> dict[str, Fingerprint]:
    """Write and fsync this rank's files, and return their fingerprints by name."""
    folder.mkdir(parents=True, exist_ok=True)
    fingerprints = {}
    files = {f"rank-{rank:05}.safetensors": _safetensors(copy.chunks)}
    if rank == 0:
        files[VALUES] = iter([copy.values.encode()])
    for name, blocks in files.items():
        with (folder / name).open("xb") as stream:
            fingerprints[name] = _fingerprint(_write_through(blocks, stream))
            stream.flush()
            os.fsync(stream.fileno())
    return fingerprints


def fill(state: StateDict, folder: Path, files: Iterable[str]) -> None:
    """Fill the tensors of `state` in place and replace its other values, from the files of all ranks."""
    shards = [_Shard(folder / name) for name in sorted(files) if name != VALUES]
    values, leaves = read_json(folder / VALUES, limit=MAX_VALUES_BYTES), _leaves(state)
    saved = values.keys() | {name for shard in shards for name in shard.chunks}
    for names, has, lacks in (
        (saved - leaves.keys(), str(folder), "this run"),
        (leaves.keys() - saved, "this run", str(folder)),
    ):
        if names:
            shown = f"{', '.join(sorted(names)[:3])}{' …' if len(names) > 3 else ''}"
            raise InputError(f"{lacks} has no {shown}, which {has} has.", hint=MISMATCH_HINT)
    targets, left = dict[str, Chunk](), dict[str, int]()
    for name, (table, key) in leaves.items():
        own = table[key]
        if isinstance(own, Tensor) == (name in values):
            raise InputError(f"{name} of {folder} has another type than this run's.", hint=MISMATCH_HINT)
        if not isinstance(own, Tensor):
            table[key] = _value(values[name], own, f"{name} of {folder}")
        elif chunk := _local(own):
            targets[name], left[name] = chunk, chunk.data.numel()
    for shard in shards:
        for name, count in shard.copy_into(targets):
            left[name] -= count
    if lacking := [name for name, count in left.items() if count]:
        raise InputError(
            f"{folder} lacks part of {lacking[0]}.", hint="Remove it: the previous checkpoint is used."
        )


class _Shard:
    """The chunks in the file of one rank; any damage is an InputError."""

    def __init__(self, file: Path) -> None:
        self.file, self.chunks = file, dict[str, tuple[str, Sizes, Sizes, Sizes]]()
        """By tensor: dtype, shape of the whole tensor, offset and shape of the chunk."""
        with self._opened() as stored:
            index = parse_json((stored.metadata() or {}).get("chunks", ""), f"The index of {file}")
            if not isinstance(index, dict) or index.keys() != set(stored.keys()):
                raise ValueError("its index is of other tensors")
            for name, (shape, offset) in index.items():
                data = stored.get_slice(name)
                size = data.get_shape()
                axes = list(zip(shape, offset, size, strict=True))
                if not all(type(n) is int for axis in axes for n in axis) or not all(
                    0 <= at <= at + count <= whole for whole, at, count in axes
                ):
                    raise ValueError(f"{name} lies at {str(offset)[:80]} of {str(shape)[:80]}")
                self.chunks[name] = data.get_dtype(), tuple(shape), tuple(offset), tuple(size)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            with safe_open(self.file, "pt") as stored:
                yield stored
        except (SafetensorError, OSError, ValueError, TypeError, OverflowError) as error:
            raise InputError(f"{self.file} cannot be read: {error}.", hint=MISMATCH_HINT) from error

    def copy_into(self, targets: Mapping[str, Chunk]) -> Iterator[tuple[str, int]]:
        """Copy the overlap with `targets`; yield the tensors' names and the numbers of elements copied."""
        with self._opened() as stored:
            for name in self.chunks.keys() & targets.keys():
                (dtype, shape, offset, size), target = self.chunks[name], targets[name]
                if (shape, dtype) != (target.shape, DTYPES[target.data.dtype]):
                    expected = f"{DTYPES[target.data.dtype]} {list(target.shape)}"
                    raise ValueError(f"{name} is {dtype} {list(shape)}, this run's is {expected}")
                spans = [
                    (max(a, b), min(a + n, b + m))
                    for a, n, b, m in zip(offset, size, target.offset, target.data.shape, strict=True)
                ]
                if all(start < stop for start, stop in spans):
                    source, destination = (
                        tuple(slice(a - at, b - at) for (a, b), at in zip(spans, begin, strict=True))
                        for begin in (offset, target.offset)
                    )
                    chunk = stored.get_slice(name)[source] if source else stored.get_tensor(name)
                    target.data[destination].copy_(chunk)
                    yield name, chunk.numel()


def _leaves(state: StateDict, path: str = "") -> dict[str, tuple[StateDict, str]]:
    """Return the dict and key of each value by its dotted name, in the order of the state."""
    leaves = dict[str, tuple[StateDict, str]]()
    for key, value in state.items():
        if not isinstance(key, str):
            raise InputError(
                f"Keys of a state must be strings, got {key!r} in state{path}.", hint="Use str()."
            )
        nested = isinstance(value, dict) and value
        below = _leaves(value, f"{path}.{key}") if nested else {f"{path}.{key}"[1:]: (state, key)}
        if twice := leaves.keys() & below.keys():
            raise InputError(f"Two values of the state have the name {min(twice)}.", hint="Rename one.")
        leaves |= below
    return leaves


def _local(tensor: Tensor) -> Chunk | None:
    """Return this rank's chunk of a tensor, sharing its memory; None outside its mesh."""
    if not isinstance(tensor, DTensor):
        return Chunk(tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach())
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return Chunk(tuple(tensor.shape), tuple(chunk.offsets), tensor.to_local().detach())


def _is_first_copy(tensor: Tensor, is_writer: bool) -> bool:  # noqa: FBT001
    """Return whether this rank writes its chunk: the first along each axis that replicates the tensor."""
    if not isinstance(tensor, DTensor):
        return is_writer
    at = tensor.device_mesh.get_coordinate() or ()
    return not any(i for i, placement in zip(at, tensor.placements, strict=True) if placement.is_replicate())


def _value(packed: Any, expected: Any, name: str) -> Any:
    """Unpack a value from JSON and check that its type is that of this run's."""
    try:
        value = unpack(packed, {})
    except (LookupError, TypeError, ValueError, AttributeError):
        value = ...
    if not _same_type(value, expected):
        raise InputError(
            f"{name} must be like this run's {str(expected)[:80]}, got {str(value)[:80]}.", hint=MISMATCH_HINT
        )
    return value


def _same_type(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_type(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return not a or not b or all(_same_type(each, b[min(i, len(b) - 1)]) for i, each in enumerate(a))
    numbers = type(a) in (int, float) and type(b) in (int, float)
    return numbers or type(a) is type(b) or None in (a, b)


def _safetensors(chunks: Mapping[str, Chunk]) -> Iterator[Any]:
    """Yield the bytes of a file in blocks; the library's own writer would copy all tensors first."""
    # Largest items first, so that every tensor is aligned to its item size.
    order = sorted(chunks, key=lambda name: (-chunks[name].data.element_size(), name))
    index = {name: (chunks[name].shape, chunks[name].offset) for name in order}
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "chunks": json.dumps(index)}}
    at = 0
    for name in order:
        data = chunks[name].data
        begin, at = at, at + data.numel() * data.element_size()
        shape = list(data.shape)
        header[name] = {"dtype": DTYPES[data.dtype], "shape": shape, "data_offsets": [begin, at]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield chunks[name].data.reshape(-1).view(torch.uint8).numpy().data


def _write_through(blocks: Iterable[Any], stream: IO[bytes]) -> Iterator[Any]:
    for block in blocks:
        stream.write(block)
        yield block


def _fingerprint(blocks: Iterable[Any]) -> Fingerprint:
    digest, size = hashlib.blake2b(digest_size=16), 0
    for block in blocks:
        digest.update(block)
        size += len(block)
    return Fingerprint(size, digest.hexdigest())
