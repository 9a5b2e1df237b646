"""Agreement before movement: every rank says what it will run; nobody moves unless all say the same."""

from __future__ import annotations

import json
from collections import Counter

from weft.core.errors import AgreementError, WeftError
from weft.run.comm import Comm


def agree(comm: Comm, facts: dict[str, str]) -> None:
    """Compare facts over all ranks; a difference raises on every rank and names who differs in what."""
    everyone = [json.loads(text) for text in gather_text(comm, json.dumps(facts))]
    for rank, theirs in enumerate(everyone):
        if "error" in theirs:
            raise AgreementError(f"Rank {rank} cannot take part: {theirs['error']}")
    found: list[str] = []
    for name in facts:
        said = [str(theirs.get(name)) for theirs in everyone]
        if len(set(said)) > 1:
            usual = Counter(said).most_common(1)[0][0]
            odd = [f"rank {rank} has {name} {one}" for rank, one in enumerate(said) if one != usual]
            found.append(f"{', '.join(odd[:4])}, the others {usual}")
    if found:
        raise AgreementError(
            f"The ranks are about to run different attentions: {'; '.join(found)}.",
            hint="Give every rank the same call: same mask, plan, sizes, dtype and scale.",
        )


def refuse(comm: Comm, error: WeftError) -> None:
    """Tell the others, who are waiting to agree, that this rank cannot, before raising here."""
    gather_text(comm, json.dumps({"error": str(error)}))


def gather_text(comm: Comm, text: str) -> list[str]:
    """Everyone's text, by rank: one exchange of lengths, one of bytes."""
    data = list(text.encode())
    lengths = [row[0] for row in comm.gather_numbers([len(data)])]
    rows = comm.gather_numbers(data + [0] * (max(lengths) - len(data)))
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]
