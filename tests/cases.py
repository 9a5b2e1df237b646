"""Random attention problems, each with the schedule of a random strategy, for hypothesis and for loops.

@given(case=cases())
def test_every_schedule_verifies(case):
    verify(case.schedule)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Any, Protocol

import numpy as np
from hypothesis import strategies as st

from weft.core.layout import Layout
from weft.core.mask import BlockMask, BoolArray
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan import strategies
from weft.plan.choose import build
from weft.plan.strategy import factors

LAYOUTS = ("even", "uneven", "zigzag", "permuted")
MASKS = ("random", "random", "random", "dense", "dense blocks", "empty")
OPTIONS = {"torus": "c2d1"}
"""Tried with odd numbers of slices."""


@dataclass(frozen=True)
class Case:
    """A problem, its mask and the name of the strategy that is to solve it."""

    problem: Problem
    mask: BlockMask
    name: str

    @cached_property
    def schedule(self) -> Schedule:
        return build(self.name, self.problem, self.mask, machines(self.problem.ranks))


def cases(
    max_tokens: int = 400, *, max_ranks: int = 8, dtype: str = "float64", min_ranks: int = 1
) -> st.SearchStrategy[Case]:
    """Any heads, tokens, ranks, layout, mask and strategy that weft promises to handle."""

    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        return _case(_Drawn(draw), max_tokens, (min_ranks, max_ranks), dtype)

    return drawn()


def random_case(
    rng: np.random.Generator, max_tokens: int = 400, *, max_ranks: int = 8, dtype: str = "float64"
) -> Case:
    """The same from a seeded generator."""
    return _case(_Rolled(rng), max_tokens, (1, max_ranks), dtype)


def machines(ranks: int) -> Topology:
    """Ranks on machines: 2×2, 3×2, 4×2, 3×3; one on each where they are a prime number.

    >>> [machines(ranks).machines for ranks in (1, 4, 5, 6, 8)]
    [1, 2, 5, 3, 4]
    """
    devices = next((n for n in range(2, ranks) if ranks % n == 0), 1)
    return Topology(machines=ranks // devices, devices=devices)


def names(ranks: int) -> tuple[str, ...]:
    """Every strategy there is for so many ranks, with every balance."""
    found = [
        str(kind(u, r)) + OPTIONS.get(kind.kind, "") * (u % 2)
        for kind in strategies.kinds()
        for u, r in factors(ranks)
        if r > 1 or kind.across  # else it is ulysses
    ]
    plain = dict.fromkeys((*strategies.short_names(), *found))
    return (*plain, *(f"{name}+{how}" for name in plain if name != "zigzag" for how in ("balanced", "cuts")))


def kinds(ranks: int) -> tuple[str, ...]:
    """Every exchange and every balance there is, though not each with each."""
    plain = [name for name in names(ranks) if "+" not in name]
    return (
        "auto",
        *plain,
        *(f"{name}+{how}" for name, how in zip(plain, cycle(("balanced", "cuts"))) if name != "zigzag"),
    )


def token_mask(mask: BlockMask) -> BoolArray:
    """[heads, query tokens, key tokens]: the mask as everybody else would write it."""
    whole = mask.tiles.repeat(mask.block_q, axis=1).repeat(mask.block_k, axis=2)
    return whole[:, : mask.q_len, : mask.kv_len]


class _Chance(Protocol):
    """Where choices come from."""

    def integer(self, low: int, high: int) -> int: ...
    def one_of(self, options: Sequence[Any]) -> Any: ...
    def generator(self) -> np.random.Generator: ...


class _Drawn:
    """From hypothesis, so that a failing case shrinks; only the many bits of a mask hang on a seed."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def one_of(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(options))

    def generator(self) -> np.random.Generator:
        return np.random.default_rng(self.integer(0, 2**16))


class _Rolled:
    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def integer(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def generator(self) -> np.random.Generator:
        return self.rng


def _case(chance: _Chance, max_tokens: int, bounds: tuple[int, int], dtype: str) -> Case:
    ranks = chance.integer(*bounds)
    heads = chance.integer(1, 13)
    q = _layout(chance, ranks, chance.integer(1, max_tokens))
    problem = Problem(
        batch=chance.integer(1, 2),
        heads=heads,
        kv_heads=chance.one_of([n for n in range(1, heads + 1) if heads % n == 0]),
        head_dim=chance.integer(4, 8),
        q=q,
        kv=_cross(chance, ranks, max_tokens) if chance.integer(0, 3) == 0 else q,
        dtype=dtype,
    )
    return Case(problem, _mask(chance, problem), chance.one_of(names(ranks)))


def _layout(chance: _Chance, ranks: int, tokens: int) -> Layout:
    kind = chance.one_of(LAYOUTS)
    if kind == "zigzag":
        layout = Layout.zigzag(tokens, ranks)
    elif kind == "permuted":
        rng = chance.generator()
        cuts = np.sort(rng.integers(0, tokens + 1, ranks - 1))
        layout = Layout.permuted(np.split(rng.permutation(tokens), cuts))
    else:
        prefix = chance.one_of((0, 0, chance.integer(0, tokens)))
        suffix = chance.one_of((0, 0, chance.integer(0, tokens - prefix)))
        own = tokens - prefix - suffix
        if kind == "even":
            layout = Layout.even(tokens, ranks, prefix=prefix, suffix=suffix)
        else:
            stops = sorted(chance.integer(0, own) for _ in range(ranks - 1))
            counts = [b - a for a, b in zip([0, *stops], [*stops, own], strict=True)]
            layout = Layout.uneven(counts, prefix=prefix, suffix=suffix)
    if chance.integer(0, 2) == 0:
        layout = layout.padded(max(layout.rows(rank) for rank in range(ranks)) + chance.integer(0, 3))
    return layout


def _cross(chance: _Chance, ranks: int, max_tokens: int) -> Layout:
    tokens = chance.integer(1, max_tokens)
    make = chance.one_of((Layout.even, Layout.replicated, None))
    return make(tokens, ranks) if make else _layout(chance, ranks, tokens)


def _mask(chance: _Chance, problem: Problem) -> BlockMask:
    heads, q_len, kv_len = problem.heads, problem.q.size, problem.kv.size
    kind, block_q = chance.one_of(MASKS), chance.one_of((8, 16, 64))
    if kind == "dense":
        return BlockMask.dense(heads, q_len, kv_len)
    if kind == "dense blocks":
        return BlockMask.dense(heads, q_len, kv_len, block=block_q)
    block_k = chance.one_of((block_q, 8, 16, 64))
    shape = (heads, -(-q_len // block_q), -(-kv_len // block_k))
    tiles = np.zeros(shape, dtype=bool)
    if kind == "random":
        rng = chance.generator()
        tiles = rng.random(shape) < rng.random()
        tiles[:, rng.random(shape[1]) < 0.2] = False
        tiles[:, :, rng.random(shape[2]) < 0.2] = False
        if rng.random() < 0.3:  # heads that look alike share a pattern
            tiles[:] = tiles[:1]
    return BlockMask.from_tiles(tiles, q_len=q_len, kv_len=kv_len, block_q=block_q, block_k=block_k)
