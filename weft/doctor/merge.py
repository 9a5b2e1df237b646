"""Merge: one report of a part from the accounts of all ranks, over all attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.doctor.keeper import Account
from weft.doctor.part import Ending, Part

Attempts = Sequence[Sequence[Account]]
WORST_FIRST: tuple[Ending, ...] = ("crashed", "hung", "failed")
MAX_MESSAGE = 400


def first_failure(accounts: Sequence[Account]) -> Account | None:
    """Return the account of the failure that the others follow from; a process that died goes first."""
    failed = [each for each in accounts if each.how in ("crashed", "failed", "hung")]
    return min(failed, key=lambda each: (each.how != "crashed", each.ended_at), default=None)


def finished(attempts: Attempts) -> tuple[str, ...]:
    """Return the checks that another attempt need not do: those that are done, and those that broke one.

    Ranks may share the checks of a part. What one rank has done and another is still in is not done.
    """
    names: set[str] = set()
    for accounts in attempts:
        names |= {check["name"] for account in accounts for check in account.checks}
        names -= {account.under_way for account in accounts}
        cause = first_failure(accounts)
        if cause is not None and cause.is_in_check:
            names.add(cause.under_way)
    return tuple(sorted(names))


def can_go_on(accounts: Sequence[Account]) -> bool:
    """Whether another attempt may get further: a check broke this one, which the next can leave out."""
    cause = first_failure(accounts)
    return cause is not None and cause.how in ("crashed", "failed") and cause.is_in_check


def part_report(
    part: Part, attempts: Attempts, *, seconds: float, limit: float, is_cut: bool = False
) -> dict[str, Any]:
    """Return the part as doctor.json has it; `is_cut`: its limit is what was left of the budget."""
    causes = [cause for accounts in attempts if (cause := first_failure(accounts)) is not None]
    # An attempt that had less time than the part is to have does not show that anything hangs.
    causes = [cause for cause in causes if cause.how != "hung" or (cause in attempts[0] and not is_cut)]
    checks: dict[str, dict[str, Any]] = {}
    for accounts in attempts:
        checks |= merge_checks(accounts)
    for cause in causes:
        if cause.is_in_check:
            note = f"{cause.how}: {_line(cause, len(attempts[0]))}"
            checks[cause.under_way] = _check(cause.under_way, "wrong", note)
    worst = min(causes, key=lambda each: WORST_FIRST.index(each.how), default=None)  # type: ignore[arg-type]
    status = _status([check["status"] for check in checks.values()]) if worst is None else worst.how
    message = ""
    if worst is not None:
        where = f" in {worst.under_way!r}" if worst.under_way else ""
        message = f"{_line(worst, len(attempts[0]))}{where}"
        if len(attempts) > 1:
            message += f"; went on after it, {len(attempts)} attempts in all"
    elif attempts and any(account.how == "hung" for account in attempts[0]):
        status, message = "skipped", f"the budget left it {limit:.0f} of its {part.seconds:.0f} s"
    elif status == "skipped":
        message = next((check["note"] for check in checks.values() if check["note"]), "")
    return {
        "name": part.name,
        "title": part.title,
        "status": status,
        "seconds": round(seconds, 3),
        "limit": round(limit, 3),
        "message": message,
        "under_way": worst.under_way if worst else "",
        "traceback": _tracebacks(attempts, worst),
        "claims": list(part.claims),
        "checks": list(checks.values()),
    }


def skipped(part: Part, reason: str) -> dict[str, Any]:
    """Return a part that was not begun."""
    return part_report(part, (), seconds=0.0, limit=0.0) | {"status": "skipped", "message": reason}


def merge_checks(accounts: Sequence[Account]) -> dict[str, dict[str, Any]]:
    """Return the checks of all ranks by name: a wrong one counts, else that of the first rank, its last."""
    merged: dict[str, dict[str, Any]] = {}
    for account in accounts:
        for check in {check["name"]: check for check in account.checks}.values():
            name, note = check["name"], check["note"]
            if name not in merged:
                merged[name] = check
            elif check["status"] == "wrong" and merged[name]["status"] != "wrong":
                merged[name] = check | {"note": f"rank {account.rank}{': ' * bool(note)}{note}"}
    return merged


def _check(name: str, status: str, note: str) -> dict[str, Any]:
    return {"name": name, "status": status, "note": note, "numbers": {}, "data": None}


def _status(statuses: Sequence[str]) -> Ending:
    if "wrong" in statuses:
        return "wrong"
    return "skipped" if statuses and set(statuses) == {"skipped"} else "ok"


def _line(account: Account, ranks: int) -> str:
    colon = ":" if account.how == "failed" else ""
    rank = "" if account.how == "hung" or ranks == 1 else f"rank {account.rank}{colon} "
    said = " ".join(account.message.split())
    return rank + (said if len(said) <= MAX_MESSAGE else f"{said[: MAX_MESSAGE - 1]}…")


def _tracebacks(attempts: Attempts, worst: Account | None) -> str:
    """Return the stack of the rank that broke, and of those that hung or waited then; equal ones once."""
    if worst is None:
        return ""
    accounts = next(each for each in attempts if worst in each)
    others = {"hung": ("hung",), "failed": ("stopped",)}.get(worst.how, ())
    shown = [worst, *(each for each in accounts if each.how in others and each is not worst)]
    by_text: dict[str, list[int]] = {}
    for account in shown:
        by_text.setdefault(account.traceback.strip(), []).append(account.rank)
    told = (f"rank {', '.join(map(str, ranks))}:\n{text}" for text, ranks in by_text.items() if text)
    return "\n\n".join(told)
