"""Dispatcher: which attentions of a model are sparse, and how many keys each of their heads has.

    dispatcher = Dispatcher(part, layers=6, heads=4)
    dispatcher.costs = Costs.measure(...)       # once the tokens are known; until then all is dense
    dispatcher.begin(step)                      # decides; what follows answers alike until the next step
    shares = dispatcher.budgets(layer)          # None: dense; else by head, where 1 is every key
    dispatcher.observe(layer, needed, coverage)

A block is dense while its predictor is bad, and where sparse attention does not pay. All of it is arithmetic
on what is observed: ranks that observe the same decide the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weft.core import tables
from weft.core.errors import InputError
from weft.train.costs import Costs
from weft.train.select import Shares

if TYPE_CHECKING:
    from weft.train.recipe import SparsePart

EMA = 0.9
BAND = 0.02
"""To change its side a block has to be that far beyond the gate."""
GRID = 64
"""Budgets are multiples of one part in so many."""
GOOD = 0.95
"""Of the mass that is asked for, what a predictor has to find, and a selection to hold."""


@dataclass
class Block:
    """What is known of a block, and what was decided."""

    needed: Shares | None = None
    """By head, the share of keys that holds the mass asked for."""
    coverage: float | None = None
    """The mass that the predicted keys hold."""
    ready: bool = False
    since: int = 0
    """The step from which on it was ready."""
    sparse: bool = False
    whole: npt.NDArray[np.bool_] | None = None
    """Heads that keep all keys although the block is sparse."""
    budgets: Shares | None = None


class Dispatcher:
    def __init__(self, part: SparsePart, *, layers: int, heads: int, costs: Costs | None = None) -> None:
        beyond = [at for at in part.dense_blocks if not -layers <= at < layers]
        if beyond:
            raise InputError(f"dense_blocks has {beyond[0]}; there are {layers} blocks.")
        self.part, self.heads, self.costs, self.step = part, heads, costs, 0
        self.never = {at % layers for at in part.dense_blocks}
        self.blocks = [Block() for _ in range(layers)]

    def observe(self, layer: int, needed: npt.ArrayLike, coverage: float) -> None:
        """What the profiler found, the same on all ranks. It counts from the next `begin` on.

        Needs fall slowly, and rise at once where a selection has lost the mass: profiles are rare by then.
        """
        block, new = self.blocks[layer], np.asarray(needed, dtype=np.float64)
        if new.shape != (self.heads,) or not (np.isfinite(new).all() and np.isfinite(coverage)):
            raise InputError(f"Block {layer} was observed to need {new}.", hint=f"Give {self.heads} shares.")
        if block.needed is None or block.coverage is None:
            block.needed, block.coverage = new.copy(), float(coverage)
        else:
            block.needed = EMA * block.needed + (1 - EMA) * new
            if block.sparse and coverage < GOOD * self.part.mass:
                block.needed = np.maximum(block.needed, new)
            block.coverage = EMA * block.coverage + (1 - EMA) * float(coverage)

    def begin(self, step: int) -> None:
        """Decide for a step; a step that begins again, as after a resume, is decided as before."""
        self.step = step
        for layer, block in enumerate(self.blocks):
            if layer not in self.never:
                self._get_ready(block)
                self._decide(block)

    def budgets(self, layer: int) -> Shares | None:
        """By head, the share of keys to attend to, 1 for all; None if the whole block is dense."""
        return self.blocks[layer].budgets

    def stage(self, layer: int) -> int:
        """1 until the predictor has become good, then 2."""
        return 2 if self.blocks[layer].ready else 1

    def profiles(self, layer: int) -> bool:
        """Whether a block is to be profiled in this step."""
        every = self.part.profile_rarely if self.blocks[layer].ready else self.part.profile_every
        return self.step % every == 0

    def learns(self, layer: int) -> bool:
        """Whether a predictor learns in this step; one that nobody asks costs little: it learns as rarely as
        it is profiled."""
        block = self.blocks[layer]
        return layer not in self.never and (block.sparse or not block.ready or self.profiles(layer))

    def _get_ready(self, block: Block) -> None:
        """A predictor that turns bad sends its block back, but not after the last step of stage 1."""
        part, ready = self.part, self.part.method != "dsv" or self.step >= self.part.stage1
        if not ready and block.coverage is not None:
            ready = block.coverage >= GOOD * part.mass * (1 - BAND if block.ready else 1)
        if ready and not block.ready:
            block.since = self.step
        block.ready = ready

    def _decide(self, block: Block) -> None:
        """By shares as they are: on the grid of budgets a hair's breadth could be more than the band."""
        gate, shares, costs = self.part.gate, self._shares(block), self.costs
        block.budgets = None
        if shares is None or (gate == "cost" and costs is None):
            block.sparse, block.whole = False, None
            return
        if gate == "cost":
            assert costs is not None
            was = np.ones(self.heads, dtype=np.bool_) if block.whole is None else block.whole
            edge = np.where(was, 1 - BAND, 1 + BAND)
            block.whole = costs.each(shares) >= costs.dense() / self.heads * edge
            shares = np.where(block.whole, 1.0, shares)
            block.sparse = costs.sparse(shares) < costs.dense() * (1 + BAND if block.sparse else 1 - BAND)
        else:
            block.sparse = bool(shares.mean() < gate * (1 + BAND if block.sparse else 1 - BAND))
        if block.sparse:  # less than a millionth above a multiple is rounding, not need
            given = self.part.budget != "profile"
            block.budgets = shares if given else np.ceil(shares * GRID - 1e-6) / GRID

    def _shares(self, block: Block) -> Shares | None:
        """By head; None while the block has to be dense."""
        part, shares = self.part, block.needed
        if part.budget != "profile":
            shares = np.full(self.heads, float(part.budget))
        if shares is None or not block.ready:
            return None
        left = 1 - min(1.0, (self.step - block.since) / part.anneal) if part.anneal else 0.0
        return np.clip(shares + (1 - shares) * left, part.least, 1.0)

    def facts(self, layer: int) -> dict[str, Any]:
        """For the journal."""
        block = self.blocks[layer]
        whole = np.ones(self.heads)
        return {
            "layer": layer,
            "mode": "sparse" if block.sparse else "dense",
            "stage": self.stage(layer),
            "density": (whole if block.budgets is None else block.budgets).tolist(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        costs = None if self.costs is None else asdict(self.costs)
        plain = [{name: _plain(value) for name, value in asdict(block).items()} for block in self.blocks]
        return {"step": self.step, "costs": costs, "blocks": plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read what `state_dict` returned, from a file that anybody may have written."""
        saved = tables.read(_State, state, "The dispatcher's state")
        if len(saved.blocks) != len(self.blocks):
            raise InputError(f"The state is of {len(saved.blocks)} blocks, not of {len(self.blocks)}.")
        self.step, self.costs = saved.step, saved.costs
        self.blocks = [Block(**vars(block)) for block in saved.blocks]
        for block in self.blocks:
            for name, kind in (("needed", np.float64), ("budgets", np.float64), ("whole", np.bool_)):
                value = getattr(block, name)
                if value is not None and len(value) != self.heads:
                    raise InputError(f"{name} of a block has {len(value)} values for {self.heads} heads.")
                setattr(block, name, None if value is None else np.asarray(value, dtype=kind))


@dataclass(frozen=True)
class _BlockState:
    """A Block in plain numbers and lists."""

    needed: tuple[float, ...] | None
    coverage: float | None
    ready: bool
    since: int
    sparse: bool
    whole: tuple[bool, ...] | None
    budgets: tuple[float, ...] | None


@dataclass(frozen=True)
class _State:
    step: int
    costs: Costs | None
    blocks: tuple[_BlockState, ...]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
