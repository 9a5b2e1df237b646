"""Captions of weft's own data sets: their grammar, their vocabulary, and prompts as word ids.

A prompt has one or two phrases, joined by "and" (side by side) or "over" (the first passes in front):
"a red circle moving left over a blue square". Each phrase fills four slots (color, kind, motion, joint), so
the position of a word alone identifies its shape, and a small model need not learn grammar.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from difflib import get_close_matches

from weft.core.errors import InputError
from weft.video.vocabulary import Vocabulary

COLORS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "white")
KINDS = ("circle", "square", "triangle", "star")
CAMERA = "camera"
DIRECTIONS = ("left", "right", "up", "down")
STILL, SHAKING = "still", "shaking"
JOINTS = ("and", "over")

# The index of a word is its id in every trained model: only ever append.
WORDS = ("", *COLORS, *KINDS, CAMERA, *DIRECTIONS, STILL, SHAKING, *JOINTS)
LENGTH = 8
MAX_SHOWN_WORDS, MAX_SHOWN_LETTERS, MAX_SHOWN_PROMPT = 5, 40, 120

_SLOTS = {"color": COLORS, "kind": (*KINDS, CAMERA), "motion": (*DIRECTIONS, STILL, SHAKING)}
_SLOT_OF = {word: slot for slot, words in _SLOTS.items() for word in words}
_SYNONYMS = {
    **dict.fromkeys(("ball", "disc", "disk", "dot"), "circle"),
    **dict.fromkeys(("box", "block", "rectangle"), "square"),
    **dict.fromkeys(("violet", "magenta"), "purple"),
    **dict.fromkeys(("turquoise", "teal", "aqua"), "cyan"),
    **dict.fromkeys(("static", "motionless", "resting", "stationary"), STILL),
    **dict.fromkeys(("shakes", "shaky"), SHAKING),
    **dict.fromkeys(("beside", "with", "plus"), "and"),
    **dict.fromkeys(("front", "across"), "over"),
    **{f"{way}{end}": way for way in DIRECTIONS for end in ("ward", "wards")},
}
_STOP_WORDS = re.compile(
    "an?|the|is|are|that|which|its?|of|in|at|to|on|there|video|clip|shape|one|towards?|"
    "(go|mov|fl|fly|drift|slid|pan|pann|stand)(e|s|es|ies|ing|y)?"
)


@dataclass(frozen=True)
class Phrase:
    """One shape of a prompt, "" for an empty slot; `joint` leads to the next phrase."""

    color: str = ""
    kind: str = ""
    motion: str = ""
    joint: str = ""

    def __str__(self) -> str:
        verb = {STILL: "", SHAKING: SHAKING}.get(self.motion)
        if verb is None:
            verb = f"{'panning' if self.kind == CAMERA else 'moving'} {self.motion}".rstrip()
        article = "an" if (self.color or self.kind)[:1] in "aeiou" else "a"
        return " ".join(word for word in (article, self.color, self.kind, verb, self.joint) if word)


def parse(prompt: str) -> tuple[Phrase, ...]:
    """Return the phrases of a prompt, none to two; a shape without a motion stands still."""
    phrases = [Phrase()]
    for word in _known_words(prompt):
        last = phrases[-1]
        if word in JOINTS:
            phrases[-1] = replace(last, joint=word)
            phrases.append(Phrase())
            continue
        slot = _SLOT_OF[word]
        if getattr(last, slot) not in ("", word):
            raise InputError(
                f"{prompt[:MAX_SHOWN_PROMPT]!r} gives one shape two values of {slot}: "
                f"{getattr(last, slot)} and {word}.",
                hint='Join two shapes by "and" or "over".',
            )
        phrases[-1] = replace(last, **{slot: word})
    if phrases == [Phrase()]:
        return ()
    if len(phrases) > 2 or any(not (p.color or p.kind) for p in phrases):
        raise InputError(
            f"{prompt[:MAX_SHOWN_PROMPT]!r} must be one shape, or two joined by a word.",
            hint='Try "a red circle moving left over a blue square".',
        )
    return tuple(p if p.motion else replace(p, motion=STILL) for p in phrases)


def spell(phrases: Sequence[Phrase]) -> str:
    """Return the caption of phrases; the inverse of `parse`."""
    return " ".join(map(str, phrases))


def encode(prompt: str) -> list[int]:
    """Return the ids of a prompt's words, each in its slot, and 0 in empty slots only."""
    ids = [WORDS.index(word) for phrase in parse(prompt) for word in astuple(phrase)]
    return ids + [0] * (LENGTH - len(ids))


class SceneVocabulary(Vocabulary):
    """The words above, whose place in a prompt follows from its grammar."""

    def encode(self, text: str) -> list[int]:
        return encode(text)


SCENE_VOCABULARY = SceneVocabulary(WORDS, LENGTH)


def _known_words(prompt: str) -> list[str]:
    words = re.findall(r"[^\W_]+", prompt.lower())
    words = [_canonical(word) for word in words if not _STOP_WORDS.fullmatch(word)]
    unknown = [word for word in dict.fromkeys(words) if word not in WORDS]
    if unknown:
        # A prompt is untrusted: bound the search and the message.
        shown = [word[:MAX_SHOWN_LETTERS] for word in unknown[:MAX_SHOWN_WORDS]]
        near = {w: get_close_matches(w, (*WORDS[1:], *_SYNONYMS), n=2, cutoff=0.6) for w in shown}
        guesses = "; ".join(f"for {w}: {' or '.join(matches)}" for w, matches in near.items() if matches)
        raise InputError(
            f"The model does not know {', '.join(shown)}{', …' * (len(unknown) > len(shown))}.",
            hint=(f"Near ones {guesses}. " if guesses else "") + f"It knows {', '.join(WORDS[1:])}.",
        )
    return words


def _canonical(word: str) -> str:
    """Map a synonym or a plural to its word in the vocabulary; return other words unchanged."""
    for guess in (word, word.removesuffix("s")):
        if guess in _SYNONYMS or guess in WORDS:
            return _SYNONYMS.get(guess, guess)
    return word
