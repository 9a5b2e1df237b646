"""Help pages: usage and examples as they are typed, options, and verbs by purpose."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import cleandoc
from textwrap import fill, wrap
from typing import Any

from typer.core import TyperArgument, TyperCommand

from weft.cli import output

WIDTH = 80
MAX_LABEL = 24
"""Columns of an option's name; the text of a longer one begins on the next line."""
EXAMPLE = re.compile(r"(?:Try: )?(weft .*)")
PLACEHOLDERS = {"int": "N", "float": "NUMBER", "path": "PATH", "file": "PATH"}

Entries = Sequence[tuple[str, str]]


class VerbCommand(TyperCommand):
    """A verb, whose help is a page of this module."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        del ctx
        return ["[OPTIONS]", *map(_argument, self._arguments())]

    def get_help(self, ctx: Any) -> str:
        text, examples = _paragraphs(cleandoc(self.help or ""))
        arguments = [(_argument(each), each.help or "") for each in self._arguments()]
        usage = f"{ctx.command_path} {' '.join(self.collect_usage_pieces(ctx))}"
        return page(text, usage, examples, {"Arguments": arguments, "Options": list(options(self, ctx))})

    def _arguments(self) -> list[TyperArgument]:
        return [each for each in self.params if isinstance(each, TyperArgument)]


def options(command: Any, ctx: Any) -> Iterator[tuple[str, str]]:
    """Yield the options of a command and what they do."""
    for option in command.get_params(ctx):
        if not isinstance(option, TyperArgument) and (record := option.get_help_record(ctx)) is not None:
            name, text = record
            yield re.sub(r"<(?:list\[)?(\w+)\]?>", _placeholder, name), " ".join(text.split())


def page(text: Iterable[str], usage: str, examples: Entries, sections: Mapping[str, Entries]) -> str:
    """Return the page: what the command does, its usage, examples on lines of their own, and its options."""
    blocks = [fill(paragraph, WIDTH) for paragraph in text]
    blocks.insert(1, f"{_heading('Usage')} {usage}")
    if examples:
        blocks.insert(2, "\n".join([_heading("Examples"), *_examples(examples)]))
    for name, entries in sections.items():
        if entries:
            size = min(MAX_LABEL, max(len(label) for label, _ in entries))
            lines = [line for entry in entries for line in _entry(*entry, size)]
            blocks.append("\n".join([_heading(name), *lines]))
    return "\n\n".join(blocks)


def _paragraphs(text: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the paragraphs of a docstring, and its examples, each with the paragraph before it."""
    plain: list[str] = []
    examples: list[tuple[str, str]] = []
    for paragraph in text.split("\n\n"):
        lines = [EXAMPLE.fullmatch(line) for line in paragraph.splitlines()]
        if not all(lines):
            plain.append(" ".join(paragraph.split()))
            continue
        reason = plain.pop() if plain and plain[-1].endswith(":") else ""
        examples += [(line[1], reason) for line in lines if line]
    return plain, examples


def _examples(examples: Entries) -> Iterator[str]:
    for command, reason in examples:
        if reason:
            yield fill(reason, WIDTH, initial_indent="  # ", subsequent_indent="  # ")
        yield f"  {command}"


def _entry(label: str, text: str, size: int) -> Iterator[str]:
    first, *others = wrap(text, WIDTH - size - 4) or [""]
    if len(label) > size:
        yield f"  {label}"
        others = [first, *others]
    else:
        yield f"  {label:<{size}}  {first}".rstrip()
    for line in others:
        yield " " * (size + 4) + line


def _argument(argument: TyperArgument) -> str:
    if argument.metavar:
        return argument.metavar
    name = (argument.name or "").upper()
    return (name if argument.required else f"[{name}]") + "..." * (argument.nargs == -1)


def _placeholder(match: re.Match[str]) -> str:
    return PLACEHOLDERS.get(match[1], "TEXT")


def _heading(name: str) -> str:
    return output.paint(f"{name}:", bold=True, fg="green")
