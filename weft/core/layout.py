"""Layout: which rank holds which indices of a named dim, and in which rows of its local tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from weft.core.codec import Value, digest
from weft.core.errors import InputError
from weft.core.indices import EMPTY, Indices, IntArray, Runs, runs_in, split_evenly

MAX_SIZE = 1 << 48


@dataclass(frozen=True)
class Layout(Value):
    """Runs of global indices by rank, in the order of the local rows.

    Several ranks may hold the same index (replicated text); rows beyond the indices are padding.

    >>> print(Layout.even(7, 3))
    tokens 7 over 3 ranks: 0-2 | 3-4 | 5-6
    """

    size: int
    shards: tuple[Runs, ...]
    dim: str = "tokens"
    padding: tuple[int, ...] = ()
    """Padded rows at the end of each rank's local tensor; empty means none."""

    def __post_init__(self) -> None:
        if not self.shards:
            raise InputError(f"A layout of {self.dim} needs at least one rank.")
        if self.size > MAX_SIZE:
            raise InputError(f"The size of {self.dim} must be ≤ {MAX_SIZE:,}, got {self.size:,}.")
        held = Indices.from_runs(chain.from_iterable(self.shards))
        if held.runs != (((0, self.size),) if self.size > 0 else ()):
            every = Indices.span(0, self.size)
            missing, extra = every - held, held - every
            reason = f"no rank holds {missing}" if missing else f"{extra} are beyond the end"
            raise InputError(f"The shards do not cover {self.size} {self.dim}: {reason}.")
        for rank, shard in enumerate(self.shards):
            if self._held[rank].size != sum([stop - start for start, stop in shard]):
                raise InputError(f"Rank {rank} holds some {self.dim} twice: {shard}.")
        if self.padding and (len(self.padding) != len(self.shards) or min(self.padding) < 0):
            raise InputError(
                f"padding must be one count ≥ 0 for each of {len(self.shards)} ranks, got {self.padding}."
            )

    @staticmethod
    def even(size: int, ranks: int, *, prefix: int = 0, suffix: int = 0, dim: str = "tokens") -> Layout:
        """Return contiguous shards whose lengths differ by at most one.

        The first `prefix` and last `suffix` indices are held by every rank (text beside video).
        """
        _check_ranks(ranks)
        shared = prefix + suffix
        if min(prefix, suffix) < 0 or shared > size:
            raise InputError(f"prefix={prefix} and suffix={suffix} do not fit into {size} {dim}.")
        return Layout.uneven(
            [b - a for a, b in split_evenly(size - shared, ranks)], prefix=prefix, suffix=suffix, dim=dim
        )

    @staticmethod
    def uneven(counts: Sequence[int], *, prefix: int = 0, suffix: int = 0, dim: str = "tokens") -> Layout:
        """Return contiguous shards of these lengths, which may be 0."""
        if not counts or min(counts) < 0:
            raise InputError(f"counts must be one count ≥ 0 for each rank, got {list(counts)}.")
        stops = (prefix + np.cumsum(counts)).tolist()
        size = prefix + sum(counts) + suffix
        shards = tuple(
            _present([(0, prefix), (stop - count, stop), (size - suffix, size)])
            for stop, count in zip(stops, counts, strict=True)
        )
        return Layout(size, shards, dim)

    @staticmethod
    def zigzag(size: int, ranks: int, *, dim: str = "tokens") -> Layout:
        """Rank r holds chunks r and 2·ranks-1-r of 2·ranks: equal work under a causal mask."""
        _check_ranks(ranks)
        chunks = split_evenly(size, 2 * ranks)
        return Layout(size, tuple(_present([chunks[r], chunks[-1 - r]]) for r in range(ranks)), dim)

    @staticmethod
    def permuted(order: Sequence[Sequence[int]], *, dim: str = "tokens") -> Layout:
        """Rank r holds the indices order[r], in that order."""
        shards = tuple(runs_in(np.asarray(rows, dtype=np.int64)) for rows in order)
        return Layout(Indices.from_runs(chain.from_iterable(shards)).size, shards, dim)

    @staticmethod
    def replicated(size: int, ranks: int, *, dim: str = "tokens") -> Layout:
        return Layout(size, (_present([(0, size)]),) * ranks, dim)

    def padded(self, rows: int | Sequence[int]) -> Layout:
        """Return this layout with local tensors of `rows` rows (one number, or one for each rank)."""
        counts = [rows] * self.ranks if isinstance(rows, int) else list(rows)
        if len(counts) != self.ranks:
            raise InputError(f"rows must be one count for each of {self.ranks} ranks, got {counts}.")
        padding = tuple(count - self.held(rank).size for rank, count in enumerate(counts))
        return Layout(self.size, self.shards, self.dim, padding if any(padding) else ())

    @cached_property
    def ranks(self) -> int:
        return len(self.shards)

    @cached_property
    def _held(self) -> tuple[Indices, ...]:
        return tuple(Indices.from_runs(shard) for shard in self.shards)

    def held(self, rank: int) -> Indices:
        """The global indices a rank holds, as a set."""
        return self._held[rank]

    def rows(self, rank: int) -> int:
        """Rows of a rank's local tensor, padding included."""
        return self.held(rank).size + (self.padding[rank] if self.padding else 0)

    def order(self, rank: int) -> IntArray:
        """The global index of each local row, padding left out; read only."""
        return self._orders[rank]

    @cached_property
    def _orders(self) -> tuple[IntArray, ...]:
        orders: list[IntArray] = []
        for shard in self.shards:
            runs = [np.arange(start, stop, dtype=np.int64) for start, stop in shard]
            orders.append(np.concatenate(runs) if runs else np.empty(0, dtype=np.int64))
        return tuple(orders)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Cached: a layout in the order of cubes has thousands of runs, and is in every call's key."""
        return hash((self.size, self.shards, self.dim, self.padding))

    @cached_property
    def digest(self) -> str:
        """Cached: a layout in the order of cubes is long, and many schedules share it."""
        return digest(self)

    @cached_property
    def shared(self) -> Indices:
        """The indices that every rank holds, if there is more than one rank."""
        if self.ranks == 1:
            return EMPTY
        common = self.held(0)
        for rank in range(1, self.ranks):
            common = common & self.held(rank)
        return common

    @cached_property
    def _overlaps(self) -> bool:
        return sum(held.size for held in self._held) > self.size

    @cached_property
    def _runs_by_start(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """(starts, stops, furthest stop so far, rank) of all runs, by their starts."""
        runs = [(start, stop, rank) for rank, held in enumerate(self._held) for start, stop in held.runs]
        starts, stops, ranks = np.array(sorted(runs), dtype=np.int64).reshape(-1, 3).T
        return starts, stops, np.maximum.accumulate(stops), ranks

    def holders(self, wanted: Indices) -> list[int]:
        """Return the ranks that hold any of some indices, in ascending order."""
        if not wanted.runs:
            return []
        starts, stops, furthest, ranks = self._runs_by_start
        if not self._overlaps:  # then all runs between two bisections overlap with a wanted run
            edges = np.array(wanted.runs, dtype=np.int64)
            first, last = (
                furthest.searchsorted(edges[:, 0], "right"),
                starts.searchsorted(edges[:, 1], "left"),
            )
            size = starts.size + 1
            change = np.bincount(first, minlength=size) - np.bincount(last, minlength=size)
            return np.unique(ranks[change[:-1].cumsum() > 0]).tolist()
        holders: list[IntArray] = []
        for start, stop in wanted.runs:
            # Runs that begin after it or end before it are skipped, so a thousand ranks cost no loop.
            first, last = furthest.searchsorted(start, "right"), starts.searchsorted(stop, "left")
            holders.append(ranks[first:last][stops[first:last] > start])
        return np.unique(np.concatenate(holders)).tolist()

    def sources(self, rank: int, wanted: Indices) -> list[tuple[int, Indices]]:
        """Return which rank sends which indices to `rank`: itself where it can, else their first holder."""
        sources: list[tuple[int, Indices]] = []
        for source in (rank, *[r for r in self.holders(wanted) if r != rank]):
            indices = wanted & self._held[source]
            if indices.runs:
                sources.append((source, indices))
                wanted = wanted - indices if self._overlaps else wanted
        return sources

    def __repr__(self) -> str:
        rows = [self.rows(rank) for rank in range(min(self.ranks, 8))]
        shown = ", ".join(map(str, rows)) + ", …" * (self.ranks > 8)
        return f"Layout({self.size} {self.dim} over {self.ranks} ranks: {shown} rows)"

    def __str__(self) -> str:
        shown = " | ".join(",".join(f"{a}-{b - 1}" for a, b in shard) or "-" for shard in self.shards[:8])
        more = f" | … {self.ranks - 8} more" if self.ranks > 8 else ""
        pad = " padded" if any(self.padding) else ""
        return f"{self.dim} {self.size} over {self.ranks} ranks{pad}: {shown}{more}"


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise InputError(f"ranks must be ≥ 1, got {ranks}.")


def _present(runs: list[tuple[int, int]]) -> Runs:
    """Leave out empty runs and join neighbors, in the order of the runs."""
    present: list[tuple[int, int]] = []
    for start, stop in runs:
        if stop > start:
            if present and present[-1][1] == start:
                present[-1] = (present[-1][0], stop)
            else:
                present.append((start, stop))
    return tuple(present)
