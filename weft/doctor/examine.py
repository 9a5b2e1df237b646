"""Examine: ask the parts one after the other within a time budget, and write what came of it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from weft.doctor.child import MACHINE, Order
from weft.doctor.keeper import Account, Keepers
from weft.doctor.machine import machine_of
from weft.doctor.merge import can_go_on, finished, first_failure, part_report, skipped
from weft.doctor.part import Part
from weft.doctor.parts import PARTS, UNASKED
from weft.doctor.privacy import cleaned, private_words

SCHEMA = 1
MAX_ATTEMPTS = 4
MIN_SECONDS = 2.0
"""An attempt with less time than that would not even join."""
PUBLIC = frozenset(re.findall(r"\w+", repr(PARTS).lower()))
"""Words of the parts themselves, also where a user or a host is called by one of them."""
WRITE_HINT = "Give a folder that can be written with --out."

Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What is asked, by which device, in how much time."""

    parts: Sequence[Part]
    device: str = "cuda"
    seconds: float = 600.0
    faults: Mapping[str, str] = field(default_factory=dict[str, str])
    """By part: crash, hang or wrong; `hang:4` with a limit of 4 seconds. For tests."""
    machines: int = 1


def serve_rank(
    examination: Examination,
    *,
    on_begin: Callable[[Part], None] = lambda _: None,
    on_end: Callable[[Report], None] = lambda _: None,
) -> Report | None:
    """Run the keeper of this launched rank to the end; return the report on rank 0."""
    if examination.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the children, on a machine that has GPUs
    keepers = Keepers()
    words = [word for word in keepers.share(private_words()) if word.lower() not in PUBLIC]
    if keepers.rank:
        keepers.follow()
        return None
    try:
        return _examined(examination, keepers, on_begin, on_end, words)
    finally:
        keepers.end()


def _examined(
    examination: Examination,
    keepers: Keepers,
    on_begin: Callable[[Part], None],
    on_end: Callable[[Report], None],
    words: Sequence[str],
) -> Report:
    began = time.monotonic()
    facts = _facts(examination, keepers)
    parts: list[Report] = []
    for part in examination.parts:
        left = examination.seconds - (time.monotonic() - began)
        if keepers.is_stopped.is_set():
            found = skipped(part, "stopped before it began")
        elif left < MIN_SECONDS:
            found = skipped(part, "no time left: give more --minutes, or --only some parts")
        else:
            on_begin(part)
            found = _ask(part, examination, keepers, left)
        parts.append(cleaned(found, words))
        on_end(parts[-1])
    return {
        "schema": SCHEMA,
        "weft": __version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "is_rehearsal": examination.device != "cuda",
        "made_up": False,
        "seconds": round(time.monotonic() - began, 3),
        "never_ran": [*(claim for part in examination.parts for claim in part.claims), *UNASKED],
        "machine": machine_of(facts, device=examination.device, machines=examination.machines),
        "parts": parts,
        "topology": _topology(parts),
    }


def _facts(examination: Examination, keepers: Keepers) -> list[dict[str, Any]]:
    """Return what each rank says of its device; without a GPU there is nothing to examine."""
    order = Order(part=MACHINE.name, seconds=MACHINE.seconds, device=examination.device)
    accounts = keepers.ask(order)
    cause = first_failure(accounts)
    if cause is not None and cause.how == "failed" and "InputError" in cause.message:
        raise InputError(f"Rank {cause.rank}: {cause.message.partition(': ')[2]}")
    return [account.checks[0]["data"] if account.checks else {} for account in accounts]


def _ask(part: Part, examination: Examination, keepers: Keepers, left: float) -> Report:
    """Ask one part, again after a check that broke it, within its limit and what is left of the budget."""
    fault, _, bound = examination.faults.get(part.name, "").partition(":")
    limit = min(float(bound or part.seconds), left)
    began = time.monotonic()
    attempts: list[list[Account]] = []
    while True:
        order = Order(
            part=part.name,
            seconds=limit - (time.monotonic() - began),
            device=examination.device,
            is_first=not attempts,
            finished=finished(attempts),
            fault=fault,
        )
        attempts.append(keepers.ask(order))
        time_left = limit - (time.monotonic() - began)
        may_go_on = can_go_on(attempts[-1]) and not keepers.is_stopped.is_set()
        if not may_go_on or len(attempts) == MAX_ATTEMPTS or time_left < MIN_SECONDS:
            break
    is_cut = not bound and limit < part.seconds
    report = part_report(part, attempts, seconds=time.monotonic() - began, limit=limit, is_cut=is_cut)
    if keepers.is_stopped.is_set():
        report |= {"status": "skipped", "message": "stopped while it ran"}
    return report


def _topology(parts: Sequence[Report]) -> Any:
    """Return the measured topology as plain data; a file of TOML holds the same."""
    try:
        return tomllib.loads(topology_text(parts)) or None
    except tomllib.TOMLDecodeError:
        return None


def topology_text(parts: Sequence[Report]) -> str:
    texts = [check["data"] for part in parts for check in part["checks"] if check["name"] == "topology"]
    return next((text for text in texts if isinstance(text, str)), "")


def write(report: Report, folder: Path) -> list[Path]:
    """Write doctor.json, doctor.html and, if links were measured, topology.toml; return their paths."""
    from weft.doctor.page import page

    texts = {"doctor.json": as_json, "topology.toml": lambda each: topology_text(each["parts"])}
    texts["doctor.html"] = page  # last: whatever it does not understand, the others are there
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
