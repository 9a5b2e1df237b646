"""Stages: which dim to shard while each stage of a model runs, so that the least is sent in between.

A stage may run while a dim that it does not mix is sharded. The layouts of all stages are found by dynamic
programming: fewest bytes that the busiest rank sends or receives, then fewest calls, then least work
on the busiest rank. K dims that are attended in turn need K/(K-1) switches a layer.

A stage that leaves no dim with an index for every rank is run on the whole tensor, by every rank, or,
if it can, with weft's attention inside, at four times the bytes of a switch. It then never is gathered:
that would save bytes for 2 or 3 ranks only, and all of them would compute all of it.
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
class Stage:
    """A part of a model and the dims that it mixes: attends, convolves, takes means over."""

    name: str
    mixes: tuple[str, ...]
    inside: bool = False
    """Whether it can mix a sharded dim by itself, as with `weft.attention`."""


class Move(NamedTuple):
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


class Cost(NamedTuple):
    """Of the busiest rank: what it sends or receives, in how many calls, and the elements it works on."""

    num_bytes: int = 0
    calls: int = 0
    work: int = 0

    def plus(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Route:
    """The layout of every stage, what moves before it, and what moves after the last one."""

    stages: tuple[Stage, ...]
    layouts: tuple[State, ...]
    moves: tuple[tuple[Move, ...], ...]
    """One more than there are stages."""
    cost: Cost

    def __str__(self) -> str:
        rows = [
            (", ".join(map(str, moves)), stage.name, " × ".join(layout), ", ".join(stage.mixes) or "nothing")
            for stage, layout, moves in zip(self.stages, self.layouts, self.moves, strict=False)
        ]
        lines = [
            f"{name:24}  mixes {mixes:16}  sharded {layout:16}  {told}" for told, name, layout, mixes in rows
        ]
        end = ", ".join(map(str, self.moves[-1]))
        total = f"{self.cost.num_bytes:,} bytes, {self.cost.calls} calls a rank"
        return "\n".join([*(line.rstrip() for line in lines), *([end] if end else []), total])


def place(
    stages: Iterable[Stage],
    sizes: Mapping[str, int],
    ranks: int | Sequence[int],
    *,
    width: int = 1,
    entry: str | State = WHOLE,
    exit: str | State = WHOLE,
) -> Route:
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
    best: dict[State, tuple[Cost, tuple[State, ...]]] = {
        state: (Cost(), (state,)) for state in costs.named(entry, "entry")
    }
    steps = [(costs.legal(stage), stage) for stage in chain]
    steps.append((costs.named(exit, "exit"), Stage("exit", ())))
    for number, (states, stage) in enumerate(steps):
        reached: dict[State, tuple[Cost, tuple[State, ...]]] = {}
        for state in states:
            here = costs.of_stage(stage, state) if number < len(chain) else Cost()
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
    cost, path = min(best.values(), key=lambda found: found[0])
    moves = tuple(costs.moves(a, b) for a, b in zip(path, path[1:], strict=False))
    return Route(chain, path[1:-1], moves, cost)


class _Costs:
    """What layouts and the ways between them cost, each worked out once."""

    def __init__(self, sizes: dict[str, int], ranks: tuple[int, ...], width: int) -> None:
        for name, size in sizes.items():
            if name in (WHOLE, FREE) or size < 1:
                raise InputError(f"A dim {name!r} of size {size} cannot be sharded.")
        if not ranks or min(ranks) < 1:
            raise InputError(f"ranks={ranks}.", hint="Give 1 rank or more on each axis.")
        self.sizes, self.ranks, self.width = sizes, ranks, width
        choices = product((*sizes, WHOLE), repeat=len(ranks))
        self.states = [s for s in choices if all(s.count(dim) == 1 for dim in s if dim != WHOLE)]
        self.between = cache(self._between)

    def check(self, stage: Stage) -> None:
        if unknown := [dim for dim in stage.mixes if dim not in self.sizes]:
            raise InputError(
                f"Stage {stage.name} mixes {unknown[0]!r}.", hint=f"The dims are {', '.join(self.sizes)}."
            )

    def named(self, given: str | State, what: str) -> list[State]:
        """The layouts that `entry` or `exit` may mean."""
        one = (given,) * len(self.ranks) if given in (WHOLE, FREE) else given
        wanted = (one,) if isinstance(one, str) else one
        found = [
            state
            for state in self.states
            if len(wanted) == len(state)
            and all(ask in (FREE, dim) for ask, dim in zip(wanted, state, strict=True))
        ]
        if not found:
            raise InputError(
                f"{what}={given!r} is no layout over {len(self.ranks)} axes.",
                hint=f"Give for each axis one of {', '.join(self.sizes)}, {WHOLE}, {FREE}.",
            )
        return found

    def legal(self, stage: Stage) -> list[State]:
        """Dims that are not mixed; where they cannot give each rank something, also the ways out."""
        apart = [state for state in self.states if not {*stage.mixes, WHOLE} & {*state}]
        if any(all(self.sizes[d] >= n for d, n in zip(s, self.ranks, strict=True)) for s in apart):
            return apart
        if stage.inside:
            return [state for state in self.states if WHOLE not in state]
        return [state for state in self.states if not {*stage.mixes} & {*state}]

    def local(self, state: State) -> dict[str, int]:
        """Sizes of the largest shard."""
        found = dict(self.sizes)
        for dim, ranks in zip(state, self.ranks, strict=True):
            if dim != WHOLE:
                found[dim] = -(-self.sizes[dim] // ranks)
        return found

    def of_stage(self, stage: Stage, state: State) -> Cost:
        """The work of a stage, and what its attention sends if it mixes what is sharded."""
        work = prod(self.local(state).values())
        ranks = prod(n for dim, n in zip(state, self.ranks, strict=True) if dim in stage.mixes)
        sent = 4 * work * self.width * (ranks - 1) // ranks
        return Cost(sent, 2 if ranks > 1 else 0, work)

    def moves(self, before: State, after: State) -> tuple[Move, ...]:
        found = self.between(before, after)
        assert found is not None
        return found[0]

    def _between(self, before: State, after: State) -> tuple[tuple[Move, ...], Cost] | None:
        """The cheapest order of moves; none, if two axes would have to swap their dims at once."""
        ends = [Move(i, a, b) for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        found: list[tuple[Cost, tuple[Move, ...]]] = []
        for order in permutations(ends):
            state, total = before, Cost()
            for move in order:
                if move.target != WHOLE and move.target in state:
                    break
                total = total.plus(self._move(move, state))
                state = (*state[: move.axis], move.target, *state[move.axis + 1 :])
            else:
                found.append((total, order))
        if not found:
            return None
        cost, order = min(found, key=lambda item: item[0])
        return order, cost

    def _move(self, move: Move, state: State) -> Cost:
        if move.verb == "split":
            return Cost()
        ranks, local = self.ranks[move.axis], self.local(state)
        rest = self.width * prod(size for dim, size in local.items() if dim not in (move.source, move.target))
        A = self.sizes[move.source]
        parts = [stop - start for start, stop in split_evenly(A, ranks)]
        if move.verb == "gather":
            return Cost(parts[0] * (ranks - 1) * rest, int(ranks > 1))
        B = self.sizes[move.target]
        news = [stop - start for start, stop in split_evenly(B, ranks)]
        most = max(max(a * (B - b), b * (A - a)) for a, b in zip(parts, news, strict=True))
        return Cost(most * rest, int(ranks > 1))
