"""Prompts become words in their slots, however they are spelled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InputError
from weft.video.captions import COLORS, JOINTS, KINDS, LENGTH, WORDS, Phrase, encode, parse, spell

RED_BALL = ["red", "circle", "left", "over", "blue", "square", "still", ""]


@pytest.mark.parametrize(
    "prompt",
    [
        "a red circle moving left over a blue square",
        "A RED circle, moving left, over the blue square!",
        "the red ball goes leftwards in front of a blue box standing still",
        "  red discs flying to the left\nacross blue squares.",
        "a circle that is red, moves left over a static blue square",
    ],
)
def test_one_thing_said_in_many_ways(prompt: str) -> None:
    assert [WORDS[i] for i in encode(prompt)] == RED_BALL


def test_nothing_said_is_zero() -> None:
    assert encode("") == encode(" a , the ") == [0] * LENGTH
    assert [WORDS[i] for i in encode("a circle moving up")] == ["", "circle", "up", "", "", "", "", ""]
    assert [WORDS[i] for i in encode("a shaky camera")][:3] == ["", "camera", "shaking"]


def test_ids_are_those_that_models_were_trained_with() -> None:
    assert WORDS.index("red") == 1 and WORDS.index("circle") == 9 and WORDS.index("left") == 14
    assert len(set(WORDS)) == len(WORDS) == 22


@given(st.lists(st.builds(Phrase, *map(st.sampled_from, (COLORS, KINDS, ("left", "still")))), max_size=2))
def test_what_is_spelled_is_read_back(phrases: list[Phrase]) -> None:
    told = [Phrase(p.color, p.kind, p.motion, j) for p, j in zip(phrases, ("over", ""), strict=False)]
    told[-1:] = [Phrase(p.color, p.kind, p.motion) for p in told[-1:]]
    assert parse(spell(told)) == tuple(told)
    assert len(encode(spell(told))) == LENGTH


def test_unknown_words_are_named_with_near_ones() -> None:
    with pytest.raises(InputError, match=r"does not know circel, bleu\..*circle.*blue"):
        encode("a red circel moving left and a bleu star")
    with pytest.raises(InputError, match=r"does not know xyzzy\. It knows red, .*over"):
        encode("a red xyzzy")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("a red blue circle", "red and blue"),
        ("a red circle a blue square", "red and blue"),
        ("a circle moving left right", "left and right"),
        ("a circle moving up and left", "must be one shape"),
        ("over a blue square", "must be one shape"),
        ("a circle and", "must be one shape"),
        (" and ".join(["a red circle"] * 3), "must be one shape"),
    ],
)
def test_what_cannot_be_told_is_refused(prompt: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        encode(prompt)


def test_joints_do_not_fill_other_slots() -> None:
    first, last = (encode(f"a star {joint} a circle") for joint in JOINTS)
    assert [a == b for a, b in zip(first, last, strict=True)] == [True] * 3 + [False] + [True] * 4


def test_a_long_prompt_of_unknown_words_has_a_short_error() -> None:
    prompt = " ".join(f"{'x' * 100}{at}" for at in range(3000))
    with pytest.raises(InputError) as error:
        parse(prompt)
    assert len(str(error.value)) < 600
    for prompt in ("red " * 2000 + "blue", "red over " * 1000):
        with pytest.raises(InputError) as error:
            parse(prompt)
        assert len(str(error.value)) < 300
