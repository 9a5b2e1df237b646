"""Words: the vocabulary of the captions that the shipped model was trained on, and how a prompt becomes it.

A prompt has one or two phrases, joined by "and" (side by side) or "over" (the first passes in front):
"a red circle moving left over a blue square". Each phrase fills four slots - colour, kind, motion, joint -
so a word's place alone says which shape it is about, and a small model need not learn grammar.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from difflib import get_close_matches

from weft.core.errors import InputError

COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "white")
KINDS = ("circle", "square", "triangle", "star")
CAMERA = "camera"
DIRECTIONS = ("left", "right", "up", "down")
STILL, SHAKING = "still", "shaking"
JOINTS = ("and", "over")

# A word's place is its id in every trained model: only ever append.
WORDS = ("", *COLOURS, *KINDS, CAMERA, *DIRECTIONS, STILL, SHAKING, *JOINTS)
LENGTH = 8
MAX_SHOWN_WORDS, MAX_SHOWN_LETTERS, MAX_SHOWN_PROMPT = 5, 40, 120

_SLOTS = {"colour": COLOURS, "kind": (*KINDS, CAMERA), "motion": (*DIRECTIONS, STILL, SHAKING)}
_SLOT_OF = {word: slot for slot, words in _SLOTS.items() for word in words}
_MEANT = {
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
_SILENT = re.compile(
    "an?|the|is|are|that|which|its?|of|in|at|to|on|there|video|clip|shape|one|towards?|"
    "(go|mov|fl|fly|drift|slid|pan|pann|stand)(e|s|es|ies|ing|y)?"
)


@dataclass(frozen=True)
class Phrase:
    """What a prompt says of one shape, "" where it is silent; `joint` leads to the next phrase."""

    colour: str = ""
    kind: str = ""
    motion: str = ""
    joint: str = ""

    def __str__(self) -> str:
        verb = {STILL: "", SHAKING: SHAKING}.get(self.motion)
        if verb is None:
            verb = f"{'panning' if self.kind == CAMERA else 'moving'} {self.motion}".rstrip()
        article = "an" if (self.colour or self.kind)[:1] in "aeiou" else "a"
        return " ".join(word for word in (article, self.colour, self.kind, verb, self.joint) if word)


def parse(prompt: str) -> tuple[Phrase, ...]:
    """The one or two phrases of a prompt, or none; a shape of which no motion is told stands still."""
    phrases = [Phrase()]
    for word in _known(prompt):
        last = phrases[-1]
        if word in JOINTS:
            phrases[-1] = replace(last, joint=word)
            phrases.append(Phrase())
            continue
        slot = _SLOT_OF[word]
        if getattr(last, slot) not in ("", word):
            raise InputError(
                f"{prompt[:MAX_SHOWN_PROMPT]!r} tells two things at once of one shape: "
                f"{getattr(last, slot)} and {word}.",
                hint='Join two shapes by "and" or "over".',
            )
        phrases[-1] = replace(last, **{slot: word})
    if phrases == [Phrase()]:
        return ()
    if len(phrases) > 2 or any(not (p.colour or p.kind) for p in phrases):
        raise InputError(
            f"{prompt[:MAX_SHOWN_PROMPT]!r} is not one shape, nor two that are joined.",
            hint='Try "a red circle moving left over a blue square".',
        )
    return tuple(p if p.motion else replace(p, motion=STILL) for p in phrases)


def spell(phrases: Sequence[Phrase]) -> str:
    """The caption of phrases; `parse` reads it back."""
    return " ".join(map(str, phrases))


def encode(prompt: str) -> list[int]:
    """The ids of a prompt's words, each in its slot; 0 where nothing is said, and nowhere else."""
    ids = [WORDS.index(word) for phrase in parse(prompt) for word in astuple(phrase)]
    return ids + [0] * (LENGTH - len(ids))


def _known(prompt: str) -> list[str]:
    words = [_meant(word) for word in re.findall(r"[^\W_]+", prompt.lower()) if not _SILENT.fullmatch(word)]
    unknown = [word for word in dict.fromkeys(words) if word not in WORDS]
    if unknown:
        # A prompt may come from anyone: neither the search nor the message grows with it.
        strange = [word[:MAX_SHOWN_LETTERS] for word in unknown[:MAX_SHOWN_WORDS]]
        near = {w: get_close_matches(w, (*WORDS[1:], *_MEANT), n=2, cutoff=0.6) for w in strange}
        guesses = "; ".join(f"for {w}: {' or '.join(found)}" for w, found in near.items() if found)
        raise InputError(
            f"The model does not know {', '.join(strange)}{', …' * (len(unknown) > len(strange))}.",
            hint=(f"Near ones {guesses}. " if guesses else "") + f"It knows {', '.join(WORDS[1:])}.",
        )
    return words


def _meant(word: str) -> str:
    """The word of the vocabulary that a variant or a plural stands for, or the word itself."""
    for guess in (word, word.removesuffix("s")):
        if guess in _MEANT or guess in WORDS:
            return _MEANT.get(guess, guess)
    return word
