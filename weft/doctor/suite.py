"""CheckSuite: a part of the examination, which runs on all ranks in processes that may hang or die.

A suite is a module `check_NAME` with a generator of checks:

    def checks(ctx: CheckContext) -> Iterator[Check]:
        for name in ...:
            if ctx.begins(name):                 # not yet done by an attempt that died
                yield ctx.judged(name, actual, expected, allowed=1e-2)

Every rank runs it. Checks of one name are merged over the ranks: a wrong one counts, else the first rank's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CheckStatus = Literal["ok", "wrong", "measured", "skipped"]
SuiteStatus = Literal["ok", "wrong", "crashed", "hung", "failed", "skipped"]
"""ok: every check holds. wrong: one does not. failed: it raised. crashed: a process died. hung: time-out."""
BAD = ("wrong", "crashed", "hung", "failed")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One fact; `numbers` have units in their names (error, allowed, seconds, gbytes_per_s, tflops)."""

    name: str
    status: CheckStatus
    note: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    data: Any = None
    """Anything else that JSON can hold."""

    @classmethod
    def judged(
        cls, name: str, error: float, allowed: float, *, note: str = "", numbers: Mapping[str, float] = {}
    ) -> Check:
        """Return a check that holds if `error` is at most `allowed`."""
        status: CheckStatus = "ok" if error <= allowed else "wrong"
        return cls(
            name=name, status=status, note=note, numbers={"error": error, "allowed": allowed, **numbers}
        )


@dataclass(frozen=True, kw_only=True)
class CheckSuite:
    """A part of the examination: the checks of `weft.doctor.check_NAME`, in at most `seconds`."""

    name: str
    title: str
    seconds: float
    claims: tuple[str, ...] = ()
    """What runs on a GPU for the first time in this suite, for the report's first list."""

    def checks(self, ctx: CheckContext) -> Iterator[Check]:
        kind, _, backend = self.name.partition("-")
        if kind == "kernel":
            return import_module("weft.doctor.check_kernels").checks(backend, ctx)
        return import_module(f"weft.doctor.check_{self.name}").checks(ctx)


@dataclass(kw_only=True)
class CheckContext:
    """One rank of a world that was made for one suite."""

    device: torch.device
    rank: int
    ranks: int
    machines: int
    dtype: str
    """bfloat16 on GPUs, float32 on CPUs."""
    deadline: float
    """time.monotonic() at which the processes are killed."""
    finished: frozenset[str] = frozenset()
    """Checks that an earlier attempt has done, or died in."""
    is_made_wrong: bool = False
    """A fault for tests: results are made wrong before they are judged."""
    announce: Callable[[str], None] = lambda _: None

    @property
    def is_rehearsal(self) -> bool:
        """CPUs stand in for GPUs: sizes are small, and times say nothing."""
        return self.device.type != "cuda"

    def left(self) -> float:
        """Return the seconds left; ranks differ, so collective work must not depend on it."""
        return self.deadline - time.monotonic()

    def begins(self, name: str) -> bool:
        """Announce a check, in case the process dies in it; return False if it is finished already."""
        if name in self.finished:
            return False
        self.announce(name)
        return True

    def error(self, actual: Tensor, expected: Tensor) -> float:
        """Return the largest difference, relative to the largest expected value; NaN counts as infinite."""
        actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
        if not expected.numel():
            return 0.0
        largest = expected.abs().max().clamp(min=1.0)
        if self.is_made_wrong:
            actual = actual + 0.5 * largest
        return float(((actual - expected).abs().max() / largest).nan_to_num(float("inf")))

    def judged(
        self, name: str, actual: Tensor, expected: Tensor, *, allowed: float, note: str = "", **numbers: float
    ) -> Check:
        return Check.judged(name, self.error(actual, expected), allowed, note=note, numbers=numbers)


def topology_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the TOML of the topology that the suites of a report measured, if they did."""
    texts = [check["data"] for entry in entries for check in entry["checks"] if check["name"] == "topology"]
    return next((text for text in texts if isinstance(text, str)), "")
