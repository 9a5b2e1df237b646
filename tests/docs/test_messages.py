"""Examples of help pages and commands of messages parse, and run as those of pages do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.messages import MARKED, commands, help_examples, hints
from tests.docs.parse import parse_command, parse_mention, split
from tests.docs.run import run_command
from weft.cli.main import VERBS

EXAMPLES = list(help_examples())
HINTS = list(hints())
PLAIN = {"demo", "doctor", "calibrate", "models", "run", "verify"}
"""Verbs whose help needs no example."""


def is_complete(command: str) -> bool:
    """A command in a sentence is one to type if it has arguments; else it names a verb or its options."""
    return any(not word.startswith("-") for words in split(command) for word in words[2:])


COMPLETE = list(
    dict.fromkeys(
        [command for _, command in EXAMPLES]
        + [command for _, command in HINTS if is_complete(command) and not command.startswith("pip ")]
    )
)


@pytest.mark.parametrize(("place", "command"), [*EXAMPLES, *HINTS])
def test_commands_of_messages_parse(place: str, command: str) -> None:
    del place
    if is_complete(command):
        parse_command(command)
    else:
        parse_mention(command)


@pytest.mark.parametrize("command", COMPLETE)
def test_commands_of_messages_run(command: str, enter: Callable[[str, str], Path]) -> None:
    enter("messages", command)
    if command not in MARKED and (why := run_command(command, soak=False)):
        pytest.skip(why)


@pytest.mark.soak
@pytest.mark.parametrize("command", COMPLETE)
def test_long_commands_of_messages_run(command: str, enter: Callable[[str, str], Path]) -> None:
    enter("messages", command)
    if command not in MARKED and (why := run_command(command, soak=True)):
        pytest.skip(why)


def test_verbs_show_examples_and_messages_are_searched() -> None:
    assert set(VERBS) - {verb for verb, _ in EXAMPLES} <= PLAIN
    assert set(MARKED) <= set(COMPLETE)
    assert "weft run script.py --ranks 4" in COMPLETE
    assert commands("For MODEL, weft plan MODEL --save FILE writes it; openssl rand -hex 32 > token.") == [
        "weft plan wan2.1-14b --save file.json",
        "openssl rand -hex 32 > token",
    ]
    assert commands("Start weft serve with the same --nodes on every machine.") == ["weft serve"]


@pytest.mark.parametrize("wrong", ["weft plan MODEL --save writes one.", "weft mask --colour"])
def test_a_wrong_hint_is_found(wrong: str) -> None:
    [command] = commands(wrong)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - click's errors, and assertions
        test_commands_of_messages_parse("", command)
