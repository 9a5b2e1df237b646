"""Terminal tables without borders: names left-aligned, numbers right-aligned."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def table(columns: Iterable[str], *, left: Collection[str], **options: Any) -> Table:
    """Return a table whose cells do not wrap; `options` go to `rich.table.Table`."""
    from rich.table import Table

    grid = Table(**{"box": None, "pad_edge": False, "padding": (0, 1)} | options)
    for name in columns:
        grid.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return grid
