"""Loop: the plans of a model's layers through a denoising loop, the same on all ranks.

    with Loop(Online(plans)) as loop:
        for step in steps:
            ...                                  # run the layers by loop.plans
            loop.observe(counts)                 # [layers, heads]: active tiles of this rank's heads, else 0

What a step has seen plans the next, but no rank waits for another's planner: the ranks exchange counts
(one all-gather of small integers, with the hash of the plans in force), and each plans from the same numbers
in a thread of its own while the step's last layers run. `OnlineBlocks` observes the layers' masks instead;
all ranks have them, so their digests join the hash and nothing else need be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.core.codec import digest
from weft.core.errors import AgreementError
from weft.core.indices import IntArray
from weft.core.mask import BlockMask
from weft.plan.online import Policy
from weft.run.world import world_of


class Loop:
    """Runs a policy (`Online` or `OnlineBlocks` of `plan.online`) on what all ranks have seen together."""

    def __init__(self, policy: Policy, *, mesh: Any = None, timeout: float = 60.0) -> None:
        self.policy = policy
        self.comm = world_of(mesh, timeout).comm
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-plan")
        self._planned: Future[tuple[Any, ...]] | None = None
        self._plans = policy.plans
        self.counts: IntArray = np.zeros(0, dtype=np.int64)
        """What all ranks together counted in the last step, [layers, heads]."""

    @property
    def plans(self) -> tuple[Any, ...]:
        """One per layer, planned from the step before; in practice it is long ready."""
        if self._planned is not None:
            self._plans, self._planned = self._planned.result(), None
        return self._plans

    def observe(self, seen: npt.ArrayLike | Sequence[BlockMask]) -> None:
        """Add up everyone's counts, or agree on the masks, and plan the next step from them."""
        masks = [mask for mask in seen if isinstance(mask, BlockMask)] if isinstance(seen, Sequence) else []
        mine = np.zeros(0, dtype=np.int64) if masks else np.asarray(seen, dtype=np.int64)
        agreed = [self.plans, [mask.digest for mask in masks]]
        rows = self.comm.gather_numbers([int(digest(agreed)[:12], 16), *mine.ravel().tolist()])
        if odd := [rank for rank, row in enumerate(rows) if row[0] != rows[0][0]]:
            raise AgreementError(
                f"Ranks {odd} run by other plans{' or masks' if masks else ''} than rank 0.",
                hint="Start every rank's policy from the same plans (one store, or one broadcast), and give "
                "all of them the same masks.",
            )
        self.counts = np.sum([row[1:] for row in rows], axis=0).reshape(mine.shape)
        self._planned = self._thread.submit(self.policy.observe, masks or self.counts)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
