"""Torus: exchange heads between machines in stages, each hidden behind the attention of the one before.

    own queries × own keys             while the first queries of another machine are pulled
    queries of machine +i × own keys   while those of the next, and at last the first keys, are pulled
    all queries × keys of machine +j   while the next keys are pulled
    queries of +i × the last keys      then their finished outputs are pushed home …
    own queries × the deferred keys    … while the deferred attentions run

The partition decides what each rank computes, so any mask and any balance work. A block belongs to the
machine that holds its first token. Machines are visited in cyclic order, so each is read by one other at a
time. Tokens that leave a machine are first gathered on the device with the number of their reader; tokens
that arrive are passed to the ring's other ranks on the machine once, for all queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import numpy as np

from weft.core.errors import InputError
from weft.core.indices import EMPTY, Indices
from weft.core.mask import BlockMask, BoolArray
from weft.core.mesh import Mesh
from weft.core.partition import Partition
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Op, Piece, Schedule, Transfer
from weft.schedule.tours import by_machine, in_stages, mates_and_columns, tours, view
from weft.schedule.usp import any_active, needed_columns, output_transfers, without_empty, without_idle


def torus(  # noqa: PLR0913 - a strategy, and what there is to tune
    problem: Problem,
    mask: BlockMask,
    mesh: Mesh,
    partition: Partition,
    *,
    machines: int,
    chunks: int = 1,
    defer: int | None = None,
    name: str = "torus",
) -> Schedule:
    """Build a torus over `machines`.

    What comes from a machine is split into `chunks` stages; own queries attend to the last `defer` key stages
    at the end (by default to all of them).
    """
    if machines < 1 or problem.ranks % machines or chunks < 1 or (defer or 0) < 0:
        raise InputError(
            f"machines must divide {problem.ranks} ranks, chunks must be ≥ 1 and defer ≥ 0, "
            f"got {machines}, {chunks} and {defer}."
        )
    build = _Build(problem, mask, mesh, without_idle(mask, partition), machines, chunks)
    return Schedule(name, problem, mask, mesh, without_empty(build.ops(defer)))


class _Build:
    """Rows and keys of every rank by stage (0: of its own machine), and the pieces that were sent to it."""

    def __init__(
        self, problem: Problem, mask: BlockMask, mesh: Mesh, partition: Partition, machines: int, chunks: int
    ) -> None:
        self.problem, self.mask, self.partition = problem, mask, partition
        self.devices, self.chunks = problem.ranks // machines, chunks
        self.tours = tours(mesh, machines)
        self.held = {"q": by_machine(problem.q, machines), "kv": by_machine(problem.kv, machines)}
        units = mask.units
        rows, cols = (
            [view(held, unit, tour) for tour in self.tours for _ in range(self.devices)]
            for held, unit in zip(self.held.values(), units, strict=True)
        )
        self.rows = [
            [in_stages(work.rows, held, units[0], chunks) for work in works]
            for works, held in zip(partition.work, rows, strict=True)
        ]
        self.mates, fetched = mates_and_columns(mesh, partition, machines)
        self.hops = max(map(len, self.mates))
        self.needed = [needed_columns(mask, works) for works in partition.work]
        self.keys = [
            [Piece("kv", self._heads(mates), stage) for stage in in_stages(tokens, held, units[1], chunks)]
            for mates, tokens, held in zip(
                self.mates, map(self._read, self.mates, fetched), cols, strict=True
            )
        ]
        self.sent: list[list[Piece]] = [[] for _ in self.mates]
        self.needs: dict[Piece, BoolArray] = {}

    def _heads(self, mates: tuple[int, ...]) -> Indices:
        runs = chain.from_iterable(self.partition.heads_of(mate).runs for mate in mates)
        return self.problem.kv_heads_of(Indices.from_runs(runs))

    def _read(self, mates: tuple[int, ...], cols: Indices) -> Indices:
        """Return the blocks among `cols` that any of some ranks reads."""
        needed = np.logical_or.reduce([self.needed[mate] for mate in mates])
        return cols & self.mask.columns(needed)

    def ops(self, defer: int | None) -> list[Op]:
        stages = range(1, 1 + (len(self.tours) - 1) * self.chunks)
        rows = [i for i in stages if any(work[i] for works in self.rows for work in works)]
        keys = [i for i in stages if any(chunks[i] for chunks in self.keys)]
        scatter = (*self._pull("q", 0)[1], *self._pull("kv", 0)[1])
        passes = {0: self._passes(0)}
        pulls: list[Exchange] = []
        gathered: dict[str, list[Transfer]] = {"q": [], "kv": []}
        for tensor, some in (("q", rows), ("kv", keys)):
            for i in some:
                gather, moves = self._pull(tensor, i)
                gathered[tensor] += gather
                pulls.append(Exchange(moves, f"pull {tensor} {i}"))
                passes |= {i: self._passes(i)} if tensor == "kv" else {}
        # Send the first queries before keys are assembled; without queries to send, start with keys.
        pulls.insert(min(1, len(rows)), Exchange(tuple(gathered["kv"]), "gather kv"))
        ahead = iter(pulls)
        ops: list[Op] = [Exchange(tuple(gathered["q"]), "gather q"), Exchange(scatter, "scatter")]
        for i in (0, *rows):
            ops += islice(ahead, 1 if i else 1 + self.chunks)
            ops += self._attend((i,), 0, passes.pop(0, []))
        put_off = len(keys) if defer is None else min(defer, len(keys))
        late = keys[len(keys) - put_off :] if rows else []
        for i in keys:
            ops += islice(ahead, 1)
            own = () if i in late else (0,)
            groups = [(*own, *rows)] if i != keys[-1] else [*((row,) for row in rows), own]
            for group in groups:
                ops += self._attend(group, i, passes.pop(i, []))
                if i == keys[-1] and group != own:
                    ops.append(self._push(*group))
        ops += [] if keys else [self._push(row) for row in rows]
        for i in late:
            ops += self._attend((0,), i, [])
        return [*ops, self._push(0)]

    def _attend(self, rows: Sequence[int], keys: int, passes: list[Exchange]) -> list[Op]:
        """Attend some stages of rows to one of keys, which the ranks of a machine pass on meanwhile."""
        ops: list[Op] = []
        for hop in range(self.hops):
            ops += passes[hop : hop + 1]
            for rank in range(self.problem.ranks):
                ops += self._attends(rank, rows, keys, hop)
        return ops

    def _attends(self, rank: int, rows: Sequence[int], keys: int, hop: int) -> list[Attend]:
        mates = self.mates[rank]
        if hop >= len(mates):
            return []
        tokens = self.keys[mates[mates.index(rank) - hop]][keys].tokens
        if keys == hop == 0:
            # The rank's own copy of replicated keys joins its own columns, so it costs no extra call.
            tokens = tokens | self.partition.shared
        attends: list[Attend] = []
        for work, stages in zip(self.partition.work[rank], self.rows[rank], strict=True):
            q = Piece("q", work.heads, Indices.from_runs(run for i in rows for run in stages[i].runs))
            if q and q not in self.needs:
                self.needs[q] = self.mask.needed(q.heads, q.tokens)
            if q and self._is_needed(self.needs[q], tokens):
                attends.append(Attend(rank, q, Piece("kv", self.problem.kv_heads_of(work.heads), tokens)))
        return attends

    def _is_needed(self, needed: BoolArray, tokens: Indices) -> bool:
        return any_active(needed, tokens.blocks(self.mask.block_k))

    def _queries(self, rank: int, stage: int) -> list[Piece]:
        works = zip(self.partition.work[rank], self.rows[rank], strict=True)
        return [Piece("q", work.heads, rows[stage]) for work, rows in works if rows[stage]]

    def _pull(self, tensor: str, stage: int) -> tuple[list[Transfer], tuple[Transfer, ...]]:
        """Return the transfers that gather what leaves a machine, and those between machines."""
        gather: list[Transfer] = []
        moves: list[Transfer] = []
        for rank in range(self.problem.ranks):
            machine = self.tours[rank // self.devices][-(-stage // self.chunks)]
            sender = machine * self.devices + rank % self.devices
            for piece in self._queries(rank, stage) if tensor == "q" else [self.keys[rank][stage]]:
                through = piece.tokens & self.held[tensor][machine] if sender != rank else EMPTY
                gather += self._from_home(Piece(tensor, piece.heads, through), sender)
                moves += self._send(Piece(tensor, piece.heads, through), sender, rank)
                # The tokens on this machine, and the rest of a block that lies on two machines.
                moves += self._from_home(Piece(tensor, piece.heads, piece.tokens - through), rank)
        return gather, tuple(moves)

    def _from_home(self, piece: Piece, rank: int) -> list[Transfer]:
        """Send a piece from the ranks that hold its tokens, those of the same machine first."""
        layout, moves = self.problem.home(piece.tensor), list[Transfer]()
        machine, rest = rank // self.devices, piece.tokens - layout.held(rank)
        for source in sorted(layout.holders(rest), key=lambda r: r // self.devices != machine):
            tokens = rest & layout.held(source)
            moves += self._send(Piece(piece.tensor, piece.heads, tokens), source, rank)
            rest = rest - tokens
        return moves

    def _send(self, piece: Piece, source: int, rank: int) -> list[Transfer]:
        """Send what the rank does not hold at home and was not sent before."""
        held = self.problem.home(piece.tensor).held(rank)
        left = Piece(piece.tensor, piece.heads, piece.tokens - held)
        had = [sent for sent in self.sent[rank] if sent.tensor == piece.tensor and sent.meets(left)]
        pieces = left.without(had) if left else []
        self.sent[rank] += pieces
        return [Transfer(piece, source, rank) for piece in pieces]

    def _passes(self, stage: int) -> list[Exchange]:
        """Return an exchange per hop that passes each rank's keys of a stage around its ring."""
        exchanges: list[Exchange] = []
        for hop in range(1, self.hops):
            moves: list[Transfer] = []
            for rank, mates in enumerate(self.mates):
                to, piece = mates[(mates.index(rank) + hop) % len(mates)], self.keys[rank][stage]
                if hop < len(mates) and self._is_needed(self.needed[to], piece.tokens):
                    moves += self._send(piece, rank, to)
            exchanges.append(Exchange(tuple(moves), f"pass kv {stage}"))
        return exchanges

    def _push(self, *stages: int) -> Exchange:
        """Send finished outputs to every rank that holds the query's token."""
        moves = tuple(
            move
            for stage in stages
            for rank in range(self.problem.ranks)
            for piece in self._queries(rank, stage)
            for move in output_transfers(self.problem, rank, piece.heads, piece.tokens)
        )
        return Exchange(moves, "return" if stages == (0,) else f"push o {stages[0]}")
