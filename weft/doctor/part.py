"""Part: one question to a machine, asked on all ranks in processes that may hang or die.

A part is a generator of checks over a Site:

    def checks(site: Site) -> Iterator[Check]:
        for name in ...:
            if site.begins(name):                 # not yet done by an attempt that died
                yield site.judged(name, found, expected, allowed=1e-2)

Every rank runs it. Checks of one name are merged over the ranks: a failing one counts, else the first rank's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Status = Literal["ok", "wrong", "measured", "skipped"]
Ending = Literal["ok", "wrong", "crashed", "hung", "failed", "skipped"]
"""ok: every check holds. wrong: one does not. failed: it raised. crashed: a process died. hung: time-out."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One fact; `numbers` have units in their names (error, allowed, seconds, gbytes_per_s, tflops)."""

    name: str
    status: Status
    note: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    data: Any = None
    """Anything else that JSON can hold."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is asked, by `function` ("module:name" under weft.doctor), in at most `seconds`."""

    name: str
    title: str
    function: str
    seconds: float
    claims: tuple[str, ...] = ()
    """What runs on a GPU for the first time in this part, as the report's first list says it."""

    def checks(self, site: Site) -> Iterator[Check]:
        module, _, name = self.function.partition(":")
        yield from getattr(import_module(f"weft.doctor.{module}"), name)(site)


@dataclass(kw_only=True)
class Site:
    """Where a part runs: one rank of a world that was made for this part alone."""

    device: torch.device
    rank: int
    ranks: int
    machines: int
    dtype: str
    """bfloat16 on GPUs, float32 on CPUs."""
    deadline: float
    """time.monotonic() at which the part's processes are killed."""
    finished: frozenset[str] = frozenset()
    """Checks that an earlier attempt has done, or died in."""
    is_made_wrong: bool = False
    """A fault for tests: what is judged is made wrong first."""
    announce: Callable[[str], None] = lambda _: None

    @property
    def is_rehearsal(self) -> bool:
        """CPUs stand in for GPUs: sizes are small, and times say nothing."""
        return self.device.type != "cuda"

    def left(self) -> float:
        """Seconds; ranks differ, so what all ranks do together must not depend on it."""
        return self.deadline - time.monotonic()

    def begins(self, name: str) -> bool:
        """Say what is under way, should the process die in it; False if it has been done before."""
        if name in self.finished:
            return False
        self.announce(name)
        return True

    def error(self, found: Tensor, expected: Tensor) -> float:
        """Return the largest difference, relative to the largest expected value; NaN counts as infinite."""
        found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
        if not expected.numel():
            return 0.0
        if self.is_made_wrong:
            found = found + 0.5 * expected.abs().max().clamp(min=1.0)
        difference = (found - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        return float(difference.nan_to_num(float("inf")))

    def judged(
        self, name: str, found: Tensor, expected: Tensor, *, allowed: float, note: str = "", **numbers: float
    ) -> Check:
        error = self.error(found, expected)
        status: Status = "ok" if error <= allowed else "wrong"
        all_numbers = {"error": error, "allowed": allowed, **numbers}
        return Check(name=name, status=status, note=note, numbers=all_numbers)
