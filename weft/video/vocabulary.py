"""Vocabulary: tokenize the captions of a data set; `captions` has that of weft's own sets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from weft.core.errors import InputError

PADDING, UNKNOWN = 0, 1


@dataclass(frozen=True)
class Vocabulary:
    """`words` by id, after padding and the unknown word; a prompt has `length` of them."""

    words: tuple[str, ...]
    length: int

    def __post_init__(self) -> None:
        if len(self.words) < 2 or len(set(self.words)) < len(self.words) or self.length < 1:
            raise InputError(
                "A vocabulary needs at least 2 words, all different, and prompts of at least 1, "
                f"got {len(self.words)} words and prompts of {self.length}."
            )

    @staticmethod
    def of(captions: Iterable[str], most: int = 4096, length: int = 32) -> Vocabulary:
        """Take the most frequent words of captions, ties in alphabetical order."""
        counts = Counter(word for caption in captions for word in _split(caption))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return Vocabulary(("", "?", *ranked[: most - 2]), length)

    def encode(self, text: str) -> list[int]:
        """Return the ids of the first words, padded with 0; 1 is an unknown word."""
        ids = [self._ids.get(word, UNKNOWN) for word in _split(text)][: self.length]
        return ids + [PADDING] * (self.length - len(ids))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: id for id, word in enumerate(self.words)}


def _split(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())
