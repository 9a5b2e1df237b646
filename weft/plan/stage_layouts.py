"""Stages: which dim to shard while each stage of a model runs, so that the least is sent in between.

A stage may run while a dim that it does not mix is sharded. The layouts of all stages are found by dynamic
programming: fewest bytes that the busiest rank sends or receives, then fewest calls, then least work
on the busiest rank. K dims that are attended in turn need K/(K-1) switches a layer.

A stage that leaves no dim with an index for every rank is run on the whole tensor, by every rank, or,
if it can, with weft's attention inside, at four times the bytes of a switch. It is then never gathered:
that would save bytes for 2 or 3 ranks only, and every rank would compute everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product
from math import prod
from typing import NamedTuple

from weft.core.errors import InputError
from weft.core.indices import split_evenly

WHOLE, FREE = "whole", "free"

State = tuple[str, ...]
"""By axis of the mesh, the dim that is sharded over it, or `whole`."""


@dataclass(frozen=True)
class ModelStage:
    """A part of a model and the dims that it mixes: attends, convolves, takes means over."""

    name: str
    mixes: tuple[str, ...]
    inside: bool = False
    """Whether it can mix a sharded dim by itself, as with `weft.attention`."""


class AxisMove(NamedTuple):
    """What happens on one axis between two stages."""

    axis: int
    source: str
    target: str

    @property
    def verb(self) -> str:
        return "split" if self.source == WHOLE else "gather" if self.target == WHOLE else "switch"

    def __str__(self) -> str:
        dims = {"split": self.target, "gather": self.source}.get(self.verb, f"{self.source} → {self.target}")
        return f"{self.verb} {dims}"


class ReshardCost(NamedTuple):
    """Of the busiest rank: what it sends or receives, in how many calls, and the elements it works on."""

    num_bytes: int = 0
    calls: int = 0
    work: int = 0

    def plus(self, other: ReshardCost) -> ReshardCost:
        return ReshardCost(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class StageLayouts:
    """The layout of every stage, what moves before it, and what moves after the last one."""

    stages: tuple[ModelStage, ...]
    layouts: tuple[State, ...]
    moves: tuple[tuple[AxisMove, ...], ...]
    """One more than there are stages."""
    cost: ReshardCost

    def __str__(self) -> str:
        rows = [
            (", ".join(map(str, moves)), stage.name, " × ".join(layout), ", ".join(stage.mixes) or "nothing")
            for stage, layout, moves in zip(self.stages, self.layouts, self.moves, strict=False)
        ]
        lines = [
            f"{name:24}  mixes {mixes:16}  sharded {layout:16}  {moved}".rstrip()
            for moved, name, layout, mixes in rows
        ]
        end = ", ".join(map(str, self.moves[-1]))
        total = f"{self.cost.num_bytes:,} bytes, {self.cost.calls} calls a rank"
        return "\n".join([*lines, *([end] if end else []), total])


def choose_layouts(
    stages: Iterable[ModelStage],
    sizes: Mapping[str, int],
    ranks: int | Sequence[int],
    *,
    width: int = 1,
    entry: str | State = WHOLE,
    exit: str | State = WHOLE,
) -> StageLayouts:
    """The cheapest layouts of stages that run one after another.

    sizes        the dims that may be sharded, whole.
    ranks        how many, or how many on each axis of a mesh: then so many dims are sharded at once.
    width        bytes at each index of all these dims together.
    entry, exit  how the tensor comes and is to go: a dim, `whole` or `free`; for a mesh one of them for
                 each axis.
    """
    axes = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    costs = _Costs(dict(sizes), axes, width)
    chain = tuple(stages)
    for stage in chain:
        costs.check(stage)
    best: dict[State, tuple[ReshardCost, tuple[State, ...]]] = {
        state: (ReshardCost(), (state,)) for state in costs.named(entry, "entry")
    }
    steps = [(costs.legal(stage), stage) for stage in chain]
    steps.append((costs.named(exit, "exit"), ModelStage("exit", ())))
    for number, (states, stage) in enumerate(steps):
        reached: dict[State, tuple[ReshardCost, tuple[State, ...]]] = {}
        for state in states:
            here = costs.of_stage(stage, state) if number < len(chain) else ReshardCost()
            for before, (cost, path) in best.items():
                if (moved := costs.between(before, state)) is not None:
                    total = cost.plus(moved[1]).plus(here)
                    if state not in reached or total < reached[state][0]:
                        reached[state] = total, (*path, state)
        best = reached
    if not best:
        raise InputError(
            f"No moves lead from {entry} to {exit}: two axes cannot swap their dims.",
            hint="Give the dims to the axes in one order.",
        )
    cost, path = min(best.values(), key=lambda end: end[0])
    moves = tuple(costs.moves(a, b) for a, b in zip(path, path[1:], strict=False))
    return StageLayouts(chain, path[1:-1], moves, cost)


class _Costs:
    """Costs of layouts and of the switches between them, cached."""

    def __init__(self, sizes: dict[str, int], ranks: tuple[int, ...], width: int) -> None:
        for name, size in sizes.items():
            if name in (WHOLE, FREE) or size < 1:
                raise InputError(f"A dim {name!r} of size {size} cannot be sharded.")
        if not ranks or min(ranks) < 1:
            raise InputError(f"ranks must be >= 1 on each axis, got {ranks}.")
        self.sizes, self.ranks, self.width = sizes, ranks, width
        choices = product((*sizes, WHOLE), repeat=len(ranks))
        self.states = [s for s in choices if all(s.count(dim) == 1 for dim in s if dim != WHOLE)]
        self.between = cache(self._between)

    def check(self, stage: ModelStage) -> None:
        if unknown := [dim for dim in stage.mixes if dim not in self.sizes]:
            raise InputError(
                f"Stage {stage.name} mixes an unknown dim {unknown[0]!r}.",
                hint=f"The dims are {', '.join(self.sizes)}.",
            )

    def named(self, layout: str | State, what: str) -> list[State]:
        """The layouts that `entry` or `exit` may mean."""
        one = (layout,) * len(self.ranks) if layout in (WHOLE, FREE) else layout
        wanted = (one,) if isinstance(one, str) else one
        states = [
            state
            for state in self.states
            if len(wanted) == len(state)
            and all(ask in (FREE, dim) for ask, dim in zip(wanted, state, strict=True))
        ]
        if not states:
            raise InputError(
                f"{what}={layout!r} is not a layout over {len(self.ranks)} axes.",
                hint=f"Give for each axis one of {', '.join(self.sizes)}, {WHOLE}, {FREE}.",
            )
        return states

    def legal(self, stage: ModelStage) -> list[State]:
        """Return states of unmixed dims; if none has an index for every rank, also the fallbacks."""
        apart = [state for state in self.states if not {*stage.mixes, WHOLE} & {*state}]
        if any(all(self.sizes[d] >= n for d, n in zip(s, self.ranks, strict=True)) for s in apart):
            return apart
        if stage.inside:
            return [state for state in self.states if WHOLE not in state]
        return [state for state in self.states if not {*stage.mixes} & {*state}]

    def local(self, state: State) -> dict[str, int]:
        """Sizes of the largest shard."""
        local = dict(self.sizes)
        for dim, ranks in zip(state, self.ranks, strict=True):
            if dim != WHOLE:
                local[dim] = -(-self.sizes[dim] // ranks)
        return local

    def of_stage(self, stage: ModelStage, state: State) -> ReshardCost:
        """The work of a stage, and what its attention sends if it mixes what is sharded."""
        work = prod(self.local(state).values())
        ranks = prod(n for dim, n in zip(state, self.ranks, strict=True) if dim in stage.mixes)
        sent = 4 * work * self.width * (ranks - 1) // ranks
        return ReshardCost(sent, 2 if ranks > 1 else 0, work)

    def moves(self, before: State, after: State) -> tuple[AxisMove, ...]:
        cheapest = self.between(before, after)
        assert cheapest is not None
        return cheapest[0]

    def _between(self, before: State, after: State) -> tuple[tuple[AxisMove, ...], ReshardCost] | None:
        """The cheapest order of moves; none, if two axes would have to swap their dims at once."""
        ends = [AxisMove(i, a, b) for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        orders: list[tuple[ReshardCost, tuple[AxisMove, ...]]] = []
        for order in permutations(ends):
            state, total = before, ReshardCost()
            for move in order:
                if move.target != WHOLE and move.target in state:
                    break
                total = total.plus(self._move(move, state))
                state = (*state[: move.axis], move.target, *state[move.axis + 1 :])
            else:
                orders.append((total, order))
        if not orders:
            return None
        cost, order = min(orders, key=lambda item: item[0])
        return order, cost

    def _move(self, move: AxisMove, state: State) -> ReshardCost:
        if move.verb == "split":
            return ReshardCost()
        ranks, local = self.ranks[move.axis], self.local(state)
        rest = self.width * prod(size for dim, size in local.items() if dim not in (move.source, move.target))
        A = self.sizes[move.source]
        shards = [stop - start for start, stop in split_evenly(A, ranks)]
        if move.verb == "gather":
            return ReshardCost(shards[0] * (ranks - 1) * rest, int(ranks > 1))
        B = self.sizes[move.target]
        news = [stop - start for start, stop in split_evenly(B, ranks)]
        most = max(max(a * (B - b), b * (A - a)) for a, b in zip(shards, news, strict=True))
        return ReshardCost(most * rest, int(ranks > 1))
