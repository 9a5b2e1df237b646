"""Tables in the terminal: no lines around them, names on the left and numbers on the right."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def table(columns: Iterable[str], *, left: Collection[str], **how: Any) -> Table:
    """Of which no cell is broken in two; `how` is rich's."""
    from rich.table import Table

    found = Table(**{"box": None, "pad_edge": False, "padding": (0, 1)} | how)
    for name in columns:
        found.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return found
