"""Reasons: what makes one plan faster than another, in words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from weft.core import units

if TYPE_CHECKING:
    from weft.plan.choose import Candidate

TIE = 0.005
"""Plans whose times differ by a smaller share are equally fast."""


def family(name: str) -> str:
    """Return the kind of a plan by its name.

    >>> family("usp:4x2+balanced"), family("ring+cuts")
    ('usp', 'ring')
    """
    return re.split("[:+]", name)[0]


def gain(best: Candidate, other: Candidate) -> str:
    """Say what makes the best faster than another."""
    one, two = best.timing, other.timing
    computing, more = max(one.compute), max(two.compute)
    sending, longer = max(one.sending), max(two.sending)
    gains = {
        f"its slowest rank computes {_percent(computing, more)} less": more - computing,
        f"its slowest rank sends for {_percent(sending, longer)} less time": longer - sending,
        "more of its transfers are hidden": two.waiting - one.waiting,
        "its launches hold it up less": two.launching - one.launching,
    }
    return max(gains, key=lambda each: gains[each])


def loss(other: Candidate, best: Candidate) -> str:
    """Say what keeps another plan from being chosen: what its busiest rank does for longer, or memory."""
    if other.seconds < (1 + TIE) * best.seconds:
        if other.memory > 1.05 * best.memory:
            return f"as fast, with more memory: {units.size(other.memory)}, not {units.size(best.memory)}"
        return "as fast, with many more messages" if other.strategy.costly else "as fast to half a percent"
    one, two = best.timing, other.timing
    work = "uneven work" if other.imbalance > best.imbalance + TIE else "smaller pieces"
    computing, more = max(one.compute), max(two.compute)
    causes = {
        (f"{work}: computes", more, computing): more - computing,
        ("exposed communication: waits", two.waiting, one.waiting): two.waiting - one.waiting,
        ("launches: waits for them", two.launching, one.launching): two.launching - one.launching,
    }
    cause, longer, shorter = max(causes, key=lambda each: causes[each])
    return f"{cause} {units.time(longer)}, not {units.time(shorter)}"


def _percent(less: float, more: float) -> str:
    return f"{1 - less / more:.0%}" if more else "0 %"
