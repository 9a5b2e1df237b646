"""Roll call: find the late rank from the progress of all ranks.

NCCL pairs the n-th message that a rank sends to a peer with the n-th that the peer receives from it. So
each rank reports how many messages of each kind its stream has reached, and which of them it waits for: a
peer that has reached fewer is late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SEND, RECEIVE = "send", "receive"
OTHER_END = {SEND: RECEIVE, RECEIVE: SEND}
Endpoint = tuple[str, int]
"""(SEND or RECEIVE, peer)."""


@dataclass(frozen=True)
class RankProgress:
    """The progress of one rank.

    call       the number of the roll call that it answers.
    counts     messages that its stream has reached, by "send 3" and the like.
    waits      of the operation that it waits in: the same counts, including that operation.
    operation  the label of that operation, or of the last one posted.
    queued     posted operations that its stream has not reached.
    """

    call: int
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    waits: Mapping[str, int] = field(default_factory=dict[str, int])
    operation: str = ""
    queued: int = 0


def key(message: Endpoint) -> str:
    return f"{message[0]} {message[1]}"


def find_late_rank(
    answers: Sequence[RankProgress | None], operation: str, seconds: float, names: Sequence[int]
) -> tuple[int, str]:
    """Return the rank that is late, and the error message, the same for all ranks.

    answers     by rank; None if it did not answer.
    operation   the operation that the deciding rank waits in, for so many `seconds`.
    names       the global ranks of the group.
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
        reason = "its device has not come to it yet" if answer.queued else "it has not called it"
        last = f"; the last operation that it called is {answer.operation}" if answer.operation else ""
        return rank, f"Rank {names[rank]} is late: {waited}, and {reason}{last}."
    if behind:
        rank = min(behind, key=lambda rank: (-behind[rank], rank))
        apart = [(each, _answer(answers, each).operation) for each in waiting]
        others = ", ".join(f"rank {names[each]} in {label}" for each, label in apart if label != operation)
        differ = f", {others}: the ranks run different calls" if others else ""
        return rank, f"Rank {names[rank]} and the others wait for each other: {waited}{differ}."
    peers = [int(name.split()[1]) for rank in waiting[:1] for name in _answer(answers, rank).waits]
    rank = min(peers, default=0)
    return rank, f"A message of rank {names[rank]} does not arrive: {waited}, in which all of them take part."


def _missing(rank: int, answers: Sequence[RankProgress | None]) -> set[int]:
    """Return the peers that have not reached the messages that a rank waits for."""
    missing: set[int] = set()
    for name, count in _answer(answers, rank).waits.items():
        direction, peer = name.split()
        if _answer(answers, int(peer)).counts.get(key((OTHER_END[direction], rank)), 0) < count:
            missing.add(int(peer))
    return missing


def _answer(answers: Sequence[RankProgress | None], rank: int) -> RankProgress:
    answer = answers[rank]
    assert answer is not None
    return answer


def _ranks(ranks: Sequence[int], names: Sequence[int]) -> str:
    *first, last = [str(names[rank]) for rank in ranks] or ["?"]
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
