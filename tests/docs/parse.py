"""Parse what cannot run here: weft's options, targets of make, extras of pip, modules, Python, TOML, JSON."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from tests.docs.blocks import ROOT, SHELL, Block
from weft.cli import main as front

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OTHERS = {"cp", "curl", "docker", "git", "openssl", "ping", "source", "systemctl", "useradd"}
"""Commands of others, which have no options of weft's."""
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def parse(block: Block) -> None:
    if block.language == "python":
        compile("\n" * (block.line - 1) + block.text, block.page, "exec")
    elif block.language in SHELL:
        for command in block.commands:
            parse_command(command)
    elif block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language != "text":
        raise ValueError(f"```{block.language} is none of python, toml, json, text, and of what is a command")


def split(command: str) -> Iterator[list[str]]:
    """The words of each command of a line, without comments and what is set before it."""
    words: list[str] = []
    for word in [*shlex.split(command, comments=True), "&&"]:
        if word != "&&":
            words.append(word)
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        yield words
        words = []


def parse_command(command: str) -> None:
    for words in split(command):
        parse_words(words)


def parse_words(words: list[str]) -> None:
    match words:
        case ["weft", "--help" | "--version"] | ["weft", _, "--help"]:
            pass
        case ["weft", verb, *rest] if verb in front.VERBS:
            front.load(verb).make_context(verb, rest)
        case ["torchrun", *rest]:
            _parse_torchrun(rest)
        case ["python", "-m", module, *rest]:
            _parse_module(module, rest)
        case ["make", *targets]:
            known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(targets) <= set(known), f"make has no target of {targets}"
        case ["pip", "install" | "download", *what]:
            _parse_pip(what)
        case ["sudo", *rest]:
            parse_words(rest)
        case [name, *_]:
            assert name in OTHERS, f"{words}: is it weft's?"
        case _:
            raise ValueError("no command")


def _parse_module(module: str, words: list[str]) -> None:
    assert find_spec(module), f"there is no module {module}"
    if module in ("weft", "weft.cli.main"):
        parse_words(["weft", *words])


def _parse_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words)
    script = [options.training_script, *options.training_script_args]
    if options.module:
        parse_words(["python", "-m", *script])
    elif options.no_python:
        parse_words(script)
    else:
        assert script[0].endswith(".py"), script


def _parse_pip(words: list[str]) -> None:
    extras = PROJECT["optional-dependencies"]
    named = {extra for names in re.findall(r"\[([\w,]+)\]", " ".join(words)) for extra in names.split(",")}
    assert named <= set(extras), f"there is no extra of {named}"
    assert not any(re.match(r"weft\b", word) for word in words), "weft is not on an index; a clone is '.'"


def parse_mention(command: str) -> None:
    """Check a command in prose, which may leave out arguments: its verb and its options."""
    match shlex.split(command, comments=True):
        case ["weft", verb, *rest] if not verb.startswith("-"):
            known = {name for option in front.load(verb).params for name in option.opts}
            own = rest[: rest.index("--")] if "--" in rest else rest
            options = {word for word in own if re.match(r"--?[a-z]", word)}
            assert options <= known | {"--help", "-h"}, f"weft {verb} has no {options - known}"
        case ["torchrun", *_] | ["pip"] | ["weft", *_]:
            if "…" not in command:
                parse_command(command)
        case words:
            parse_words(words)
