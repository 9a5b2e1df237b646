"""Programs: what each rank does one after another when it runs a schedule, and what each step costs.

They are the programs that `run/directions` makes, without tensors: an exchange is posted where it stands in
the list, a message is waited for right before its first use, operands that lie in several places are
put together by a copy, and the end waits for all that is still under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.core.schedule import Attend, Exchange, Piece, Schedule
from weft.core.topology import Topology
from weft.schedule.labels import COPY, attend_name, finish_name, post_name, send_name, wait_name
from weft.simulate.costs import attend_seconds

RESULTS = {False: ("o", "x"), True: ("dq", "dkv", "x")}


@dataclass(slots=True, eq=False)
class Message:
    """All that one exchange moves from one rank to another."""

    op: int
    src: int
    dst: int
    num_bytes: int
    name: str
    pieces: tuple[_Key, ...]
    posts: int = 1
    """Ends that have yet to be posted before it may start."""
    start: float = 0.0
    done: bool = False


_Key = int
"""Equal pieces have equal numbers: they are asked for so often that even their hash would be too slow."""


class Wait(NamedTuple):
    message: Message
    name: str
    peer: int


class Meet(NamedTuple):
    """A barrier of all ranks."""

    op: int
    name: str


class Post(NamedTuple):
    messages: list[Message]


class Work(NamedTuple):
    """Something that keeps the compute lane busy: an attention or a copy."""

    kind: str
    op: int
    name: str
    seconds: float


Step = Wait | Meet | Post | Work


@dataclass(slots=True, eq=False)
class _Rank:
    steps: list[Step] = field(default_factory=list[Step])
    arrivals: dict[str, list[tuple[Piece, Message]]] = field(default_factory=lambda: defaultdict(list))
    exact: dict[_Key, Message] = field(default_factory=dict[_Key, Message])
    """Arrivals by what they brought."""
    whole: dict[tuple[_Key, ...], Message] = field(default_factory=dict[tuple[_Key, ...], Message])
    """Messages by all that they brought: an equal one goes on as it came, without a copy."""
    operands: set[_Key] = field(default_factory=set[_Key])
    """What attentions have read so far: it is there and put together."""
    waited: set[Message] = field(default_factory=set[Message])
    sent: list[Message] = field(default_factory=list[Message])

    def receive(self, message: Message, pieces: list[Piece]) -> None:
        self.whole.setdefault(message.pieces, message)
        for key, piece in zip(message.pieces, pieces, strict=True):
            self.exact.setdefault(key, message)
            self.arrivals[piece.tensor].append((piece, message))

    def bringing(self, piece: Piece, key: _Key) -> list[Message]:
        """The messages that a piece comes from; none, if it is at home."""
        if key in self.exact:
            return [self.exact[key]]
        met = (message for had, message in self.arrivals[piece.tensor] if had.meets(piece))
        return list(dict.fromkeys(met))


class Programmer:
    """Walks a schedule once and writes all ranks' steps."""

    def __init__(self, schedule: Schedule, topology: Topology) -> None:
        self.schedule, self.topology, self.problem = schedule, topology, schedule.problem
        self.ranks = [_Rank() for _ in range(self.problem.ranks)]
        self.posts = 2 if topology.two_sided else 1
        self.byte_seconds = 2 / topology.memory_bandwidth if topology.memory_bandwidth else 0.0
        self.results = RESULTS[schedule.backward]
        self.numbers: dict[tuple[object, ...], _Key] = {}
        self.tensors: list[str] = []
        self.known: dict[int, tuple[_Key, int]] = {}

    def write(self, works: dict[int, int], seconds: dict[int, float] | None = None) -> list[list[Step]]:
        for index, op in enumerate(self.schedule.ops):
            if isinstance(op, Exchange):
                self._exchange(index, op)
            elif seconds is None:
                cost = attend_seconds(self.topology, *self.schedule.attention, works[index], op)
                self._attend(index, op, cost)
            else:
                self._attend(index, op, seconds[index])
        for rank in range(self.problem.ranks):
            self._end(rank)
        return [rank.steps for rank in self.ranks]

    def _wait(self, rank: _Rank, messages: Iterable[Message]) -> None:
        """Until some messages are here, each waited for once."""
        for message in messages:
            if message not in rank.waited:
                rank.waited.add(message)
                name = wait_name(self.schedule, message.op, message.src)
                rank.steps.append(Wait(message, name, message.src))

    def _exchange(self, index: int, op: Exchange) -> None:
        if self.topology.barriers:
            for rank in self.ranks:
                rank.steps.append(Meet(index, post_name(self.schedule, index)))
        going: dict[int, list[Message]] = defaultdict(list)
        coming: dict[int, list[tuple[Message, list[Piece]]]] = defaultdict(list)
        for (src, dst), pieces in op.messages.items():
            keys, sizes = zip(*map(self._told, pieces), strict=True)
            name = send_name(self.schedule, index, dst)
            message = Message(index, src, dst, sum(sizes), name, keys, self.posts)
            going[src].append(message)
            coming[dst].append((message, pieces))
            self._pack(message, pieces)
        for rank in sorted(going.keys() | coming.keys()):
            self._post(index, self.ranks[rank], going[rank], [message for message, _ in coming[rank]])
        # Only now: what an exchange brings cannot go on in the same exchange.
        for rank, arrived in coming.items():
            for message, pieces in arrived:
                self.ranks[rank].receive(message, pieces)

    def _told(self, piece: Piece) -> tuple[_Key, int]:
        """Key and bytes of a piece; the same one goes around a ring, and is asked only once."""
        found = self.known.get(id(piece))
        if found is None:
            number = self.numbers.setdefault(
                (piece.tensor, piece.heads.runs, piece.tokens.runs), len(self.tensors)
            )
            if number == len(self.tensors):
                self.tensors.append(piece.tensor)
            found = self.known[id(piece)] = (number, piece.num_bytes(self.problem))
        return found

    def _pack(self, message: Message, pieces: list[Piece]) -> None:
        sender = self.ranks[message.src]
        if came := sender.whole.get(message.pieces):
            self._wait(sender, (came,))
            return
        for key, piece in zip(message.pieces, pieces, strict=True):
            if piece.tensor not in self.results:
                self._wait(sender, sender.bringing(piece, key))
        self._copy(sender, message.op, message.num_bytes)

    def _post(self, index: int, rank: _Rank, going: list[Message], coming: list[Message]) -> None:
        if self.topology.post_seconds:
            cost = self.topology.post_seconds * (len(going) + len(coming))
            rank.steps.append(Work("copy", index, post_name(self.schedule, index), cost))
        rank.sent += going
        both = going + coming if self.topology.two_sided else going
        if both:
            rank.steps.append(Post(both))

    def _attend(self, index: int, op: Attend, seconds: float) -> None:
        rank = self.ranks[op.rank]
        for piece in (op.q, op.kv):
            key, size = self._told(piece)
            if key not in rank.operands:
                rank.operands.add(key)
                sources = rank.bringing(piece, key)
                self._wait(rank, sources)
                if not _in_place(piece, key, sources):
                    self._copy(rank, index, size)
        rank.steps.append(Work("attend", index, attend_name(self.schedule, index), seconds))

    def _end(self, number: int) -> None:
        """Results are put together at home, then everything that is under way is waited for."""
        rank, problem = self.ranks[number], self.problem
        for tensor in self.results:
            arrived = list(dict.fromkeys(message for _, message in rank.arrivals[tensor]))
            self._wait(rank, arrived)
            operand = tensor.lstrip("d").replace("o", "q")
            parts = [key for key in rank.operands if self.tensors[key] == operand]
            if arrived or len(parts) > 1:
                planes = 2 if tensor == "dkv" else 1
                rows = planes * problem.heads_of(tensor) * problem.home(tensor).rows(number)
                self._copy(rank, -1, rows * problem.row_elements * problem.item_bytes)
        self._wait(rank, rank.whole.values())
        for message in rank.sent:
            rank.steps.append(Wait(message, finish_name(self.schedule, message.op), message.dst))

    def _copy(self, rank: _Rank, index: int, num_bytes: int) -> None:
        if self.byte_seconds:
            rank.steps.append(Work("copy", index, COPY, num_bytes * self.byte_seconds))


def _in_place(piece: Piece, key: _Key, sources: list[Message]) -> bool:
    """Whether an operand is used where it lies: one stretch at home, or a piece of one message."""
    if not sources:
        return len(piece.tokens.runs) == 1 and len(piece.heads.runs) == 1
    return len(sources) == 1 and key in sources[0].pieces
