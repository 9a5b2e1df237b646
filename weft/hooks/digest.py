"""Describe the arguments of a call by name, with digests of their values.

Equal arguments have equal descriptions on every rank and in every call: ranks compare their inputs, and a
resumed run its arguments with those of the run that it continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import islice, zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import MappingKey, PyTree, keystr, tree_flatten_with_path

from weft.hooks.wrap import Args, Kwargs

WORD_BYTES = 8
CHUNK_WORDS = 1 << 22
"""Words that are mixed at a time, which bounds the memory of intermediate results."""
MAX_TEXT = 60  # characters of a string in an error
GOLDEN, MIX = -7046029254386353131, -4417276706812531889
"""Odd 64-bit multipliers, whose bits look random, as in splitmix64."""


def facts(args: Args, kwargs: Kwargs) -> dict[str, str]:
    """Return a description of each argument, by name; descriptions of equal values are equal."""
    return {name: fact(leaf) for name, leaf in leaves_of(args, kwargs).items()}


def leaves_of(args: Args, kwargs: Mapping[str, PyTree], names: Iterable[str] = ()) -> dict[str, PyTree]:
    """Return the leaves of arguments by name, except arguments named "device", which may differ by rank."""
    ordered = zip_longest(islice(names, len(args)), args)
    named = {name or f"argument {at}": value for at, (name, value) in enumerate(ordered)}
    leaves: dict[str, PyTree] = {}
    for (first, *rest), leaf in tree_flatten_with_path({**named, **kwargs})[0]:
        assert isinstance(first, MappingKey)
        leaves[f"{first.key}{keystr(tuple(rest))}"] = leaf
    return {name: leaf for name, leaf in leaves.items() if "device" not in name}


def fact(leaf: PyTree) -> str:
    """Describe an argument by a digest of its values or by its text; other objects by their type alone."""
    if isinstance(leaf, Tensor):
        return f"{list(leaf.shape)} {hexadecimal(int(digest(leaf)))}"
    if hasattr(leaf, "tobytes"):  # arrays and images
        return _digest_bytes(leaf.tobytes())
    if isinstance(leaf, bool | int | float | str | None):
        text = repr(leaf)
        return text if len(text) < MAX_TEXT else f"{text[:MAX_TEXT]}… {_digest_bytes(text.encode())}"
    return type(leaf).__name__


def hexadecimal(number: int) -> str:
    return f"{number & 0xFFFFFFFFFFFFFFFF:016x}"


def words_of(x: Tensor) -> Tensor:
    """Return the bytes of a tensor as int64, padded with zeros."""
    data = x.flatten().view(torch.uint8)
    return F.pad(data, (0, -data.numel() % WORD_BYTES)).view(torch.int64)


def digest(x: Tensor) -> Tensor:
    """Return an int64, on the device of x, that depends on each bit of x and on its position."""
    # A tensor of one element is contiguous with any stride, but needs stride 1 to be viewed as bytes: a copy
    # has it.
    words = words_of(x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format))
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(words), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        mixed = torch.arange(start + 1, start + 1 + len(chunk), device=x.device).mul_(GOLDEN).add_(chunk)
        # Not linear: a sum of word × weight stays the same when two words whose low bits are 0 change places.
        mixed ^= mixed >> 32
        mixed *= MIX
        mixed ^= mixed >> 29
        total += mixed.sum()
    return total


def digest_of_facts(facts: Mapping[str, str]) -> int:
    """Return a digest of descriptions as a non-negative int64, to be exchanged between ranks."""
    return int(_digest_bytes(repr(sorted(facts.items())).encode()), 16) >> 1


def version_of(x: PyTree) -> int | None:
    """Return how often a tensor was written in place; None where torch does not count it."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None


def _digest_bytes(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
