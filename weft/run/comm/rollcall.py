"""Roll call: decide from the answers of all ranks which of them the others wait for.

NCCL pairs the n-th message that a rank sends to a peer with the n-th that the peer receives from it. So
each rank answers how many messages of each kind its stream has come to, and which of them it waits for: a
peer that has not come as far is waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SEND, RECEIVE = "send", "receive"
OTHER_END = {SEND: RECEIVE, RECEIVE: SEND}
Message = tuple[str, int]
"""(SEND or RECEIVE, peer)."""


@dataclass(frozen=True)
class Answer:
    """What one rank says.

    call       the number of the roll call that it answers.
    counts     messages that its stream has come to so far, by "send 3" and the like.
    waits      of the operation that it waits for: the same counts, that operation included.
    operation  the label of that operation, or of the last one that it posted.
    queued     operations that were posted and that its stream has not come to.
    """

    call: int
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    waits: Mapping[str, int] = field(default_factory=dict[str, int])
    operation: str = ""
    queued: int = 0

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def key(message: Message) -> str:
    return f"{message[0]} {message[1]}"


def verdict(
    answers: Sequence[Answer | None], operation: str, seconds: float, names: Sequence[int]
) -> tuple[int, str]:
    """Return the rank that is late, and a message that says so, the same for all ranks.

    answers     by rank; None of those that did not answer.
    operation   what the rank that called the roll waits for, and how long it has waited.
    names       what the world calls the ranks of the group.
    """
    waiting = [rank for rank, answer in enumerate(answers) if answer is not None and answer.waits]
    waited = f"{_ranks(waiting, names)} waited {seconds:.1f} s in {operation}"
    if lost := [rank for rank, answer in enumerate(answers) if answer is None]:
        return lost[0], f"{_ranks(lost, names).capitalize()} did not answer a roll call, and {waited}."
    behind = Counter(peer for rank in waiting for peer in _missing(rank, answers))
    late = [(-count, rank) for rank, count in behind.items() if rank not in waiting]
    if late:
        rank = min(late)[1]
        answer = _answer(answers, rank)
        where = "its device has not come to it yet" if answer.queued else "it has not called it"
        last = f"; the last operation that it called is {answer.operation}" if answer.operation else ""
        return rank, f"Rank {names[rank]} is late: {waited}, and {where}{last}."
    if behind:
        rank = min(behind, key=lambda rank: (-behind[rank], rank))
        apart = [(each, _answer(answers, each).operation) for each in waiting]
        others = ", ".join(f"rank {names[each]} in {where}" for each, where in apart if where != operation)
        differ = f", {others}: the ranks run different calls" if others else ""
        return rank, f"Rank {names[rank]} and the others wait for each other: {waited}{differ}."
    peers = [int(name.split()[1]) for rank in waiting[:1] for name in _answer(answers, rank).waits]
    rank = min(peers, default=0)
    return rank, f"A message of rank {names[rank]} does not arrive: {waited}, in which all of them take part."


def _missing(rank: int, answers: Sequence[Answer | None]) -> set[int]:
    """The peers whose ends of what a rank waits for are missing."""
    missing: set[int] = set()
    for name, count in _answer(answers, rank).waits.items():
        way, peer = name.split()
        if _answer(answers, int(peer)).counts.get(key((OTHER_END[way], rank)), 0) < count:
            missing.add(int(peer))
    return missing


def _answer(answers: Sequence[Answer | None], rank: int) -> Answer:
    answer = answers[rank]
    assert answer is not None
    return answer


def _ranks(ranks: Sequence[int], names: Sequence[int]) -> str:
    *first, last = [str(names[rank]) for rank in ranks] or ["?"]
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
