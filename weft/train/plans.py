"""Plans: how each attention is split over the ranks, chosen by its mask, again once its budgets have moved.

A choice takes ten times as long as balancing one mask by it, and masks of like budgets are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from weft.core import tables
from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.models.producers import Where
from weft.models.sparsity import problem_of
from weft.plan.choose import choose
from weft.run.exchange import broadcast_json
from weft.run.gpus import topology_for

DRIFT = 1 / 16
"""How far the share of a head may move before its block's plan is chosen again."""


class Plans:
    """By layer and number of ranks: the budgets that a plan was chosen at, and its name."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Sequence[float], str]] = {}

    def load(self, known: dict[str, Any], heads: int) -> None:
        """Take what was `known` before, from a file that anybody may have written."""
        self.known = {
            key: tables.entry(tuple[tuple[float, ...], str], given, "The plans", key)
            for key, given in known.items()
        }
        if any(len(shares) != heads for shares, _ in self.known.values()):
            raise InputError(f"The plans are not of {heads} heads.")

    def of(self, where: Where, layout: Layout, q: Tensor, k: Tensor, mask: BlockMask, budgets: Any) -> Any:
        """All ranks ask at the same time, of equal budgets and masks."""
        if where.plan != "auto" or layout.ranks == 1:
            return where.plan
        key = f"{where.layer} of {layout.ranks}"
        if key not in self.known or np.abs(self.known[key][0] - budgets).max() > DRIFT:
            chosen = choose(problem_of(layout, q, k), mask, topology_for(None, layout.ranks, q.device))
            found = chosen.ranked[0].strategy
            if found.balance == "none":  # this mask may have nothing to balance, but later ones will
                found = replace(found, balance="balanced")
            # Ranks with other clips have other masks, and resume by the same state.
            self.known[key] = budgets.tolist(), str(broadcast_json(str(found)))
        return self.known[key][1]
