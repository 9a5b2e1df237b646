"""Proof: the walk that all proofs share: what each rank holds and, of an attention, which tiles are done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import NoReturn

import numpy as np

from weft.core.errors import ScheduleError
from weft.core.indices import IntArray
from weft.core.mask import BoolArray
from weft.core.schedule import TENSORS, Attend, Op, Piece, Schedule, Transfer
from weft.schedule.cells import TokenCells

MAX_CELLS = 1 << 34
"""Bytes of an array: a small file can have many heads, ranks and tokens."""


class ScheduleProof(ABC):
    """One pass over the operations of a schedule; the first broken rule raises."""

    def __init__(self, schedule: Schedule, *tensors: str) -> None:
        """`tensors` are those of which each rank holds a shard at the start."""
        self.schedule = schedule
        self.problem = schedule.problem
        self.at: tuple[int, object] = (-1, None)
        self.check_pieces()
        self.cells = TokenCells(schedule)
        self.held = {tensor: self.nothing(tensor) for tensor in tensors}
        for tensor, held in self.held.items():
            held |= self.at_home(tensor)

    def nothing(self, tensor: str) -> BoolArray:
        """Return [ranks, heads, cells] of a tensor, all False."""
        cells = self.cells.count(is_kv=tensor == "kv")
        shape = self.check_size(self.problem.ranks, self.problem.heads_of(tensor), cells)
        return np.zeros(shape, dtype=bool)

    def check_size(self, *shape: int) -> tuple[int, ...]:
        if (cells := prod(shape)) > MAX_CELLS:
            self.fail(f"a proof needs {cells:,} cells.", hint=f"The limit is {MAX_CELLS:,} cells.")
        return shape

    def at_home(self, tensor: str) -> BoolArray:
        """Return [ranks, heads, cells]: what each rank holds before anything moves."""
        home = self.nothing(tensor)
        for rank in range(self.problem.ranks):
            cells = self.cells.of(self.problem.home(tensor).held(rank), is_kv=tensor == "kv")
            home[rank][:, cells] = True
        return home

    def fail(self, reason: str, hint: str = "") -> NoReturn:
        index, op = self.at
        location = f"op {index}, {op}: " if index >= 0 else ""
        raise ScheduleError(f"{self.schedule.name}: {location}{reason}", hint=hint)

    def step(self, index: int, op: Op) -> None:
        if isinstance(op, Attend):
            self.at = (index, op)
            self.attend(op)
            return
        # Transfers of one exchange start together, so none of them may read what another one brings.
        for transfer in op.transfers:
            self.at = (index, transfer)
            self.leave(transfer)
        for transfer in op.transfers:
            self.at = (index, transfer)
            self.arrive(transfer)

    def check_pieces(self) -> None:
        """Every rank exists and every piece lies inside its tensor."""
        for index, transfer in self.schedule.transfers():
            self.at = (index, transfer)
            self.check_ranks(transfer.src, transfer.dst)
            if transfer.src == transfer.dst:
                self.fail("a rank sends to itself.")
            self.check_bounds(transfer.piece)
        for index, op in self.schedule.attends():
            self.at = (index, op)
            self.check_ranks(op.rank)
            if (op.q.tensor, op.kv.tensor) != ("q", "kv"):
                self.fail("an Attend reads a piece of q and a piece of kv.")
            self.check_bounds(op.q)
            self.check_bounds(op.kv)
        self.at = (-1, None)
        if self.schedule.kept and (self.schedule.mask is None or not self.schedule.backward):
            self.fail("only a backward attention has pieces that were kept.")
        for piece in (piece for pieces in self.schedule.kept for piece in pieces):
            self.check_bounds(piece)

    def check_ranks(self, *ranks: int) -> None:
        if any(rank not in range(self.problem.ranks) for rank in ranks):
            self.fail(f"there is no such rank; ranks are 0 to {self.problem.ranks - 1}.")

    def check_bounds(self, piece: Piece) -> None:
        if piece.tensor not in TENSORS:
            self.fail(f"there is no tensor {piece.tensor!r}; pieces are of {', '.join(TENSORS)}.")
        heads, size = self.problem.heads_of(piece.tensor), self.problem.home(piece.tensor).size
        if not piece or piece.heads.runs[-1][1] > heads or piece.tokens.runs[-1][1] > size:
            self.fail(f"{piece} is empty or reaches beyond {heads} heads and {size} tokens.")

    def require(self, held: BoolArray, piece: Piece, what: str) -> None:
        missing = ~held[self.cells.index(piece)]
        if missing.any():
            head, cell = (int(axis[0]) for axis in np.nonzero(missing))
            token = self.cells.first_token(piece, cell)
            self.fail(
                f"{what} {piece.tensor} of head {int(piece.heads.array[head])}, token {token} at this point."
            )

    def copy_in(self, transfer: Transfer, held: BoolArray, at_home: BoolArray | None = None) -> None:
        """Check that a piece arrives once; it may include what the rank has `at_home`."""
        cells = self.cells.index(transfer.piece)
        again = held[transfer.dst][cells]
        if at_home is not None:
            again = again & ~at_home[transfer.dst][cells]
        if again.any():
            self.fail(f"rank {transfer.dst} already has some of it.")
        held[transfer.dst][cells] = True

    @abstractmethod
    def attend(self, op: Attend) -> None:
        """Check that an Attend may run now."""

    @abstractmethod
    def leave(self, transfer: Transfer) -> None:
        """Check that the source can send the piece at this point of the schedule."""

    @abstractmethod
    def arrive(self, transfer: Transfer) -> None:
        """Check that the target can receive the piece at this point of the schedule."""

    @abstractmethod
    def end(self) -> None:
        """Check that everything is done and delivered."""


class AttentionProof(ScheduleProof):
    """State of a proof of either direction of an attention: which tiles are done, and on which rank."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule, "q", "kv")
        self.attention, self.mask = schedule.attention
        if schedule.backward:
            self.held["o"] = self.nothing("o")
        for rank, pieces in enumerate(schedule.kept):
            for piece in pieces:
                if piece.tensor not in self.held:
                    self.fail(f"{piece} cannot be kept.")
                self.held[piece.tensor][rank][self.cells.index(piece)] = True
        self.q_block = self.cells.blocks(self.mask.block_q, is_kv=False)
        self.kv_block = self.cells.blocks(self.mask.block_k, is_kv=True)
        shape = self.check_size(self.attention.heads, len(self.q_block), len(self.kv_block))
        self.todo = self.active(*map(np.arange, shape))
        self.has_tiles = np.asarray(self.todo.any(axis=2))
        self.tiles_left = self.todo.sum(axis=2)
        self.owner = np.full(shape[:2], -1, dtype=np.int64)

    def active(self, heads: IntArray, q_cells: IntArray, kv_cells: IntArray) -> BoolArray:
        """Return where the mask is active: [heads, q cells, kv cells]."""
        patterns = np.asarray(self.mask.pattern_of)[heads]
        return self.mask.patterns[np.ix_(patterns, self.q_block[q_cells], self.kv_block[kv_cells])]

    def attend(self, op: Attend) -> None:
        """Check that both pieces have arrived in whole blocks, tiles are new, and rows stay on one rank."""
        if not op.kv.heads.covers(self.attention.kv_heads_of(op.q.heads)):
            self.fail(
                f"query heads {op.q.heads} need key/value heads {self.attention.kv_heads_of(op.q.heads)}."
            )
        for piece in (op.q, op.kv):
            self.require(self.held[piece.tensor][op.rank], piece, f"rank {op.rank} does not have")
            self.check_blocks(piece)
        heads = op.q.heads.array
        q_cells = self.cells.of(op.q.tokens, is_kv=False)
        kv_cells = self.cells.of(op.kv.tokens, is_kv=True)
        active = self.active(heads, q_cells, kv_cells)
        tiles = np.ix_(heads, q_cells, kv_cells)
        if (again := active & ~self.todo[tiles]).any():
            head, row, col = (int(axis[0]) for axis in np.nonzero(again))
            tile = (int(heads[head]), self.q_block[q_cells[row]], self.kv_block[kv_cells[col]])
            self.fail("tile (head {}, q block {}, kv block {}) is computed a second time.".format(*tile))
        self.todo[tiles] &= ~active
        rows = np.ix_(heads, q_cells)
        self.tiles_left[rows] -= active.sum(axis=2)
        touched = np.asarray(active.any(axis=2))
        other = touched & (self.owner[rows] >= 0) & (self.owner[rows] != op.rank)
        if other.any():
            self.fail(f"some of its rows are also computed on rank {self.owner[rows][other][0]}.")
        self.owner[rows] = np.where(touched, op.rank, self.owner[rows])
        self.attended(op, touched, np.asarray(active.any(axis=1)))

    def check_blocks(self, piece: Piece) -> None:
        mask = self.mask
        block, size = (mask.block_k, mask.kv_len) if piece.tensor == "kv" else (mask.block_q, mask.q_len)
        cut = any(a % block or (b % block and b != size) for a, b in piece.tokens.runs)
        if cut and not mask.is_dense:
            self.fail(f"{piece} cuts a block of {block} tokens in two.")

    def check_all_done(self) -> None:
        self.at = (-1, None)
        if self.todo.any():
            head, row, col = (int(axis[0]) for axis in np.nonzero(self.todo))
            tile = (head, self.q_block[row], self.kv_block[col])
            self.fail("tile (head {}, q block {}, kv block {}) is never computed.".format(*tile))

    @abstractmethod
    def attended(self, op: Attend, rows: BoolArray, cols: BoolArray) -> None:
        """Take a checked Attend, which touches `rows` [heads, q cells] and `cols` [heads, kv cells]."""
