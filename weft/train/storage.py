"""Storage: the tensors of a checkpoint in safetensors files, one for each rank, and its other values in JSON.

    taken = take(state, rank=0, ranks=2)          # copies what this rank is to write
    prints = write(folder, taken, rank=0)         # rank-00000.safetensors, and values.json on rank 0
    fill(state, folder, prints)                   # in place, on any number of ranks

A file has the chunk of one rank of each tensor, by its name; the metadata `chunks` has the shape of
the whole tensor and the offset of the chunk. Nothing in it is code: a forged file is refused or has other
numbers.
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
from weft.models.state import copied, pack, unpack

VALUES, MAX_VALUES = "values.json", 256 << 20
"""The file of what is no tensor, and its bytes at most."""
NAMES = re.compile(r"values\.json|rank-\d{5,8}\.safetensors")
"""Of all files of a checkpoint beside its manifest: others, and paths to elsewhere, are refused."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
FORMAT = "weft checkpoint 1"
HEADER_BYTES = 256
"""About, of a tensor in the header of each file."""
DIFFERENT = "Go on with the recipe and the version of weft that wrote it."

State = dict[str, Any]
Sizes = tuple[int, ...]


class Print(NamedTuple):
    """Size and digest of a file: what it must still be when it is read."""

    size: int
    digest: str

    @staticmethod
    def of(file: Path) -> Print:
        with file.open("rb") as stream:
            return _print(iter(lambda: stream.read(1 << 20), b""))


class Chunk(NamedTuple):
    """A rectangle of a tensor; `shape` is that of the whole tensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor


class Taken(NamedTuple):
    """A copy of what one rank writes; `num_bytes` is what all ranks together write, about."""

    chunks: dict[str, Chunk]
    values: str
    num_bytes: int


class Leaf(NamedTuple):
    """A value of a state, and where it is kept."""

    table: State
    key: str
    value: Any


def take(state: State, *, rank: int, ranks: int) -> Taken:
    """Copy to host memory what this rank writes of `state`. What is no DTensor is the same on all ranks."""
    chunks, values, total = dict[str, Chunk](), dict[str, Any](), 0
    for turn, (name, leaf) in enumerate(_leaves(state).items()):
        if not isinstance(leaf.value, Tensor):
            inside = dict[str, Tensor]()
            values[name] = pack(copied(leaf.value), inside)
            if inside:
                raise InputError(
                    f"{name} has a tensor or an array in it.", hint="Save a tensor by a name of its own."
                )
            continue
        tensor = leaf.value
        if tensor.dtype not in DTYPES:
            raise InputError(f"{name} is of {tensor.dtype}.", hint=f"Save {', '.join(map(str, DTYPES))}.")
        total += tensor.numel() * tensor.element_size() + HEADER_BYTES * ranks
        chunk, first = _local(tensor), _is_first_copy(tensor, turn % ranks == rank)
        if chunk is not None and first and (chunk.data.numel() or not tensor.numel()):
            chunks[name] = chunk._replace(data=chunk.data.to("cpu", copy=True).contiguous())
    text = json.dumps(values)
    if len(text) > MAX_VALUES:
        raise InputError(f"Values of {len(text):,} bytes.", hint=f"At most {MAX_VALUES:,}: save tensors.")
    parse_json(text, "What is no tensor")  # what could not be loaded is not saved
    return Taken(chunks, text if rank == 0 else "", total + len(text))


def write(folder: Path, taken: Taken, *, rank: int) -> dict[str, Print]:
    """Write this rank's files, to the disk itself, and return their prints by name."""
    folder.mkdir(parents=True, exist_ok=True)
    prints = {}
    files = {f"rank-{rank:05}.safetensors": _safetensors(taken.chunks)}
    if rank == 0:
        files[VALUES] = iter([taken.values.encode()])
    for name, parts in files.items():
        with (folder / name).open("xb") as stream:
            prints[name] = _print(_through(parts, stream))
            stream.flush()
            os.fsync(stream.fileno())
    return prints


def fill(state: State, folder: Path, files: Iterable[str]) -> None:
    """Fill the tensors of `state` in place and replace its other values, from the files of all ranks."""
    shards = [_Shard(folder / name) for name in sorted(files) if name != VALUES]
    values, leaves = read_json(folder / VALUES, limit=MAX_VALUES), _leaves(state)
    saved = values.keys() | {name for shard in shards for name in shard.places}
    for names, there in ((saved - leaves.keys(), "which this run has not"), (leaves.keys() - saved, "")):
        if names:
            some = f"{', '.join(sorted(names)[:3])}{' …' if len(names) > 3 else ''}"
            what = f"has {some}, {there}" if there else f"has no {some}, which this run has"
            raise InputError(f"{folder} {what}.", hint=DIFFERENT)
    targets, left = dict[str, Chunk](), dict[str, int]()
    for name, leaf in leaves.items():
        if isinstance(leaf.value, Tensor) == (name in values):
            raise InputError(f"{name} of {folder} is of another kind than this run's.", hint=DIFFERENT)
        if not isinstance(leaf.value, Tensor):
            leaf.table[leaf.key] = _value(values[name], leaf.value, f"{name} of {folder}")
        elif chunk := _local(leaf.value):
            targets[name], left[name] = chunk, chunk.data.numel()
    for shard in shards:
        for name, count in shard.copy_into(targets):
            left[name] -= count
    if lacking := [name for name, count in left.items() if count]:
        raise InputError(
            f"{folder} does not have all of {lacking[0]}.", hint="Remove it: the one before is used."
        )


class _Shard:
    """The chunks in the file of one rank; whatever is wrong with it is an InputError."""

    def __init__(self, file: Path) -> None:
        self.file, self.places = file, dict[str, tuple[str, Sizes, Sizes, Sizes]]()
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
                self.places[name] = data.get_dtype(), tuple(shape), tuple(offset), tuple(size)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            with safe_open(self.file, "pt") as stored:
                yield stored
        except (SafetensorError, OSError, ValueError, TypeError, OverflowError) as error:
            raise InputError(f"{self.file} cannot be read: {error}.", hint=DIFFERENT) from error

    def copy_into(self, targets: Mapping[str, Chunk]) -> Iterator[tuple[str, int]]:
        """Copy what lies in both; yield how many numbers of which tensor."""
        with self._opened() as stored:
            for name in self.places.keys() & targets.keys():
                (dtype, shape, offset, size), target = self.places[name], targets[name]
                if (shape, dtype) != (target.shape, DTYPES[target.data.dtype]):
                    here = f"{DTYPES[target.data.dtype]} {list(target.shape)}"
                    raise ValueError(f"{name} is {dtype} {list(shape)}, this run's is {here}")
                spans = [
                    (max(a, b), min(a + n, b + m))
                    for a, n, b, m in zip(offset, size, target.offset, target.data.shape, strict=True)
                ]
                if all(start < stop for start, stop in spans):
                    source, where = (
                        tuple(slice(a - at, b - at) for (a, b), at in zip(spans, begin, strict=True))
                        for begin in (offset, target.offset)
                    )
                    chunk = stored.get_slice(name)[source] if source else stored.get_tensor(name)
                    target.data[where].copy_(chunk)
                    yield name, chunk.numel()


def _leaves(state: State, path: str = "") -> dict[str, Leaf]:
    """All values by their names, in the order of the state."""
    leaves = dict[str, Leaf]()
    for key, value in state.items():
        if not isinstance(key, str):
            raise InputError(f"state{path}[{key!r}] has a key that is no string.", hint="Name it by str().")
        nested = isinstance(value, dict) and value
        below = _leaves(value, f"{path}.{key}") if nested else {f"{path}.{key}"[1:]: Leaf(state, key, value)}
        if twice := leaves.keys() & below.keys():
            raise InputError(f"Two values of the state have the name {min(twice)}.", hint="Rename one.")
        leaves |= below
    return leaves


def _local(tensor: Tensor) -> Chunk | None:
    """What this rank has of a tensor, sharing its memory; None if nothing."""
    if not isinstance(tensor, DTensor):
        return Chunk(tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach())
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return Chunk(tuple(tensor.shape), tuple(chunk.offsets), tensor.to_local().detach())


def _is_first_copy(tensor: Tensor, mine: bool) -> bool:  # noqa: FBT001
    """Whether this rank writes its chunk: ranks along axes that replicate it have the same."""
    if not isinstance(tensor, DTensor):
        return mine
    at = tensor.device_mesh.get_coordinate() or ()
    return not any(i for i, placement in zip(at, tensor.placements, strict=True) if placement.is_replicate())


def _value(packed: Any, mine: Any, where: str) -> Any:
    """A value from JSON, of the same kind as this run's."""
    try:
        value = unpack(packed, {})
    except (LookupError, TypeError, ValueError, AttributeError):
        value = ...
    if not _alike(value, mine):
        raise InputError(f"{where} is {str(value)[:80]}, this run's is {str(mine)[:80]}.", hint=DIFFERENT)
    return value


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return not a or not b or all(_alike(each, b[min(i, len(b) - 1)]) for i, each in enumerate(a))
    numbers = type(a) in (int, float) and type(b) in (int, float)
    return numbers or type(a) is type(b) or None in (a, b)


def _safetensors(chunks: Mapping[str, Chunk]) -> Iterator[Any]:
    """The bytes of a file, part by part: the library's own writer would copy all tensors first."""
    # Those of the largest items first: each then lies where its items are aligned.
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


def _through(parts: Iterable[Any], stream: IO[bytes]) -> Iterator[Any]:
    for part in parts:
        stream.write(part)
        yield part


def _print(parts: Iterable[Any]) -> Print:
    digest, size = hashlib.blake2b(digest_size=16), 0
    for part in parts:
        digest.update(part)
        size += len(part)
    return Print(size, digest.hexdigest())
