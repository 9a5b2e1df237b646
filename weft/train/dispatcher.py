"""Dispatcher: decide which attentions of a model are sparse, and the budget of keys of each head.

    dispatcher = Dispatcher(config, layers=6, heads=4)
    dispatcher.costs = AttentionCost.measure(...)   # once the tokens are known; until then all is dense
    dispatcher.begin(step)                          # decides; constant until the next step
    shares = dispatcher.budgets(layer)              # None: dense; else by head, where 1 is every key
    dispatcher.observe(layer, needed, coverage)

A block is dense while its predictor is bad, and where sparse attention does not pay. Decisions depend on
observations only: ranks that observe the same decide the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weft.core import tables
from weft.core.errors import InputError
from weft.train.attention_cost import AttentionCost
from weft.train.cubes import Shares

if TYPE_CHECKING:
    from weft.train.recipe import SparseConfig

EMA = 0.9
HYSTERESIS = 0.02
"""How far beyond the gate a block must be to switch."""
BUDGET_GRID = 64
"""Budgets are multiples of 1 / BUDGET_GRID."""
MIN_COVERAGE = 0.95
"""Share of the required mass that a good predictor finds, and that a selection must hold."""


@dataclass
class BlockState:
    """Observations of a block, and the decision; lists by head as in a file."""

    needed: tuple[float, ...] | None = None
    """Share of keys that holds the required mass."""
    coverage: float | None = None
    """Mass that the predicted keys hold."""
    ready: bool = False
    since: int = 0
    """First step of `ready`."""
    sparse: bool = False
    whole: tuple[bool, ...] | None = None
    """Heads that keep all keys although the block is sparse."""
    budgets: tuple[float, ...] | None = None


@dataclass(frozen=True)
class DispatcherState:
    """The stored form."""

    step: int
    costs: AttentionCost | None
    blocks: tuple[BlockState, ...]


class Dispatcher:
    def __init__(
        self, config: SparseConfig, *, layers: int, heads: int, costs: AttentionCost | None = None
    ) -> None:
        outside = [layer for layer in config.dense_blocks if not -layers <= layer < layers]
        if outside:
            raise InputError(
                f"dense_blocks must be in [{-layers}, {layers}) for {layers} blocks, got {outside[0]}."
            )
        self.config, self.heads, self.costs, self.step = config, heads, costs, 0
        self.always_dense = {layer % layers for layer in config.dense_blocks}
        self.blocks = [BlockState() for _ in range(layers)]

    def observe(self, layer: int, needed: npt.ArrayLike, coverage: float) -> None:
        """Record a profile, the same on all ranks; it takes effect at the next `begin`.

        `needed` falls slowly, and rises at once where a selection has lost mass: profiles are rare by then.
        """
        block, new = self.blocks[layer], np.asarray(needed, dtype=np.float64)
        if new.shape != (self.heads,) or not (np.isfinite(new).all() and np.isfinite(coverage)):
            raise InputError(f"`needed` of block {layer} must be {self.heads} shares, all finite, got {new}.")
        if block.needed is None or block.coverage is None:
            block.needed, block.coverage = tuple(new.tolist()), float(coverage)
            return
        smooth = EMA * np.asarray(block.needed) + (1 - EMA) * new
        if block.sparse and coverage < MIN_COVERAGE * self.config.mass:
            smooth = np.maximum(smooth, new)
        block.needed = tuple(smooth.tolist())
        block.coverage = EMA * block.coverage + (1 - EMA) * float(coverage)

    def begin(self, step: int) -> None:
        """Decide for a step; repeating a step, as after a resume, repeats its decisions."""
        self.step = step
        for layer, block in enumerate(self.blocks):
            if layer not in self.always_dense:
                self._update_ready(block)
                self._decide(block)

    def budgets(self, layer: int) -> Shares | None:
        """Return the share of keys of each head, 1 for all; None if the block is dense."""
        budgets = self.blocks[layer].budgets
        return None if budgets is None else np.array(budgets)

    def profiles(self, layer: int) -> bool:
        """Return whether a block is profiled in this step."""
        ready = self.blocks[layer].ready
        return self.step % (self.config.profile_rarely if ready else self.config.profile_every) == 0

    def learns(self, layer: int) -> bool:
        """Return whether a predictor is trained in this step; an unused one only in profiled steps."""
        block = self.blocks[layer]
        return layer not in self.always_dense and (block.sparse or not block.ready or self.profiles(layer))

    def _update_ready(self, block: BlockState) -> None:
        """Enter stage 2 when the predictor is good or after `stage1` steps; leave it before then only."""
        config = self.config
        ready = config.method != "dsv" or self.step >= config.stage1
        if not ready and block.coverage is not None:
            threshold = MIN_COVERAGE * config.mass * (1 - HYSTERESIS if block.ready else 1)
            ready = block.coverage >= threshold
        if ready and not block.ready:
            block.since = self.step
        block.ready = ready

    def _decide(self, block: BlockState) -> None:
        """Compare unrounded shares: rounding to the grid could exceed the hysteresis."""
        gate, shares, costs = self.config.gate, self._shares(block), self.costs
        block.budgets = None
        if shares is None or (gate == "cost" and costs is None):
            block.sparse, block.whole = False, None
            return
        threshold = 1 + HYSTERESIS if block.sparse else 1 - HYSTERESIS
        if gate == "cost":
            assert costs is not None
            was_whole = np.array(block.whole or (True,) * self.heads)
            edge = np.where(was_whole, 1 - HYSTERESIS, 1 + HYSTERESIS)
            whole = costs.per_head(shares) >= costs.dense() / self.heads * edge
            shares = np.where(whole, 1.0, shares)
            block.whole = tuple(whole.tolist())
            block.sparse = costs.sparse(shares) < costs.dense() * threshold
        else:
            block.sparse = bool(shares.mean() < gate * threshold)
        if block.sparse:
            if self.config.budget == "profile":  # less than a millionth above a multiple is rounding
                shares = np.ceil(shares * BUDGET_GRID - 1e-6) / BUDGET_GRID
            block.budgets = tuple(shares.tolist())

    def _shares(self, block: BlockState) -> Shares | None:
        """Return the share of each head; None while the block must be dense."""
        config, shares = self.config, block.needed
        if config.budget != "profile":
            shares = (float(config.budget),) * self.heads
        if shares is None or not block.ready:
            return None
        shares = np.array(shares)
        annealing = 1 - min(1.0, (self.step - block.since) / config.anneal) if config.anneal else 0.0
        return np.clip(shares + (1 - shares) * annealing, config.min_budget, 1.0)

    def record(self, layer: int) -> dict[str, Any]:
        """Return a block's decision for the journal."""
        block = self.blocks[layer]
        return {
            "layer": layer,
            "mode": "sparse" if block.sparse else "dense",
            "stage": 2 if block.ready else 1,
            "density": list(block.budgets or (1.0,) * self.heads),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists."""
        return asdict(DispatcherState(self.step, self.costs, tuple(self.blocks)))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read what `state_dict` returned, from a file that may be forged."""
        saved = tables.read(DispatcherState, state, "The dispatcher's state")
        if len(saved.blocks) != len(self.blocks):
            raise InputError(
                f"The state has {len(saved.blocks)} blocks, the model {len(self.blocks)} blocks."
            )
        for block in saved.blocks:
            for name in ("needed", "budgets", "whole"):
                values = getattr(block, name)
                if values is not None and len(values) != self.heads:
                    raise InputError(f"{name} of a block has {len(values)} values for {self.heads} heads.")
        self.step, self.costs, self.blocks = saved.step, saved.costs, list(saved.blocks)
