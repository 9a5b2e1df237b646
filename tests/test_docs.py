"""Every code block of README.md and docs/ runs, or says what it needs and is parsed; links lead somewhere.

Blocks run in the order of their page, in an empty folder, on one rank. One is only parsed where the line
above it begins with *Needs …*, or where a comment of a command says that it needs something. What takes
long is parsed here and run by `make soak`: blocks below *Takes …*, and commands that are LONG. A block
below a line that ends with the name of a file (`first.py`:) is also written to it.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from weft.cli import main as front

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PAGES = [str(page.relative_to(ROOT)) for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
FENCE = re.compile(r"^( *)```(\w*)[^\n`]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SHELL = ("", "sh", "console")
OTHERS = {"cd", "curl", "docker", "git", "openssl", "python3", "source", "torchrun"}  # none of ours to parse
LONG = re.compile(
    r"weft (bench|calibrate|demo|evaluate|generate|run|serve|testbed|train|verify)\b|wan2\.1-14b|weft doctor"
)
ENDLESS = ("weft serve",)
GIVEN = {
    "README.md": "import torch; q = k = v = torch.randn(1, 3, 2047, 64)",
    "docs/balance.md": """
import numpy as np
from weft import Layout, Problem
from weft.masks.random import random_mask
layers, steps, counts = 2, 2, np.arange(80).reshape(2, 40) + 9
shards = Layout.even(1024, 8)
problem = Problem(batch=1, heads=40, kv_heads=40, head_dim=128, q=shards, kv=shards)
masks = [random_mask(40, 1024, 1024, block=64, density=(0.3,), seed=seed) for seed in range(layers)]
""",
    "docs/switching.md": """
import torch
from tests.diffusers.toys import Video
from tests.diffusers import test_latte
model, x = Video(), torch.randn(1, 17, 1024, 6)
transformer = test_latte.model(frames=3)
video, t, text = test_latte.video(batch=1, frames=3).values()
spatial = temporal = torch.nn.Identity()
""",
    "docs/tracing.md": """
import torch, weft
from weft.plan.choose import build
mask, q, shards = weft.BlockMask.dense(2, 64), torch.randn(1, 2, 64, 8), weft.Layout.even(64, 8)
problem = weft.Problem(batch=1, heads=2, kv_heads=2, head_dim=8, q=shards, kv=shards)
k, v, schedule = q, q, build("ring", problem, mask)
""",
}
"""What the Python of a page is about, where it does not say so itself."""


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
    def needs(self) -> bool:
        return self.above.startswith("*Needs ")

    @property
    def is_long(self) -> bool:
        return self.above.startswith("*Takes ")

    @property
    def file(self) -> str:
        named = re.search(r"`([\w.]+)`:$", self.above)
        return named[1] if named else ""

    @property
    def commands(self) -> Iterator[str]:
        """Those after `$`, where there are such lines: the others are what is printed then."""
        lines = self.text.replace("\\\n", " ").splitlines()
        shown = [line[2:] for line in lines if line.startswith("$ ")] or lines
        return (line for line in shown if line.strip() and not line.startswith("#"))


def blocks(text: str, page: str = "") -> list[Block]:
    found: list[Block] = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        above = next((line.strip() for line in reversed(before.splitlines()) if line.strip()), "")
        body = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        found.append(Block(page, before.count("\n") + 2, match[2], body, above))
    return found


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
        match words:
            case ["weft", "--help" | "--version"]:
                pass
            case ["weft", verb, *rest]:
                if "--help" not in rest:
                    front.load(verb).make_context(verb, rest)
            case ["make", *targets]:
                known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                assert set(targets) <= set(known), command
            case ["pip", "install", *what]:
                extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
                    "optional-dependencies"
                ]
                named = re.findall(r"\[([\w,]+)\]", " ".join(what))
                assert {extra for names in named for extra in names.split(",")} <= set(extras), command
            case ["python", "-m", module, *_]:
                assert find_spec(module), command
            case ["mkdocs" | "pytest", *_]:
                pass
            case [name, *_]:
                assert name in OTHERS, f"{name}: is it weft's?"
            case _:
                raise ValueError(command)


def run(block: Block, names: dict[str, Any], *, soak: bool = False) -> None:
    """Python, and weft's own commands, that need nothing and are not too long for this."""
    if block.file:
        Path(block.file).write_text(block.text)
    if block.needs or (block.is_long and not soak):
        return
    if block.language == "python":
        exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)
    elif block.language in SHELL:
        for command in block.commands:
            run_command(command, soak=soak)


def run_command(command: str, *, soak: bool) -> None:
    if (
        re.search(r"#.*\bneeds\b", command)
        or command.startswith(ENDLESS)
        or (LONG.search(command) and not soak)
    ):
        return
    for words in split(command):
        if words[0] == "weft":
            with pytest.raises(SystemExit) as end:
                front.main(words[1:])
            assert not end.value.code, command


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, soak: bool = False) -> None:
    monkeypatch.chdir(folder)
    (folder / "recipes").symlink_to(ROOT / "recipes")
    names: dict[str, Any] = {"__name__": "docs"}
    exec(GIVEN.get(page, ""), names)
    for block in blocks((ROOT / page).read_text(encoding="utf-8"), page):
        try:
            parse(block)
            run(block, names, soak=soak)
        except Exception as error:
            raise AssertionError(f"{page}, line {block.line}: {error!r}") from error
    for figure in folder.glob("*.svg"):
        assert figure.read_text() == (ROOT / "docs/figures" / figure.name).read_text(), (
            "what is shown is not drawn"
        )


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs_or_says_what_it_needs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_page(page, tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("page", PAGES)
def test_long_commands_run_too(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(page, tmp_path, monkeypatch, soak=True)


def slugs(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def dead_links(page: Path) -> list[str]:
    dead: list[str] = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        to = page.parent / path if path else page
        if not to.exists() or (anchor and anchor not in slugs(to.read_text(encoding="utf-8"))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert dead_links(ROOT / page) == []


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [
        page for page in PAGES if page != "README.md" and page.removeprefix("docs/") not in contents
    ] == []


# What the above would say of pages that are wrong.


@pytest.mark.parametrize(
    "wrong",
    [
        "```python\nimport weft\nweft.Layout.odd(3, 2)\n```",
        "*Needs a GPU.*\n\n```python\ndef f(:\n```",
        "```sh\nweft mask sta --colour red\n```",
        "```sh\nweft weave\n```",
        "```sh\nweft train recipe.toml --ranks two\n```",
        "*Needs a server.*\n```sh\nweft serve --prot 8000\n```",
        "```console\n$ weft mask nothing-such\nno\n```",
        "```sh\nweft mask --help && weft mask stta\n```",
        "```sh\npip install 'weft[everything]'\n```",
        "```sh\nmake coffee\n```",
        "```sh\npython -m bench.nothing\n```",
        "```sh\nsudo anything\n```",
        "```\na picture\n```",
        "```toml\n[a\n```",
    ],
)
def test_a_wrong_block_is_found(wrong: str) -> None:
    [block] = blocks(f"# Page\n\n{wrong}\n")
    with pytest.raises(BaseException):  # noqa: B017, PT011 - assertions, click's errors, those of Python
        parse(block)
        run(block, {})


def test_a_block_that_needs_something_is_not_run() -> None:
    [block] = blocks("*Needs a GPU.*\n\n```python\n1 / 0\n```\n")
    run(block, {})


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One head\n\n[a](#one-head) [b](#no-head) [c](page.md) [d](other.md) [e](https://weft)\n"
    )
    assert dead_links(page) == ["#no-head", "other.md"]
