"""An extension of griffe: docstrings that explain names in two columns become lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

# A name or two, a gap, and what they are, with the lines that go on below it.
ROW = re.compile(r"^([a-z_]+(?:, [a-z_]+)*) {2,}(\S.*(?:\n {8,}\S.*)*)$", re.MULTILINE)


class Columns(griffe.Extension):
    """`tokens   the whole length` is an item of a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = ROW.sub(_item, obj.docstring.value)


def _item(row: re.Match[str]) -> str:
    return f"- `{row[1]}`: {' '.join(row[2].split())}"
