"""Links of the pages lead somewhere, and every page is in the contents."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.blocks import FENCE, PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")


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


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One head\n\n[a](#one-head) [b](#no-head) [c](page.md) [d](other.md) [e](https://weft)\n"
    )
    assert dead_links(page) == ["#no-head", "other.md"]
