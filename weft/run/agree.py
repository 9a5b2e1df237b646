"""Agreement: before anything is sent, all ranks compare what they will run; a difference raises on all."""

from __future__ import annotations

import json
import time
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from weft.core.errors import AgreementError, CommError, WeftError
from weft.run.comm import Comm
from weft.run.comm.group import SIGN_SECONDS, GroupComm, store_of
from weft.run.exchange import start_gather

# What a rank has come for. Every meeting begins with four numbers of each rank, so that ranks which
# came for different things find out instead of waiting for, or misreading, each other.
COUNT, AGREE, INPUTS, RUN = 0, 1, 2, 3
PURPOSES = (
    "count the tokens of an attention",
    "agree on an attention or a switch",
    "begin a model's forward",
    "run what they have agreed on before",
)
NEW = "not agreed on yet"
SAME_CALL = "Give every rank the same call: same mask, plan, sizes, dtype and scale."

Rows = list[list[int]]
"""Numbers of all ranks, by rank."""


def count_rows(comm: Comm, q_rows: int, kv_rows: int) -> tuple[tuple[int, int], ...]:
    """Everyone's rows of q and of k, by rank."""
    return tuple((row[1], row[2]) for row in _meet(comm, COUNT, q_rows, kv_rows))


def agree(comm: Comm, facts: dict[str, str], what: str = "attentions", note: str = "") -> list[str]:
    """Compare facts over all ranks; a difference raises on every rank and names the ranks and the facts.

    Return the notes of all ranks, by rank. They are sent with the facts and may differ.
    """
    facts = facts | {"transport": comm.transport}
    try:
        all_facts = gather_facts(comm, facts | {"note": note})
    except CommError as error:
        raise name_difference(comm, str(facts), NEW, error) from error
    check_same(all_facts, tuple(facts), what)
    return [theirs.get("note", "") for theirs in all_facts]


def gather_facts(comm: Comm, facts: dict[str, str]) -> list[dict[str, str]]:
    """Return the facts of all ranks by rank; if a rank cannot take part, raise on every rank."""
    all_facts = [json.loads(text) for text in gather_text(comm, json.dumps(facts))]
    for rank, theirs in enumerate(all_facts):
        if "error" in theirs:
            raise AgreementError(f"Rank {rank} cannot take part: {theirs['error']}")
    return all_facts


def check_same(all_facts: list[dict[str, str]], names: tuple[str, ...], what: str) -> None:
    """Raise if ranks differ in one of the named facts."""
    if text := _described(all_facts, names):
        raise AgreementError(f"The ranks are about to run different {what}: {text}.", hint=SAME_CALL)


def _described(all_facts: list[dict[str, str]], names: Iterable[str]) -> str:
    """Return a sentence that names the ranks that differ and the facts; empty if none differs."""
    texts: list[str] = []
    for name, (usual, odd) in differences(all_facts, names).items():
        have = [f"rank {rank} has {name} {one}" for rank, one in odd.items()]
        texts.append(f"{', '.join(have[:4])}, the others {usual}")
    return "; ".join(texts)


def differences(
    all_facts: list[dict[str, str]], names: Iterable[str]
) -> dict[str, tuple[str, dict[int, str]]]:
    """Return the facts in which ranks differ: what most ranks have, and by rank what the others have."""
    different: dict[str, tuple[str, dict[int, str]]] = {}
    for name in names:
        values = [str(theirs.get(name)) for theirs in all_facts]
        usual = Counter(values).most_common(1)[0][0]
        odd = {rank: value for rank, value in enumerate(values) if value != usual}
        if odd:
            different[name] = usual, odd
    return different


def name_difference(comm: Comm, name: str, program: str, error: CommError) -> CommError:
    """Return the error of a wait, with the calls of the ranks if they differ, exchanged over the store.

    name   the text of the facts that were agreed on, or are to be: then `program` is NEW.
    """
    base: Any = getattr(comm, "base", comm)
    if not isinstance(base, GroupComm):
        return error
    own = _facts(name, program)
    all_facts = [theirs or own for theirs in _say(base, base.calls + (program == NEW), own)]
    if text := _described(all_facts, [name for name in own if name != "transport"]):
        return CommError(f"The ranks run different calls: {text}. {error.message}", hint=SAME_CALL)
    return error


def check_call(comm: Comm, tag: int, name: str, program: str) -> None:
    """Raise if the ranks are about to run different calls, which `tag` stands for."""
    if len({row[1] for row in _meet(comm, RUN, tag)}) > 1:
        facts = _facts(name, program)
        check_same(gather_facts(comm, facts), tuple(facts), "calls")


def _facts(name: str, program: str) -> dict[str, str]:
    """Parse the facts of a call from its name, and add the program that runs."""
    facts: dict[str, str] = {"call": name}
    with suppress(ValueError, SyntaxError):  # the name has no facts
        facts = literal_eval(name[: name.rfind("}") + 1])
    return facts | {"program": program}


def _say(comm: GroupComm, call: int, facts: dict[str, str]) -> list[dict[str, str] | None]:
    """Return the n-th call of each rank that reports it in time."""
    all_facts: list[dict[str, str] | None] = [None] * comm.size
    deadline = time.monotonic() + SIGN_SECONDS
    try:
        store = store_of(comm.group)
        keys = [f"weft runs {comm.group.group_name} {comm.timeout} {rank}" for rank in range(comm.size)]
        store.set(keys[comm.rank], json.dumps([call, facts]))
        while None in all_facts and time.monotonic() < deadline:
            for rank, key in enumerate(keys):
                if all_facts[rank] is None and store.check([key]):
                    number, theirs = json.loads(store.get(key))
                    all_facts[rank] = theirs if number == call else None  # else it is of an earlier failure
            time.sleep(0.02)
    except Exception:  # the store may be lost with the rank that served it
        return all_facts
    return all_facts


def abort(comm: Comm, error: WeftError) -> None:
    """Notify ranks that may be waiting to agree that this rank failed; it raises its own error next."""
    with suppress(CommError, AgreementError):
        gather_text(comm, json.dumps({"error": str(error)}))


def gather_text(comm: Comm, text: str) -> list[str]:
    """Return the texts of all ranks, in the order of their ranks."""
    data = list(text.encode())
    lengths = [row[1] for row in _meet(comm, AGREE, len(data), 0)]
    rows = comm.all_gather_ints(data + [0] * (max(lengths) - len(data)))
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
    return _checked(comm.all_gather_ints(row + [0] * (4 - len(row))))


def _checked(rows: Rows) -> Rows:
    """Raise if ranks have come for different things."""
    purposes = [row[0] for row in rows]
    if len(set(purposes)) == 1:
        return rows
    by_purpose = {each: [rank for rank, one in enumerate(purposes) if one == each] for each in {*purposes}}
    if {INPUTS, RUN} & {*by_purpose}:
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
