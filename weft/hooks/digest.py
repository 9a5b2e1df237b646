"""Digest the arguments of a call: by name, comparable over ranks and over time."""

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
"""Digested at once: a large input needs no copy of its size."""
MAX_TEXT = 60  # characters of a text in an error
GOLDEN, MIX = -7046029254386353131, -4417276706812531889
"""Odd numbers with bits all over, as in splitmix64."""


def facts(args: Args, kwargs: Kwargs) -> dict[str, str]:
    """Return a description of each argument, by name; descriptions of equal values are equal."""
    return {name: fact(leaf) for name, leaf in leaves_of(args, kwargs).items()}


def leaves_of(args: Args, kwargs: Mapping[str, PyTree], names: Iterable[str] = ()) -> dict[str, PyTree]:
    """Return the leaves of arguments by name, without devices: those may differ by rank."""
    ordered = zip_longest(islice(names, len(args)), args)
    named = {name or f"argument {at}": value for at, (name, value) in enumerate(ordered)}
    leaves: dict[str, PyTree] = {}
    for (first, *rest), leaf in tree_flatten_with_path({**named, **kwargs})[0]:
        assert isinstance(first, MappingKey)
        leaves[f"{first.key}{keystr(tuple(rest))}"] = leaf
    return {name: leaf for name, leaf in leaves.items() if "device" not in name}


def fact(leaf: PyTree) -> str:
    """Describe an argument by its values, if they can be read."""
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
    # One number that was expanded is contiguous, whatever its stride, and cannot be viewed; a copy can.
    words = words_of(x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format))
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(words), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        mixed = torch.arange(start + 1, start + 1 + len(chunk), device=x.device).mul_(GOLDEN).add_(chunk)
        # Sums of products alone would miss values that are exchanged where their bits end in zeros.
        mixed ^= mixed >> 32
        mixed *= MIX
        mixed ^= mixed >> 29
        total += mixed.sum()
    return total


def number_of_facts(facts: Mapping[str, str]) -> int:
    """Return 63 bits that stand for facts."""
    return int(_digest_bytes(repr(sorted(facts.items())).encode()), 16) >> 1


def version_of(x: PyTree) -> int | None:
    """Return how often a tensor was written in place; None where torch does not count it."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None


def _digest_bytes(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
