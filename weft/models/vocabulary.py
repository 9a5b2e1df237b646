"""Vocabulary: the words of the captions that somebody else's model was trained on; weft's own has `words`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from weft.core import tables
from weft.core.errors import InputError

PADDING, UNKNOWN = 0, 1


@dataclass(frozen=True)
class Vocabulary:
    """`words` by id, of which the first two are none; a prompt has `length` of them."""

    words: tuple[str, ...]
    length: int

    def __post_init__(self) -> None:
        if len(self.words) < 2 or len(set(self.words)) < len(self.words) or self.length < 1:
            raise InputError(f"{len(self.words)} words, {self.length} in a prompt, are no vocabulary.")

    @staticmethod
    def of(captions: Iterable[str], most: int = 4096, length: int = 32) -> Vocabulary:
        """The words that captions use most, of equally frequent ones the first by alphabet."""
        counts = Counter(word for caption in captions for word in _split(caption))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return Vocabulary(("", "?", *ranked[: most - 2]), length)

    def encode(self, text: str) -> list[int]:
        """The ids of the first words, padded with 0; 1 is a word that is not known."""
        ids = [self._ids.get(word, UNKNOWN) for word in _split(text)][: self.length]
        return ids + [PADDING] * (self.length - len(ids))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> Vocabulary:
        return tables.read(Vocabulary, said, "The model's vocabulary")

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: id for id, word in enumerate(self.words)}


def _split(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())
