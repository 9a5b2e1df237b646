"""The code blocks of the pages, and the commands in their prose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [str(page.relative_to(ROOT)) for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
FENCE = re.compile(r"^( *)```(\w*)[^\n`]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:weft|pip|make|python -m|torchrun|openssl) [^`]*)`")
SHELL = ("", "sh", "console")
NEEDS = re.compile(r"#.*\bneeds (.*)")


@dataclass(frozen=True)
class Block:
    """What is between two fences."""

    page: str
    line: int
    language: str
    text: str
    above: str
    """The last line of text before it."""

    @property
    def needs(self) -> str:
        """What this machine lacks: the block is only parsed."""
        return self.above.removeprefix("*Needs ").rstrip(":*") if self.above.startswith("*Needs ") else ""

    @property
    def is_long(self) -> bool:
        return self.above.startswith("*Takes ")

    @property
    def file(self) -> str:
        named = re.search(r"`([\w.]+)`:$", self.above)
        return named[1] if named else ""

    @property
    def commands(self) -> list[str]:
        """Those after `$`, where there are such lines: the others are what is printed then."""
        lines = self.text.replace("\\\n", " ").splitlines()
        shown = [line[2:] for line in lines if line.startswith("$ ")] or lines
        return [line for line in shown if line.strip() and not line.startswith("#")]


def blocks(text: str, page: str = "") -> list[Block]:
    every: list[Block] = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        above = next((line.strip() for line in reversed(before.splitlines()) if line.strip()), "")
        body = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        every.append(Block(page, before.count("\n") + 2, match[2], body, above))
    return every


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def page_blocks(page: str) -> list[Block]:
    return blocks(read(page), page)


def needs(command: str) -> str:
    """What a comment says that this machine lacks for one command of a block."""
    match = NEEDS.search(command)
    return match[1].rstrip(".") if match else ""


def marked(block: Block) -> Iterator[str]:
    """Yield `page:line: what it needs` of what is not executed."""
    if block.needs:
        yield f"{block.page}:{block.line}: needs {block.needs}"
    for number, line in enumerate(block.text.splitlines()):
        if not block.needs and block.language in SHELL and needs(line):
            yield f"{block.page}:{block.line + number}: needs {needs(line)}"


def inline_commands(page: str) -> list[str]:
    return INLINE.findall(FENCE.sub("", read(page)))
