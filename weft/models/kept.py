"""Kept: masks that are used for several steps, and as a state that a run goes on from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from weft.core.layout import Layout
from weft.core.mask import BlockMask


class Kept(NamedTuple):
    """The mask of a layer, the step it was made in, and the last that used it."""

    since: int
    last: int
    mask: BlockMask | None


NOTHING = Kept(-(1 << 30), 0, None)
Place = tuple[int, int, int]
"""Layer, branch and tokens: what an attention is on any number of ranks."""


def stored(kept: Mapping[tuple[int, int, Layout], Kept], since: int) -> list[Any]:
    """Those that were made in a step or later ones, as what a `models.state` can hold."""
    return [
        [layer, branch, layout.size, each.since, _parts(each.mask)]
        for (layer, branch, layout), each in kept.items()
        if each.since >= since
    ]


def restored(state: list[Any]) -> dict[Place, Kept]:
    return {
        (layer, branch, tokens): Kept(since, since, BlockMask(**parts) if parts else None)
        for layer, branch, tokens, since, parts in state
    }


def _parts(mask: BlockMask | None) -> dict[str, Any]:
    """Bits as an array: as text they would be too much for the header that a state's text is in."""
    return {} if mask is None else {field.name: getattr(mask, field.name) for field in fields(mask)}
