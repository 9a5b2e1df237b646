"""Agreement before movement: every rank says what it will run; nobody moves unless all say the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from weft.core.errors import AgreementError, CommError, WeftError
from weft.run.comm import Comm
from weft.run.exchange import start_gather

# What a rank has come for. Every meeting begins with four numbers of each rank, so that ranks which
# came for different things find out instead of waiting for, or misreading, each other.
COUNT, AGREE, INPUTS = 0, 1, 2
PURPOSES = (
    "count the tokens of an attention",
    "agree on an attention or a switch",
    "begin a model's forward",
)

Rows = list[list[int]]
"""Numbers of all ranks, by rank."""


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
    for name, (usual, odd) in differences(everyone, names).items():
        have = [f"rank {rank} has {name} {one}" for rank, one in odd.items()]
        found.append(f"{', '.join(have[:4])}, the others {usual}")
    if found:
        raise AgreementError(
            f"The ranks are about to run different {what}: {'; '.join(found)}.",
            hint="Give every rank the same call: same mask, plan, sizes, dtype and scale.",
        )


def differences(
    everyone: list[dict[str, str]], names: Iterable[str]
) -> dict[str, tuple[str, dict[int, str]]]:
    """Return the facts in which ranks differ: what most ranks have, and by rank what the others have."""
    different: dict[str, tuple[str, dict[int, str]]] = {}
    for name in names:
        values = [str(theirs.get(name)) for theirs in everyone]
        usual = Counter(values).most_common(1)[0][0]
        odd = {rank: value for rank, value in enumerate(values) if value != usual}
        if odd:
            different[name] = usual, odd
    return different


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


def start_inputs(comm: Comm, *numbers: int) -> Callable[[], Rows]:
    """Start to gather three numbers that stand for the inputs of a forward; calling the result waits.

    Only hosts wait for each other here, never for a device.
    """
    group = getattr(comm, "group", None)
    if group is None:
        rows = _meet(comm, INPUTS, *numbers)
        return lambda: rows
    finish = start_gather([INPUTS, *numbers], group, getattr(comm, "timeout", 60.0))
    return lambda: _checked(finish())


def _meet(comm: Comm, purpose: int, *numbers: int) -> Rows:
    row = [purpose, *numbers]
    return _checked(comm.gather_numbers(row + [0] * (4 - len(row))))


def _checked(rows: Rows) -> Rows:
    """Raise if ranks have come for different things."""
    purposes = [row[0] for row in rows]
    if len(set(purposes)) == 1:
        return rows
    by_purpose = {each: [rank for rank, one in enumerate(purposes) if one == each] for each in {*purposes}}
    if INPUTS in by_purpose:
        doing = [f"ranks {ranks} {PURPOSES[each]}" for each, ranks in sorted(by_purpose.items())]
        raise AgreementError(
            f"The ranks are in different calls: {', '.join(doing)}.",
            hint="Make the same calls on every rank, in the same order.",
        )
    raise AgreementError(
        f"Ranks {by_purpose[COUNT]} do not say how long the sequence is, ranks {by_purpose[AGREE]} do, or "
        "cannot take part.",
        hint="Give every rank the same call: tokens=, a mask or a plan on all of them, or on none.",
    )
