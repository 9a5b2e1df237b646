"""Agreement before movement: every rank says what it will run; nobody moves unless all say the same."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress

from weft.core.errors import AgreementError, CommError, WeftError
from weft.run.comm import Comm

# What a rank has come for. Every meeting begins with three numbers of each rank, so that ranks which
# came for different things find out instead of waiting for, or misreading, each other.
COUNT, AGREE = 0, 1


def count_rows(comm: Comm, q_rows: int, kv_rows: int) -> tuple[tuple[int, int], ...]:
    """Everyone's rows of q and of k, by rank."""
    return tuple((row[1], row[2]) for row in _meet(comm, COUNT, q_rows, kv_rows))


def agree(comm: Comm, facts: dict[str, str], what: str = "attentions", note: str = "") -> list[str]:
    """Compare facts over all ranks; a difference raises on every rank and names who differs in what.

    Return the notes of all ranks, by rank. They travel with the facts and may differ.
    """
    facts = facts | {"transport": comm.transport}
    everyone = gather_facts(comm, facts | {"note": note})
    check_same(everyone, tuple(facts), what)
    return [theirs.get("note", "") for theirs in everyone]


def gather_facts(comm: Comm, facts: dict[str, str]) -> list[dict[str, str]]:
    """Return the facts of all ranks by rank; if a rank cannot take part, raise on every rank."""
    everyone = [json.loads(text) for text in gather_text(comm, json.dumps(facts))]
    for rank, theirs in enumerate(everyone):
        if "error" in theirs:
            raise AgreementError(f"Rank {rank} cannot take part: {theirs['error']}")
    return everyone


def check_same(everyone: list[dict[str, str]], names: tuple[str, ...], what: str) -> None:
    """Raise if ranks differ in one of the named facts."""
    found: list[str] = []
    for name in names:
        said = [str(theirs.get(name)) for theirs in everyone]
        if len(set(said)) > 1:
            usual = Counter(said).most_common(1)[0][0]
            odd = [f"rank {rank} has {name} {one}" for rank, one in enumerate(said) if one != usual]
            found.append(f"{', '.join(odd[:4])}, the others {usual}")
    if found:
        raise AgreementError(
            f"The ranks are about to run different {what}: {'; '.join(found)}.",
            hint="Give every rank the same call: same mask, plan, sizes, dtype and scale.",
        )


def refuse(comm: Comm, error: WeftError) -> None:
    """Tell the others, who may be waiting to agree, that this rank cannot; it raises its own error next."""
    with suppress(CommError, AgreementError):
        gather_text(comm, json.dumps({"error": str(error)}))


def gather_text(comm: Comm, text: str) -> list[str]:
    """Return the texts of all ranks, in the order of their ranks."""
    data = list(text.encode())
    lengths = [row[1] for row in _meet(comm, AGREE, len(data), 0)]
    rows = comm.gather_numbers(data + [0] * (max(lengths) - len(data)))
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]


def _meet(comm: Comm, purpose: int, first: int, second: int) -> list[list[int]]:
    rows = comm.gather_numbers([purpose, first, second])
    counting = [rank for rank, row in enumerate(rows) if row[0] == COUNT]
    if 0 < len(counting) < comm.size:
        others = sorted(set(range(comm.size)) - set(counting))
        raise AgreementError(
            f"Ranks {counting} do not say how long the sequence is, ranks {others} do, or cannot take part.",
            hint="Give every rank the same call: tokens=, a mask or a plan on all of them, or on none.",
        )
    return rows
