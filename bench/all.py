"""Every benchmark in turn, each in a process of its own, and all of their rows in docs/results.md.

    python -m bench.all [--quick] [--only papers,planner] [--json-dir runs/bench]

One that fails, hangs or misses a bar does not stop the others. What was run with the same code is not run
again, so a run that was cut off goes on where it was. bench.quality takes hours: it runs with --quick unless
--only names it. The table is rewritten after each benchmark; quick rows never replace those of a whole run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.results import publish
from weft import __version__

ROOT = Path(__file__).parent.parent
RUNNERS = ("all", "against")
HOURS = ("quality",)
LONGEST_SECONDS = 3600
"""Of all others: none takes a quarter of it, and one that hangs should not stop the rest."""
GRACE_SECONDS = 20


def names(root: Path = ROOT) -> list[str]:
    """The modules of bench/ that are commands, but for those that run them."""
    files = sorted((root / "bench").glob("*.py"))
    return [f.stem for f in files if f.stem not in RUNNERS and '__name__ == "__main__"' in f.read_text()]


def state(root: Path = ROOT) -> str:
    """The last commit of the code that is measured, and a digest of what was changed since."""

    def git(*words: str) -> str:
        process = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return process.stdout.strip()

    try:
        commit = git("log", "-1", "--format=%h", "--", "weft", "bench")
        changed = git("diff", "HEAD", "--", "weft", "bench")
    except (OSError, subprocess.CalledProcessError):  # not a clone
        return __version__
    return commit + (f"+{hashlib.sha256(changed.encode()).hexdigest()[:7]}" if changed else "")


def run(name: str, folder: Path, *, quick: bool, root: Path = ROOT) -> dict[str, Any]:
    """One benchmark: what it wrote, or how it failed; kept in FOLDER, with what it printed beside it."""
    words = [f"bench.{name}", *(["--quick"] if quick else [])]
    kept = record_file(folder, name, quick=quick)
    partial, log = kept.with_suffix(".found"), kept.with_suffix(".log")
    partial.unlink(missing_ok=True)
    began, clock, commit = datetime.now(timezone.utc), time.monotonic(), state(root)
    limit = None if name in HOURS else LONGEST_SECONDS
    code = _call([sys.executable, "-m", *words, "--json", str(partial.absolute())], log, root, limit)
    record = {
        "name": name,
        "commit": commit,
        "command": " ".join(["python -m", *words]),
        "quick": quick,
        "date": f"{began:%d %b %Y}",
        "seconds": round(time.monotonic() - clock),
        "failed": "",
        "machine": "",
        "rows": [],
    }
    try:
        record |= {key: value for key, value in json.loads(partial.read_text()).items() if key in record}
    except (OSError, ValueError):
        record["failed"] = f"ended with {code} and no rows" if code is not None else "did not end in time"
    kept.write_text(json.dumps(record, indent=2) + "\n")
    partial.unlink(missing_ok=True)
    return record


def record_file(folder: Path, name: str, *, quick: bool) -> Path:
    return folder / f"{name}{'-quick' if quick else ''}.json"


def _call(words: Sequence[str], log: Path, root: Path, limit: float | None) -> int | None:
    """The exit code; None if it had to be ended, with all that it had started."""
    with log.open("w") as out:
        process = subprocess.Popen(words, cwd=root, stdout=out, stderr=out, start_new_session=True)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def known(folder: Path, name: str, *, quick: bool, commit: str) -> dict[str, Any] | None:
    """What the same code gave before, if it did not fail."""
    try:
        record = json.loads(record_file(folder, name, quick=quick).read_text())
    except (OSError, ValueError):
        return None
    return record if record["commit"] == commit and not record["failed"] else None


def tell(record: dict[str, Any]) -> str:
    """One line about one benchmark."""
    kept = sum(row["holds"] for row in record["rows"])
    return record["failed"] or f"{kept} of {len(record['rows'])} rows hold, {record['seconds']} s"


def run_all(
    chosen: Sequence[str], folder: Path, results: Path, *, quick: Sequence[str], root: Path = ROOT
) -> bool:
    """All that are chosen, those in `quick` with --quick; whether every row of every one holds."""
    folder.mkdir(parents=True, exist_ok=True)
    console, commit, holds = Console(highlight=False, markup=False, soft_wrap=True), state(root), True
    for place, name in enumerate(chosen, start=1):
        head, options = f"{place}/{len(chosen)} bench.{name}", {"quick": name in quick}
        record = known(folder, name, **options, commit=commit)
        if record is None:
            console.print(f"{head} … ({record_file(folder, name, **options).with_suffix('.log')})")
            record = run(name, folder, **options, root=root)
            console.print(f"{head}: {tell(record)}")
        else:
            console.print(f"{head}: {tell(record)}, on {record['date']} with the same code: not run again")
        publish([record], results)
        holds &= not record["failed"] and all(row["holds"] for row in record["rows"])
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every benchmark with --quick")
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--json-dir", type=Path, default=ROOT / "runs" / "bench", metavar="DIR")
    options = parser.parse_args()
    there, asked = names(), [name for name in options.only.split(",") if name]
    if strange := sorted(set(asked) - set(there)):
        parser.error(f"no benchmark is called {', '.join(strange)}; there are {', '.join(there)}")
    chosen = asked or there
    quick = chosen if options.quick else () if asked else HOURS
    holds = run_all(chosen, options.json_dir, ROOT / "docs" / "results.md", quick=quick)
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
