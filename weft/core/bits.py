"""Bits: count and add packed bits, 64 at a time; each binary digit of the sums is a word of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


def to_words(bits: Bytes) -> Words:
    """Return the bits of each pattern as words, padded with zeros: [patterns, words]."""
    flat = bits.reshape(len(bits), -1)
    missing = -flat.shape[1] % 8
    return np.ascontiguousarray(np.pad(flat, ((0, 0), (0, missing))) if missing else flat).view(np.uint64)


def count_ones(packed: npt.NDArray[np.unsignedinteger[Any]]) -> npt.NDArray[np.int64]:
    """Count the bits that are set along the last axis."""
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(packed).sum(axis=-1, dtype=np.int64)
    table = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)
    return table[packed.view(np.uint8)].sum(axis=-1, dtype=np.int64)  # NumPy 1 cannot count bits


def add_up(patterns: Sequence[Words], times: Sequence[int]) -> npt.NDArray[np.integer]:
    """Add up each bit over one or more patterns, pattern p counted times[p]."""
    planes = [
        [word for word, time in zip(patterns, times, strict=True) if time >> digit & 1]
        for digit in range(sum(times).bit_length())
    ]
    for digit, plane in enumerate(planes):
        # A full adder: three bits (or two) of one weight become one of this weight and one of the next.
        while len(plane) > 1:
            odd, carry = plane[-1] ^ plane[-2], plane.pop() & plane.pop()
            if plane:
                carry |= odd & plane[-1]
                odd ^= plane.pop()
            plane.append(odd)
            planes[digit + 1].append(carry)
    return _unpack([(plane[0] if plane else np.zeros_like(patterns[0])).view(np.uint8) for plane in planes])


def _unpack(planes: Sequence[Bytes]) -> npt.NDArray[np.integer]:
    """Return the numbers whose binary digits are the planes, lowest first."""
    if len(planes) > 8:  # counts that do not fit into a byte
        return (_unpack(planes[8:]).astype(np.int64) << 8) + _unpack(planes[:8])
    total = np.unpackbits(planes[-1]).view(np.uint64)
    for plane in planes[-2::-1]:
        # One byte per bit, eight to a word: doubling the word doubles each of its bytes.
        total += total
        total |= np.unpackbits(plane).view(np.uint64)
    return total.view(np.uint8)
