"""SuiteReport: merge the results of all ranks and attempts into one entry of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from weft.doctor.suite import Check, CheckSuite, SuiteStatus
from weft.doctor.supervisor import AttemptResult

Attempts = Sequence[Sequence[AttemptResult]]
WORST_FIRST: tuple[SuiteStatus, ...] = ("crashed", "hung", "failed")
MAX_MESSAGE = 400


def first_failure(results: Sequence[AttemptResult]) -> AttemptResult | None:
    """Return the result whose failure caused the others; a process that died goes first."""
    failed = [each for each in results if each.ending in ("crashed", "failed", "hung")]
    return min(failed, key=lambda each: (each.ending != "crashed", each.ended_at), default=None)


def finished(attempts: Attempts) -> tuple[str, ...]:
    """Return the checks that another attempt leaves out: those that are done, and those that broke one.

    Ranks may share the checks of a suite. A check that any rank is still in is not done.
    """
    names: set[str] = set()
    for results in attempts:
        names |= {check["name"] for result in results for check in result.checks}
        names -= {result.under_way for result in results}
        cause = first_failure(results)
        if cause is not None and cause.is_in_check:
            names.add(cause.under_way)
    return tuple(sorted(names))


def can_go_on(results: Sequence[AttemptResult]) -> bool:
    """Return whether a check broke the attempt, which the next one can leave out."""
    cause = first_failure(results)
    return cause is not None and cause.ending in ("crashed", "failed") and cause.is_in_check


def suite_report(suite: CheckSuite, attempts: Attempts, *, seconds: float, limit: float) -> dict[str, Any]:
    """Return the suite's entry of doctor.json; a limit below the suite's own is the rest of the budget."""
    causes = [cause for results in attempts if (cause := first_failure(results)) is not None]
    # An attempt with less time than the suite's limit does not prove that anything hangs.
    causes = [
        cause
        for cause in causes
        if cause.ending != "hung" or (cause in attempts[0] and limit >= suite.seconds)
    ]
    checks: dict[str, dict[str, Any]] = {}
    for results in attempts:
        checks |= merge_checks(results)
    for cause in causes:
        if cause.is_in_check:
            note = f"{cause.ending}: {_line(cause, len(attempts[0]))}"
            checks[cause.under_way] = asdict(Check(name=cause.under_way, status="wrong", note=note))
    worst = min(causes, key=lambda each: WORST_FIRST.index(each.ending), default=None)  # type: ignore[arg-type]
    status = _status([check["status"] for check in checks.values()]) if worst is None else worst.ending
    message = ""
    if worst is not None:
        message = _line(worst, len(attempts[0])) + (f" in {worst.under_way!r}" if worst.under_way else "")
        if len(attempts) > 1:
            message += f"; went on after it, {len(attempts)} attempts in all"
    elif attempts and any(result.ending == "hung" for result in attempts[0]):
        status, message = "skipped", f"the budget left it {limit:.0f} of its {suite.seconds:.0f} s"
    elif status == "skipped":
        message = next((check["note"] for check in checks.values() if check["note"]), "")
    return {
        "name": suite.name,
        "title": suite.title,
        "status": status,
        "seconds": round(seconds, 3),
        "limit": round(limit, 3),
        "message": message,
        "under_way": worst.under_way if worst else "",
        "traceback": _tracebacks(attempts, worst),
        "claims": list(suite.claims),
        "checks": list(checks.values()),
    }


def skipped(suite: CheckSuite, reason: str) -> dict[str, Any]:
    """Return the entry of a suite that was not begun."""
    return suite_report(suite, (), seconds=0.0, limit=0.0) | {"status": "skipped", "message": reason}


def merge_checks(results: Sequence[AttemptResult]) -> dict[str, dict[str, Any]]:
    """Return the checks of all ranks by name: a wrong one counts, else the last one of the first rank."""
    merged: dict[str, dict[str, Any]] = {}
    for result in results:
        for check in {check["name"]: check for check in result.checks}.values():
            name, note = check["name"], check["note"]
            if name not in merged:
                merged[name] = check
            elif check["status"] == "wrong" and merged[name]["status"] != "wrong":
                merged[name] = check | {"note": f"rank {result.rank}{': ' * bool(note)}{note}"}
    return merged


def _status(statuses: Sequence[str]) -> SuiteStatus:
    if "wrong" in statuses:
        return "wrong"
    return "skipped" if statuses and set(statuses) == {"skipped"} else "ok"


def _line(result: AttemptResult, ranks: int) -> str:
    colon = ":" if result.ending == "failed" else ""
    rank = "" if result.ending == "hung" or ranks == 1 else f"rank {result.rank}{colon} "
    text = " ".join(result.message.split())
    return rank + (text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 1]}…")


def _tracebacks(attempts: Attempts, worst: AttemptResult | None) -> str:
    """Return the stacks of the rank that broke and of those that hung or waited then; equal ones once."""
    if worst is None:
        return ""
    results = next(each for each in attempts if worst in each)
    others = {"hung": ("hung",), "failed": ("stopped",)}.get(worst.ending, ())
    shown = [worst, *(each for each in results if each.ending in others and each is not worst)]
    by_text: dict[str, list[int]] = {}
    for result in shown:
        by_text.setdefault(result.traceback.strip(), []).append(result.rank)
    texts = (f"rank {', '.join(map(str, ranks))}:\n{text}" for text, ranks in by_text.items() if text)
    return "\n\n".join(texts)
