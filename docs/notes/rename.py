"""Apply the table of renames beside this file: modules, top-level names, members and local names.

    python docs/notes/rename.py [TABLE.tsv …]      in the root of a clone; without arguments every table here

A table has four columns, separated by tabs; a line that begins with # is a comment:

    module  -                  weft.models.dit   weft.video.transformer   move a file, fix imports and paths
    name    weft.serve.wire    VideoAsks         VideoRequest             a class, function or constant
    member  weft/serve/*.py    hear              on_message               every NAME token in these files
    local   weft/run/call.py   Class.method      found=schedule           a parameter or local of one function

Applying a table twice changes nothing more, so after a merge it is applied again.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("weft", "bench", "tests", "examples", "docs")
TEXT = ("*.md", "*.toml", "*.yml", "*.yaml", "Makefile", "Dockerfile", ".ci/run", "*.js", "*.html")


def main(tables: list[str]) -> None:
    paths = [Path(t) for t in tables] or sorted(Path(__file__).parent.glob("*.tsv"))
    rows = [line.split("\t") for path in paths for line in path.read_text().splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows if row[0] and not row[0].startswith("#")]
    move_modules([(old, new) for kind, _, old, new in rows if kind == "module"])
    for kind, where, old, new in rows:
        if kind == "name":
            rename_top_level(where, old, new)
        elif kind == "member":
            for path in {p for glob in where.split(",") for p in ROOT.glob(glob)}:
                edit(path, lambda text, o=old, n=new: replace_names(text, o, n, attributes=True))
        elif kind == "local":
            before, _, after = new.partition("=")
            rename_local(ROOT / where, old, before, after)


def code_files() -> Iterator[Path]:
    for folder in CODE:
        yield from (p for p in (ROOT / folder).rglob("*.py") if p != Path(__file__).resolve())


def text_files() -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files", *TEXT], cwd=ROOT, capture_output=True, text=True, check=True)
    yield from (ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file())


def edit(path: Path, change: Callable[[str], str]) -> None:
    if not path.is_file():
        return
    before = path.read_text()
    after = change(before)
    if after != before:
        path.write_text(after)


def path_of(module: str) -> Path:
    base = ROOT / module.replace(".", "/")
    return base if base.is_dir() else base.with_suffix(".py")


def move_modules(moves: list[tuple[str, str]]) -> None:
    for old, new in moves:
        source = path_of(old)
        if not source.exists():
            continue
        target = ROOT / new.replace(".", "/")
        target = target if source.is_dir() else target.with_suffix(".py")
        if target.exists():  # merged into another module by hand
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", str(source), str(target)], cwd=ROOT, check=True)
    table = dict(moves)
    dotted = re.compile(
        r"(?<![\w.])(" + "|".join(map(re.escape, sorted(table, key=len, reverse=True))) + r")(?!\w)"
    )
    slashed = {old.replace(".", "/"): new.replace(".", "/") for old, new in moves}
    slashed |= {old.removeprefix("weft/"): new.removeprefix("weft/") for old, new in slashed.items()}
    slashes = re.compile(
        r"(?<!\w)(?<!\w/)(" + "|".join(map(re.escape, sorted(slashed, key=len, reverse=True))) + r")(?![\w/])"
    )

    def change(text: str) -> str:
        text = split_from_imports(text, table)
        text = dotted.sub(lambda m: table[m[1]], text)
        return slashes.sub(lambda m: slashed[m[1]], text)

    if moves:
        for path in (*code_files(), *text_files()):
            edit(path, change)


def split_from_imports(text: str, table: dict[str, str]) -> str:
    """`from weft.models import dit, media` with modules that have moved: one import for each."""
    pattern = re.compile(r"^( *)from ([\w.]+) import ([\w, ]+?)( *#.*)?$", re.M)
    renamed: dict[str, str] = {}

    def change(match: re.Match[str]) -> str:
        indent, package, names, tail = match[1], match[2], match[3], match[4] or ""
        kept, lines = [], []
        for item in names.split(","):
            name, _, alias = item.strip().partition(" as ")
            new = table.get(f"{package}.{name}")
            if new is None:
                kept.append(item.strip())
                continue
            home, _, last = new.rpartition(".")
            if not alias and last != name:
                renamed[name] = last
            lines.append(f"{indent}from {home} import {last}" + (f" as {alias}" if alias else ""))
        if kept and lines:
            lines.insert(0, f"{indent}from {package} import {', '.join(kept)}")
        return "\n".join(lines) + tail if lines else match[0]

    after = pattern.sub(change, text)
    for old, new in renamed.items():
        after = replace_names(after, old, new)
    return after


def replace_names(
    text: str,
    old: str,
    new: str,
    *,
    attributes: bool = False,
    rows: range | None = None,
    skip: frozenset[tuple[int, int]] = frozenset(),
) -> str:
    """Replace NAME tokens, also in the expressions of f-strings; attributes and `skip` only if asked for."""
    lines = text.splitlines(keepends=True)
    edits: list[tuple[int, int, int, str]] = []
    previous = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if rows is None or row in rows:
            plain = attributes or previous != "."
            if token.type == tokenize.NAME and token.string == old and plain and (row, column) not in skip:
                edits.append((row, column, column + len(old), new))
            elif token.type == tokenize.STRING and "f" in token.string[:2].lower() and old in token.string:
                changed = in_f_string(token.string, old, new, attributes=attributes)
                if changed != token.string:
                    if token.start[0] == token.end[0]:
                        edits.append((row, column, token.end[1], changed))
                    else:
                        old_lines, new_lines = token.string.split("\n"), changed.split("\n")
                        for i, (a, b) in enumerate(zip(old_lines, new_lines, strict=True)):
                            start = column if i == 0 else 0
                            edits.append((row + i, start, start + len(a), b))
        if token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE):
            previous = token.string
    for row, start, end, replacement in sorted(edits, reverse=True):
        line = lines[row - 1]
        lines[row - 1] = line[:start] + replacement + line[end:]
    return "".join(lines)


def in_f_string(text: str, old: str, new: str, *, attributes: bool) -> str:
    word = re.compile((r"(?<![\w'\"])" if attributes else r"(?<![\w.'\"])") + re.escape(old) + r"(?![\w'\"])")
    out, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if depth == 0 and text[i : i + 2] in ("{{", "}}"):
            i += 2
            continue
        if text[i] == "{":
            if depth == 0:
                out.append(text[start:i])
                start = i
            depth += 1
        elif text[i] == "}" and depth:
            depth -= 1
            if depth == 0:
                out.append(word.sub(new, text[start : i + 1]))
                start = i + 1
        i += 1
    return "".join([*out, text[start:]])


def keywords(tree: ast.AST, name: str, callee: str | None = None) -> frozenset[tuple[int, int]]:
    """Where calls (of `callee`, if given) pass an argument by this name."""
    return frozenset(
        (keyword.lineno, keyword.col_offset)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and (callee is None or ast.unparse(call.func).split(".")[-1] == callee)
        for keyword in call.keywords
        if keyword.arg == name
    )


def rename_local(path: Path, qualified: str, old: str, new: str) -> None:
    if not path.is_file():
        return
    text = path.read_text()
    tree = ast.parse(text)
    scopes: list[ast.AST] = [tree]
    *_, last = parts = qualified.split(".")
    for part in parts:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inside = [n for scope in scopes for n in ast.walk(scope) if isinstance(n, kinds) and n is not scope]
        scopes = [node for node in inside if node.name == part]
    is_parameter = False
    for node in scopes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            spec = node.args
            named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
            is_parameter |= any(arg.arg == old for arg in named)
    skip = keywords(tree, old)
    for node in scopes:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        text = replace_names(text, old, new, rows=range(first, (node.end_lineno or 0) + 1), skip=skip)
    edit(path, lambda _: text)
    if is_parameter:
        callee = parts[-2] if last == "__init__" else last
        for other in code_files():
            if callee in (source := other.read_text()) and old in source:
                at = keywords(ast.parse(source), old, callee)
                edit(other, lambda t, at=at: replace_at(t, at, old, new))


def replace_at(text: str, places: frozenset[tuple[int, int]], old: str, new: str) -> str:
    lines = text.splitlines(keepends=True)
    for row, column in sorted(places, reverse=True):
        line = lines[row - 1].encode()
        assert line[column : column + len(old)] == old.encode(), (row, column, old)
        lines[row - 1] = (line[:column] + new.encode() + line[column + len(old) :]).decode()
    return "".join(lines)


def rename_top_level(module: str, old: str, new: str) -> None:  # noqa: C901 - one walk over all files
    home = path_of(module)
    home = home / "__init__.py" if home.is_dir() else home
    package, _, stem = module.rpartition(".")
    for path in code_files():
        text = path.read_text()
        if old not in text:
            continue
        tree = ast.parse(text)
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        direct = [a for n in imports if n.module == module for a in n.names if a.name == old]
        if path == home or any(a.asname is None for a in direct):
            text = replace_names(text, old, new, skip=keywords(tree, old))
        elif direct:
            text = re.sub(rf"\b{re.escape(old)} as\b", f"{new} as", text)
        for node in imports:  # used as an attribute of its module
            for alias in node.names:
                if node.module == package and alias.name == stem:
                    text = re.sub(
                        rf"(?<![\w.]){alias.asname or stem}\.{re.escape(old)}\b",
                        f"{alias.asname or stem}.{new}",
                        text,
                    )
        text = text.replace(f"{module}.{old}", f"{module}.{new}").replace(
            f"{module}:{old}", f"{module}:{new}"
        )
        edit(path, lambda _, t=text: t)
    imported = re.compile(rf"^from {re.escape(module)} import .*\b{re.escape(old)}\b", re.M)

    def in_block(block: re.Match[str]) -> str:
        return re.sub(rf"\b{re.escape(old)}\b", new, block[0]) if imported.search(block[0]) else block[0]

    for path in text_files():  # the examples of the documentation
        if path.suffix == ".md":
            edit(path, lambda t: re.sub(r"^```python\n.*?^```", in_block, t, flags=re.M | re.S))
    if re.search(r"[A-Z_]", old.strip("_")) and len(old) > 5:  # prose names it too
        for path in text_files():
            if path.suffix == ".md" and path.name != "CHANGELOG.md":
                edit(path, lambda t: re.sub(rf"(?<=`){re.escape(old)}(?=[`(.])", new, t))


if __name__ == "__main__":
    main(sys.argv[1:])
