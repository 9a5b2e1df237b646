"""Pieces of a schedule as one rank sees them: its part of each operation, and numbers for equal pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weft.core.problem import Problem, Switch
from weft.core.schedule import Attend, Exchange, Piece, Schedule
from weft.program.slots import Shape


class Message(list[Piece]):
    """All pieces that go from one rank to another in one exchange."""

    __slots__ = ("numbers",)

    def __init__(self, pieces: Iterable[Piece], numbers: tuple[int, ...]) -> None:
        super().__init__(pieces)
        self.numbers = numbers


class Messages(NamedTuple):
    """One rank's part of an exchange: pieces by peer, in the order in which both ends pack them."""

    label: str
    sends: dict[int, Message]
    receives: dict[int, Message]
    collective: bool
    tensors: frozenset[str]
    """Of which there are pieces between any two ranks."""


Part = tuple[int, Attend | Messages]
"""An operation of the schedule, by its index, as far as one rank takes part in it."""


Form = tuple[int, str, Shape, int]
"""Bytes, dtype, shape and unit of a slot."""


class Pieces:
    """Numbers of pieces: equal ones have equal numbers, on all ranks of a schedule.

    They are kept by identity: the same piece goes around a ring, and even its hash would be slow.
    """

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.forms: dict[int, Form] = {}
        """What all slots of a piece have in common, by its number."""
        self.disjoint: set[frozenset[int]] = set()
        """Pieces that have no parts in common, by number: those of the ranks of a ring are the same."""
        self._numbers: dict[tuple[object, ...], int] = {}
        self._alive: list[Piece] = []

    def number(self, piece: Piece) -> int:
        number = self.known.get(id(piece))
        if number is None:
            key = (piece.tensor, piece.heads.runs, piece.tokens.runs)
            number = self.known[id(piece)] = self._numbers.setdefault(key, len(self._numbers))
            self._alive.append(piece)  # or its identity could become another's
        return number

    def message(self, pieces: list[Piece]) -> Message:
        return Message(pieces, tuple([self.number(piece) for piece in pieces]))


def parts_of(schedule: Schedule, ranks: Iterable[int], numbers: Pieces) -> dict[int, list[Part]]:
    """Each rank's part of every operation, in one pass over the schedule."""
    parts: dict[int, list[Part]] = {rank: [] for rank in ranks}
    every = schedule.problem.ranks
    for index, op in enumerate(schedule.ops):
        if isinstance(op, Attend):
            if op.rank in parts:
                parts[op.rank].append((index, op))
            continue
        mine: dict[int, Messages] = {}
        collective = len(op.transfers) >= every * (every - 1) > 0 and _is_bulk(op, schedule.problem)
        if len(parts) < every:  # most transfers are between others
            op = Exchange(tuple([t for t in op.transfers if t.src in parts or t.dst in parts]), op.label)  # noqa: PLW2901
        tensors = frozenset([transfer.piece.tensor for transfer in op.transfers])
        for (src, dst), pieces in op.messages.items():
            message = numbers.message(pieces)
            for rank, peer in ((src, dst), (dst, src)):
                if rank in parts:
                    part = mine.get(rank)
                    if part is None:
                        part = mine[rank] = Messages(op.label, {}, {}, collective, tensors)
                    (part.sends if rank == src else part.receives)[peer] = message
        for rank, part in mine.items():
            parts[rank].append((index, part))
    return parts


def _is_bulk(exchange: Exchange, problem: Problem | Switch) -> bool:
    """Whether one all_to_all can do an exchange: between any two ranks there is a message."""
    pairs = {(transfer.src, transfer.dst) for transfer in exchange.transfers}
    gathers = isinstance(problem, Switch) and problem.dims[1] is None  # all would send the same to each
    # Parts of one buffer lie without gaps, so they must be of one size of item.
    by_tensor = {transfer.piece.tensor: transfer.piece for transfer in exchange.transfers}
    mixed = len({piece.is_sum for piece in by_tensor.values()}) > 1
    return len(pairs) == problem.ranks * (problem.ranks - 1) and not gathers and not mixed
