"""Examine: run the suites one after the other within a time budget, and write the report."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from weft import __version__
from weft.core.errors import InputError
from weft.core.files import whole, writing
from weft.doctor.check_machine import machine_of
from weft.doctor.child import MACHINE, AttemptSpec
from weft.doctor.privacy import cleaned, private_words
from weft.doctor.suite import CheckSuite, topology_text
from weft.doctor.suite_report import can_go_on, finished, first_failure, skipped, suite_report
from weft.doctor.suites import NOT_COVERED, SUITES
from weft.doctor.supervisor import AttemptResult, Supervisors

SCHEMA = 1
MAX_ATTEMPTS = 4
MIN_SECONDS = 2.0
"""An attempt with less time would not even join."""
PUBLIC = frozenset(re.findall(r"\w+", repr(SUITES).lower()))
"""Words of the suites themselves: never private, even if they are the name of a user or a host."""
WRITE_HINT = "Pass a writable folder as --out."

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The suites to run, on which device, within how much time."""

    suites: Sequence[CheckSuite]
    device: str = "cuda"
    seconds: float = 600.0
    machines: int = 1
    on_begin: Callable[[CheckSuite], None] = lambda _: None
    on_end: Callable[[Report], None] = lambda _: None


def serve_rank(examination: Examination) -> Report | None:
    """Supervise this launched rank to the end; return the report on rank 0."""
    if examination.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hides the GPUs from the children
    supervisors = Supervisors()
    words = [word for word in supervisors.share(private_words()) if word.lower() not in PUBLIC]
    if supervisors.rank:
        supervisors.follow()
        return None
    try:
        return _examined(examination, supervisors, words)
    finally:
        supervisors.end()


def _examined(examination: Examination, supervisors: Supervisors, words: Sequence[str]) -> Report:
    began = time.monotonic()
    facts = _facts(examination, supervisors)
    entries: list[Report] = []
    for suite in examination.suites:
        left = examination.seconds - (time.monotonic() - began)
        if supervisors.is_stopped.is_set():
            entry = skipped(suite, "stopped before it began")
        elif left < MIN_SECONDS:
            entry = skipped(suite, "no time left: pass more --minutes, or --only some parts")
        else:
            examination.on_begin(suite)
            entry = _run(suite, examination, supervisors, left)
        entries.append(cleaned(entry, words))
        examination.on_end(entries[-1])
    return {
        "schema": SCHEMA,
        "weft": __version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "is_rehearsal": examination.device != "cuda",
        "made_up": False,
        "seconds": round(time.monotonic() - began, 3),
        "never_ran": [*(claim for suite in examination.suites for claim in suite.claims), *NOT_COVERED],
        "machine": machine_of(facts, device=examination.device, machines=examination.machines),
        "parts": entries,
        "topology": _topology(entries),
    }


def _facts(examination: Examination, supervisors: Supervisors) -> list[dict[str, Any]]:
    """Return the facts of each rank's device; without a GPU there is nothing to examine."""
    spec = AttemptSpec(suite=MACHINE.name, seconds=MACHINE.seconds, device=examination.device)
    results = supervisors.run_attempt(spec)
    cause = first_failure(results)
    if cause is not None and cause.ending == "failed" and "InputError" in cause.message:
        raise InputError(f"Rank {cause.rank}: {cause.message.partition(': ')[2]}")
    return [result.checks[0]["data"] if result.checks else {} for result in results]


def _run(suite: CheckSuite, examination: Examination, supervisors: Supervisors, left: float) -> Report:
    """Run a suite, again after a check that broke it, within its limit and the rest of the budget."""
    limit = min(suite.seconds, left)
    began = time.monotonic()
    attempts: list[list[AttemptResult]] = []
    while True:
        spec = AttemptSpec(
            suite=suite.name,
            seconds=limit - (time.monotonic() - began),
            device=examination.device,
            finished=finished(attempts),
        )
        attempts.append(supervisors.run_attempt(spec))
        time_left = limit - (time.monotonic() - began)
        may_go_on = can_go_on(attempts[-1]) and not supervisors.is_stopped.is_set()
        if not may_go_on or len(attempts) == MAX_ATTEMPTS or time_left < MIN_SECONDS:
            break
    report = suite_report(suite, attempts, seconds=time.monotonic() - began, limit=limit)
    if supervisors.is_stopped.is_set():
        report |= {"status": "skipped", "message": "stopped while it ran"}
    return report


def _topology(entries: Sequence[Report]) -> Any:
    """Return the measured topology as plain data; topology.toml holds the same."""
    try:
        return tomllib.loads(topology_text(entries)) or None
    except tomllib.TOMLDecodeError:
        return None


def write(report: Report, folder: Path) -> list[Path]:
    """Write doctor.json, doctor.html and, if links were measured, topology.toml; return their paths."""
    from weft.doctor.html import page

    texts = {"doctor.json": as_json, "topology.toml": lambda each: topology_text(each["parts"])}
    texts["doctor.html"] = page  # last: if it fails, the others are written
    files: list[Path] = []
    with writing(folder, hint=WRITE_HINT):
        folder.mkdir(parents=True, exist_ok=True)
        for name, make in texts.items():
            if text := make(report):
                with whole(folder / name) as temporary:
                    temporary.write_text(text, encoding="utf-8")
                files.append(folder / name)
    return files


def as_json(report: Report) -> str:
    return json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
