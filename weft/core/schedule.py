"""Schedule: a parallel attention, or a switch of dims, as a list of exchanges and partial attentions.

The list has one global order; a rank's own program is the part it takes part in. Every operation
reads only what earlier ones delivered, so any runtime that starts operations in list order and
waits only for data cannot deadlock.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property
from operator import lt
from pathlib import Path
from typing import TYPE_CHECKING

from weft.core.codec import Value, dumps
from weft.core.errors import InputError
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.problem import Problem, Switch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_FILE_BYTES = 256 << 20
MAX_REASON = 500
"""Characters: some reasons show a field, which may be long."""
TENSORS = ("q", "kv", "o", "do", "dq", "dkv", "x")


@dataclass(frozen=True)
class Piece(Value):
    """A rectangle of a tensor: some heads of some tokens. Keys and values travel together as `kv`."""

    tensor: str
    heads: Indices
    tokens: Indices

    @property
    def is_sum(self) -> bool:
        """Gradients of inputs are added where they arrive; everything else is copied."""
        return self.tensor in ("dq", "dkv")

    def __and__(self, other: Piece) -> Piece:
        return Piece(self.tensor, self.heads & other.heads, self.tokens & other.tokens)

    def __bool__(self) -> bool:
        return bool(self.heads.runs and self.tokens.runs)

    def meets(self, other: Piece) -> bool:
        """Whether the two rectangles overlap."""
        return self.heads.meets(other.heads) and self.tokens.meets(other.tokens)

    def covers(self, other: Piece) -> bool:
        mine, its = self.heads, other.heads
        if mine.runs != its.runs and not mine.covers(its):
            return False
        return self.tokens.runs == other.tokens.runs or self.tokens.covers(other.tokens)

    def minus(self, other: Piece) -> list[Piece]:
        """Return what is left of this rectangle without the other, as at most two rectangles."""
        rest = [
            Piece(self.tensor, self.heads - other.heads, self.tokens),
            Piece(self.tensor, self.heads & other.heads, self.tokens - other.tokens),
        ]
        return [piece for piece in rest if piece]

    def without(self, others: Iterable[Piece]) -> list[Piece]:
        """Return what is left of this rectangle without any of the others."""
        left: list[Piece] = [self]
        for other in others:
            left = [rest for piece in left for rest in piece.minus(other)]
        return left

    @property
    def cells(self) -> int:
        """The number of (head, token) pairs."""
        return self.heads.size * self.tokens.size

    def is_like(self, other: Piece) -> bool:
        """Whether both are the same rectangle, of one tensor or of two."""
        return (self.heads, self.tokens) == (other.heads, other.tokens)

    def elements(self, problem: Problem | Switch) -> int:
        """Return the number of elements, over the batch; a kv piece is two tensors."""
        both = 2 if self.tensor.endswith("kv") else 1
        return both * problem.row_elements * self.cells

    def num_bytes(self, problem: Problem | Switch) -> int:
        return self.elements(problem) * (problem.sum_bytes if self.is_sum else problem.item_bytes)

    def __str__(self) -> str:
        return f"{self.tensor}[heads {str(self.heads)[8:-1]}, tokens {str(self.tokens)[8:-1]}]"


@dataclass(frozen=True)
class Transfer(Value):
    """A piece moves from one rank to another."""

    piece: Piece
    src: int
    dst: int

    def __str__(self) -> str:
        return f"{self.piece} {self.src}→{self.dst}"


@dataclass(frozen=True)
class Exchange(Value):
    """Transfers that start together: one packed message for each pair of ranks.

    It is issued here and waited for only where its data is used.
    """

    transfers: tuple[Transfer, ...]
    label: str = ""

    @property
    def messages(self) -> dict[tuple[int, int], list[Piece]]:
        """The pieces that go from one rank to another, by (source, target)."""
        pieces: dict[tuple[int, int], list[Piece]] = {}
        for transfer in self.transfers:
            pieces.setdefault((transfer.src, transfer.dst), []).append(transfer.piece)
        return pieces

    def __str__(self) -> str:
        shown = "; ".join(str(t) for t in self.transfers[:3])
        more = f"; … {len(self.transfers) - 3} more" if len(self.transfers) > 3 else ""
        return f"Exchange {self.label}({shown}{more})"


@dataclass(frozen=True)
class Attend(Value):
    """One rank attends some queries to some keys over the mask's active tiles.

    Forward, the result is merged into the output piece by log-sum-exp. In a backward schedule it
    adds to dq of the query piece and to dkv of the key/value piece.
    """

    rank: int
    q: Piece
    kv: Piece

    def __str__(self) -> str:
        return f"Attend on rank {self.rank}({self.q} × {self.kv})"


Op = Exchange | Attend


@dataclass(frozen=True, eq=False)
class Schedule(Value):
    """The operations of all ranks, in one order.

    >>> import weft
    >>> tokens = weft.Layout.even(8, 2)
    >>> problem = weft.Problem(batch=1, heads=2, kv_heads=2, head_dim=4, q=tokens, kv=tokens)
    >>> for op in weft.build("ulysses", problem).ops[1:]:
    ...     print(op)
    Attend on rank 0(q[heads 0, tokens 0-7] × kv[heads 0, tokens 0-7])
    Attend on rank 1(q[heads 1, tokens 0-7] × kv[heads 1, tokens 0-7])
    Exchange return(o[heads 0, tokens 4-7] 0→1; o[heads 1, tokens 0-3] 1→0)
    """

    name: str
    problem: Problem | Switch
    mask: BlockMask | None
    """None for a switch, which has no Attend either."""
    mesh: Mesh
    ops: tuple[Op, ...]
    backward: bool = False
    kept: tuple[tuple[Piece, ...], ...] = ()
    """Per rank, q and kv pieces that a backward schedule still has from the forward run."""

    @staticmethod
    def load(path: str | Path) -> Schedule:
        """Read a schedule from a file, such as `weft plan --save` writes, and check its structure.

        `weft.schedule.verify` proves that it computes its attention.
        """
        from weft.core.codec import loads
        from weft.core.files import read_bytes

        try:
            schedule = loads(read_bytes(Path(path), limit=MAX_FILE_BYTES))
            if not isinstance(schedule, Schedule):
                raise InputError(f"It must hold a Schedule, got a {type(schedule).__name__}.")
            schedule.check()
        except InputError as error:
            raise InputError(
                f"{path} holds no schedule: {str(error)[:MAX_REASON]}",
                hint="weft plan MODEL --save FILE writes one.",
            ) from None
        return schedule

    @property
    def attention(self) -> tuple[Problem, BlockMask]:
        """The problem and the mask of an attention; a switch raises."""
        if isinstance(self.problem, Switch) or self.mask is None:
            kind = f"a {type(self.problem).__name__} with {'no' if self.mask is None else 'a'} mask"
            raise InputError(f"Schedule {self.name!r} is {kind}, not an attention.")
        return self.problem, self.mask

    def check(self) -> None:
        """Raise an InputError that names the first field that does not fit the others."""
        ranks = self.problem.ranks
        sizes = [("mesh ranks", self.mesh.ranks, ranks), ("len(kept)", len(self.kept) or ranks, ranks)]
        if isinstance(self.problem, Problem) or self.mask is not None or any(self.attends()):
            problem, mask = self.attention
            sizes += [
                ("mask.heads", mask.heads, problem.heads),
                ("mask.q_len", mask.q_len, problem.q.size),
                ("mask.kv_len", mask.kv_len, problem.kv.size),
            ]
        for field, here, there in sizes:
            if here != there:
                raise InputError(f"{field} is {here:,}, the problem has {there:,}.")
        for index, transfer in self.transfers():
            self._check_piece(f"ops[{index}]", transfer.piece, transfer.src, transfer.dst)
        for index, op in self.attends():
            self._check_piece(f"ops[{index}].q", op.q, op.rank)
            self._check_piece(f"ops[{index}].kv", op.kv, op.rank)
        for rank, pieces in enumerate(self.kept):
            for piece in pieces:
                self._check_piece(f"kept[{rank}]", piece, rank)

    def _check_piece(self, field: str, piece: Piece, *ranks: int) -> None:
        problem = self.problem
        if not all(0 <= rank < problem.ranks for rank in ranks):
            raise InputError(f"{field}: ranks {ranks} are not among {problem.ranks:,}.")
        if piece.tensor not in TENSORS:
            raise InputError(
                f"{field}: unknown tensor {piece.tensor[:80]!r}.", hint=f"Known: {', '.join(TENSORS)}."
            )
        for name, indices, size in (
            ("heads", piece.heads, problem.heads_of(piece.tensor)),
            ("tokens", piece.tokens, problem.home(piece.tensor).size),
        ):
            edges = [edge for run in indices.runs for edge in run]
            if edges and not (edges[0] >= 0 and edges[-1] <= size and all(map(lt, edges, edges[1:]))):
                raise InputError(f"{field}: {name} {indices} are not sorted runs within 0 to {size:,}.")

    def transfers(self) -> Iterator[tuple[int, Transfer]]:
        for index, op in enumerate(self.ops):
            if isinstance(op, Exchange):
                for transfer in op.transfers:
                    yield index, transfer

    def attends(self) -> Iterator[tuple[int, Attend]]:
        for index, op in enumerate(self.ops):
            if isinstance(op, Attend):
                yield index, op

    @cached_property
    def digest(self) -> str:
        # Masks and layouts are hashed once: they are most of the bytes, and many schedules share them.
        sizes = [getattr(self.problem, field.name) for field in fields(self.problem)] + [self.mask]
        sizes = [value.digest if isinstance(value, Layout | BlockMask) else value for value in sizes]
        head = dumps([self.name, sizes, self.mesh, self.backward, self.kept])
        state = hashlib.sha256(head.encode())
        for op in self.ops:
            state.update(repr(_exact(op)).encode())
        return state.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        exchanges = sum(isinstance(op, Exchange) for op in self.ops)
        direction = ", backward" if self.backward else ""
        return (
            f"Schedule({self.name} on {self.mesh}{direction}: {exchanges} exchanges, "
            f"{len(self.ops) - exchanges} attends)"
        )

    def __str__(self) -> str:
        direction = " backward" if self.backward else ""
        task = self.problem if self.mask is None else self.mask
        lines = [f"{self.name}{direction} on {self.mesh} · {task} · {self.digest}"]
        lines += [f"{index:4d}  {op}" for index, op in enumerate(self.ops)]
        return "\n".join(lines)


def _exact(op: Op) -> tuple[object, ...]:
    """Return all fields of an operation exactly; the readable form of a piece omits runs."""

    def piece(p: Piece) -> tuple[object, ...]:
        return p.tensor, p.heads.runs, p.tokens.runs

    if isinstance(op, Attend):
        return op.rank, piece(op.q), piece(op.kv)
    return op.label, *((t.src, t.dst, *piece(t.piece)) for t in op.transfers)
