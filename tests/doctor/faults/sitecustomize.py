"""Inject faults into the suites of the doctor, in every Python that has this folder on its path.

The variable WEFT_TEST_FAULTS names them: SUITE=crash, SUITE=hang:6 or SUITE=wrong. A suite hangs in its
first check, on the last rank, until its limit of some seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from weft.doctor.suite import Check, CheckContext, CheckSuite
from weft.doctor.suites import SUITES

FAULTS = dict(pair.split("=") for pair in os.environ.get("WEFT_TEST_FAULTS", "").split())
RUN = CheckSuite.checks

for each in SUITES:
    if limit := FAULTS.get(each.name, "").partition(":")[2]:
        object.__setattr__(each, "seconds", float(limit))


def checks(suite: CheckSuite, ctx: CheckContext) -> Iterator[Check]:
    fault, announce = FAULTS.get(suite.name, "").partition(":")[0], ctx.announce
    is_last = ctx.rank == ctx.ranks - 1

    def announce_and_break(name: str) -> None:
        announce(name)
        if is_last and fault == "crash" and not ctx.finished:
            os.abort()
        while is_last and fault == "hang":
            time.sleep(60)

    ctx.announce, ctx.is_made_wrong = announce_and_break, fault == "wrong"
    return RUN(suite, ctx)


CheckSuite.checks = checks
