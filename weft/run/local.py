"""Local: run all ranks of a schedule in one process on plain autograd. Slow and short: the oracle.

It shares no code with the compiled executor: a rank's pieces are kept in a list as they arrive and
are put together again for every use.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from weft.core.errors import ScheduleError
from weft.core.indices import Indices
from weft.core.schedule import Attend, Piece, Schedule
from weft.run.kernels.reference import Reference
from weft.run.kernels.tiles import Tiles

Held = list[tuple[Piece, tuple[Tensor, ...]]]


def run_local(
    schedule: Schedule, q: list[Tensor], k: list[Tensor], v: list[Tensor], scale: float
) -> list[Tensor]:
    """Outputs by rank from shards by rank [B, H, rows, D]."""
    ranks = [_Rank(schedule, *shards, scale) for shards in zip(range(len(q)), q, k, v, strict=True)]
    for op in schedule.ops:
        if isinstance(op, Attend):
            ranks[op.rank].attend(op)
            continue
        arriving = [(t.dst, t.piece, ranks[t.src].find(t.piece)) for t in op.transfers]
        for dst, piece, planes in arriving:
            ranks[dst].held.append((piece, planes))
    return [rank.output() for rank in ranks]


class _Rank:
    def __init__(self, schedule: Schedule, rank: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.rank, self.q, self.scale = rank, q, scale
        self.problem, self.mask = schedule.attention
        self.held: Held = []
        self.parts: dict[Piece, list[tuple[Tensor, Tensor]]] = {}
        self.outputs = _disjoint(op.q for _, op in schedule.attends() if op.rank == rank)
        for tensor, planes in (("q", (q,)), ("kv", (k, v))):
            layout = self.problem.home(tensor)
            rows = torch.from_numpy(layout.order(rank).argsort())
            piece = Piece(tensor, Indices.span(0, planes[0].shape[1]), layout.held(rank))
            self.held.append((piece, tuple(x[:, :, rows] for x in planes)))

    def attend(self, op: Attend) -> None:
        (query,), (key, value) = self.find(op.q), self.find(op.kv)
        share = self.problem.heads // self.problem.kv_heads
        kv_of = [list(op.kv.heads).index(head // share) for head in op.q.heads]
        tiles = Tiles.of(self.mask, op)
        part = Reference().attend(query, key[:, kv_of], value[:, kv_of], tiles, self.scale)
        whole = Piece("o", op.q.heads, op.q.tokens)
        for piece in filter(whole.covers, self.outputs):
            heads, tokens = _cells(piece, whole)
            self.parts.setdefault(piece, []).append((part[0][:, heads, tokens], part[1][:, heads, tokens]))

    def find(self, wanted: Piece) -> tuple[Tensor, ...]:
        """Put a piece together from what is held; outputs that nothing was computed for are 0."""
        problem = self.problem
        size = (problem.batch, wanted.heads.size, wanted.tokens.size, problem.head_dim)
        planes = tuple(self.q.new_zeros(size) for _ in range(2 if wanted.tensor == "kv" else 1))
        computed = [(piece, (_merged(parts),)) for piece, parts in self.parts.items()]
        rest = [wanted]
        for piece, tensors in self.held + computed:
            if piece.tensor != wanted.tensor:
                continue
            for part in filter(None, (want & piece for want in rest)):
                target, source = _cells(part, wanted), _cells(part, piece)
                batch = torch.arange(problem.batch)[:, None, None]
                planes = tuple(
                    x.index_put((batch, *target), y[(batch, *source)].to(x.dtype))
                    for x, y in zip(planes, tensors, strict=True)
                )
            rest = [left for want in rest for left in want.minus(piece)]
        if rest and wanted.tensor != "o":
            raise ScheduleError(f"Rank {self.rank} does not have {rest[0]}.")
        return planes

    def output(self) -> Tensor:
        problem = self.problem
        (out,) = self.find(Piece("o", problem.all_heads, problem.q.held(self.rank)))
        rows = torch.from_numpy(problem.q.order(self.rank).argsort().argsort())
        padding = self.q.shape[2] - len(rows)
        return torch.nn.functional.pad(out[:, :, rows], (0, 0, 0, padding))


def _disjoint(queries: Iterable[Piece]) -> list[Piece]:
    """Outputs, cut so that each is a whole part of every attention that touches it."""
    found: list[Piece] = []
    for query in queries:
        piece = Piece("o", query.heads, query.tokens)
        new = piece.without(found)
        found = [part for had in found for part in (had & piece, *had.minus(piece)) if part] + new
    return found


def _cells(part: Piece, whole: Piece) -> tuple[Tensor, Tensor]:
    heads = torch.searchsorted(torch.from_numpy(whole.heads.array), torch.from_numpy(part.heads.array))
    tokens = torch.searchsorted(torch.from_numpy(whole.tokens.array), torch.from_numpy(part.tokens.array))
    return heads[:, None], tokens[None, :]


def _merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Weigh partial outputs by their share of the sum of exponentials; rows with no tile give 0."""
    lse = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(lse, dim=0)
    shares = torch.exp(lse - total.masked_fill(total == -torch.inf, torch.inf))
    return torch.stack([out for out, _ in parts]).mul(shares.unsqueeze(-1)).sum(0)
