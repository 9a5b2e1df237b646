"""What a user waits for before a command does anything: CPU time of a fresh process.

    python -m bench.startup [--quick] [--json FILE]

The limit is a Python that does nothing; of `import weft` it is subtracted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

from rich.progress import Progress

from bench.rows import Results, Row, main

ROUNDS, QUICK_ROUNDS = 15, 7
WEFT = ("-m", "weft")
COMMANDS: dict[str, tuple[tuple[str, ...], int]] = {
    "import weft": (("-c", "import weft"), 40),
    "weft --help": ((*WEFT, "--help"), 150),
    "weft plan": ((*WEFT, "plan", "wan2.1-14b", "--topology", "8xh100"), 900),
}
"""Arguments of Python, and the most milliseconds."""


def cpu_milliseconds(arguments: Sequence[str]) -> float:
    """Return the CPU time of a fresh process and of all that it waited for."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with status {process.returncode}.")
    return 1e3 * (usage.ru_utime + usage.ru_stime)


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - the interface of bench.rows
    rounds = QUICK_ROUNDS if quick else ROUNDS
    calls = {"python": ("-c", "pass"), **{name: arguments for name, (arguments, _) in COMMANDS.items()}}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in progress.track(range(rounds), description="startup"):
        for name, arguments in calls.items():
            times[name].append(cpu_milliseconds(arguments))
    bare = median(times["python"])
    rows = []
    for name, (_, bar) in COMMANDS.items():
        is_import = name.startswith("import")
        measured = median(times[name]) - bare * is_import
        limit = None if is_import else bare
        rows.append(Row(case=name, measured=measured, limit=limit, bar=f"< {bar}", holds=measured < bar))
    return Results(rows)


if __name__ == "__main__":
    main(measure, __doc__ or "")
