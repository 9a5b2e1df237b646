"""Loop: the head plans of a model's layers through a denoising loop, the same on all ranks.

    with Loop(Online(plans)) as loop:
        for step in steps:
            ...                                  # run the layers by loop.plans
            loop.observe(counts)                 # [layers, heads]: active tiles of this rank's heads, else 0

The counts of a step plan the next but one rank never waits for another's planner: the ranks exchange
counts (one all-gather of small integers, with the hash of the plans in force), and each plans from the
same numbers in a thread of its own while the step's last layers run.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.core.codec import digest
from weft.core.errors import AgreementError
from weft.core.indices import IntArray
from weft.plan.online import Plans, Policy
from weft.run.world import world_of


class Loop:
    """Runs a policy (`plan.online.Online`) on what all ranks have counted together."""

    def __init__(self, policy: Policy, *, mesh: Any = None, timeout: float = 60.0) -> None:
        self.policy = policy
        self.comm = world_of(mesh, timeout).comm
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-plan")
        self._planned: Future[Plans] | None = None
        self._plans = policy.plans
        self.counts: IntArray = np.zeros(0, dtype=np.int64)
        """What all ranks together counted in the last step, [layers, heads]."""

    @property
    def plans(self) -> Plans:
        """One grouping per layer, planned from the step before; in practice it is long ready."""
        if self._planned is not None:
            self._plans, self._planned = self._planned.result(), None
        return self._plans

    def observe(self, counts: npt.ArrayLike) -> None:
        """Add up everyone's counts and plan the next step from them."""
        mine = np.asarray(counts, dtype=np.int64)
        rows = self.comm.gather_numbers([int(digest(self.plans)[:12], 16), *mine.ravel().tolist()])
        if odd := [rank for rank, row in enumerate(rows) if row[0] != rows[0][0]]:
            raise AgreementError(
                f"Ranks {odd} run by other plans than rank 0.",
                hint="Start every rank's policy from the same plans: one store, or one broadcast.",
            )
        self.counts = np.sum([row[1:] for row in rows], axis=0).reshape(mine.shape)
        self._planned = self._thread.submit(self.policy.observe, self.counts)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
