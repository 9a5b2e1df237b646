"""Commands in help pages and in the messages of weft's code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from tests.docs.blocks import ROOT
from weft.cli import main as front

EXAMPLE = re.compile(r" *(?:Try: )?(weft .*)")
WORD = r"""--?[a-z][\w-]*|"[^"]*"|>|serve|rand|cpu|token|torch|\.?[\w/:,=-]*[\d/:=…][\w./:,=-]*|[\w-]+\.\w+"""
"""An argument in a sentence: an option, or what does not look like a word of English."""
COMMAND = re.compile(rf"\b((?:weft (?:{'|'.join(front.VERBS)})|pip install|openssl)\b(?: (?:{WORD}))*)")
SAMPLES = {
    "FILE": "file.json", "MODEL": "wan2.1-14b", "MODEL_DIR": "./wan", "PROMPT": '"a loom"',
    "SCRIPT": "script.py", "URL": "http://127.0.0.1:8000", "{PROMPT}": "a red circle",
    "--topology {out}": "--topology here.toml", "{out}": "out.mp4",
}  # fmt: skip
"""What stands for the words in capitals, and for expressions of f-strings."""

MARKED = {"weft train recipes/shapes.toml --ranks 2": "90 minutes of two cores"}
"""Commands that are only parsed, and what they need."""


def help_examples() -> Iterator[tuple[str, str]]:
    """Yield verb and command of each line in a verb's help that is one."""
    for verb in front.VERBS:
        for line in (front.load(verb).help or "").splitlines():
            if match := EXAMPLE.fullmatch(line):
                yield verb, match[1]


def commands(message: str) -> list[str]:
    """The commands in a message, with samples for its placeholders."""
    for name, sample in SAMPLES.items():
        message = re.sub(rf"(?<!\w){re.escape(name)}(?![\w}}])", sample, message)
    message = re.sub(r"\[[A-Z]+\] ", "", message)  # optional arguments
    return [match.rstrip(".,:;") for match in COMMAND.findall(message) if "…" not in match]


def hints() -> Iterator[tuple[str, str]]:
    """Yield place and command for the commands in strings of weft's code, without docstrings."""
    for path in sorted((ROOT / "weft").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in _strings(tree):
            for command in commands(_text(node)):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", command


def _strings(node: ast.AST) -> Iterator[Any]:
    for child in ast.iter_child_nodes(node):
        is_text = isinstance(child, ast.Constant) and isinstance(child.value, str)
        if isinstance(child, ast.JoinedStr) or (is_text and not isinstance(node, ast.Expr)):
            yield child
        else:
            yield from _strings(child)


def _text(node: Any) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else f"{{{ast.unparse(node.value)}}}"
