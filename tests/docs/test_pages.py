"""Every code block of README.md and docs/ runs as printed, or says what it needs and is parsed.

Blocks run in the order of their page, on one rank, in a folder with what inputs.py makes. A block is only
parsed where the line above it begins with *Needs …*, and a command where its comment says that it needs
something; these are few, and listed. What takes long runs in `make soak`: blocks below *Takes …*, and LONG
commands. A block below a line that ends with the name of a file (`first.py`:) is also written to it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks, inline_commands, marked, page_blocks, read
from tests.docs.inputs import INPUTS, PRELUDES
from tests.docs.parse import parse, parse_mention
from tests.docs.run import run

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")
Enter = Callable[[str, str], Path]


def run_page(page: str, enter: Enter, *, soak: bool = False) -> None:
    folder = enter(page, read(page))
    names: dict[str, Any] = {"__name__": "docs"}
    exec(PRELUDES.get(page, ""), names)
    obstacles: list[str] = []
    for block in page_blocks(page):
        try:
            parse(block)
            obstacles += run(block, names, soak=soak)
        except Exception as error:
            raise AssertionError(f"{page}, line {block.line}: {error!r}") from error
    for figure in folder.glob("*.svg"):
        assert figure.read_text() == (ROOT / "docs/figures" / figure.name).read_text(), (
            "what is shown is not drawn"
        )
    if obstacles:
        pytest.skip("; ".join(obstacles))


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs_or_says_what_it_needs(page: str, enter: Enter) -> None:
    run_page(page, enter)


@pytest.mark.soak
@pytest.mark.parametrize("page", PAGES)
def test_long_commands_run_too(page: str, enter: Enter) -> None:
    run_page(page, enter, soak=True)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "SECURITY.md", "examples/README.md"])
def test_commands_in_prose_have_options_that_exist(page: str) -> None:
    for command in inline_commands(page):
        try:
            parse_mention(command)
        except BaseException as error:
            raise AssertionError(f"{page}: `{command}`: {error!r}") from error


@pytest.mark.parametrize("page", [page for page in INPUTS if page.endswith(".md")])
def test_pages_name_the_files_that_are_made_for_them(page: str) -> None:
    assert [name for name in INPUTS[page] if name not in read(page)] == []


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
        "```sh\npip install '.[everything]'\n```",
        "```sh\npip install 'weft[serve]'\n```",
        "```sh\nmake coffee\n```",
        "```sh\npython -m bench.nothing\n```",
        "```sh\ntorchrun --nproc-per-node 2 -m weft verify --rank 2\n```",
        "```sh\ntorchrun --nproc-per-nude 2 script.py\n```",
        "```sh\nopenssl rand -hax 32\n```",
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


@pytest.mark.parametrize(
    "wrong", ["weft mask --colour", "weft weave MODEL", "python -m bench.nothing", "make tea"]
)
def test_a_wrong_mention_is_found(wrong: str) -> None:
    with pytest.raises(BaseException):  # noqa: B017, PT011
        parse_mention(wrong)


def test_a_block_that_needs_something_is_not_run() -> None:
    [block] = blocks("*Needs a GPU.*\n\n```python\n1 / 0\n```\n")
    run(block, {})
    assert list(marked(block)) == [":4: needs a GPU."]
