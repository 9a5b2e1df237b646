"""StepCaches: the step caches of one sharded model, and what they skip."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.core.errors import InputError
from weft.diffusers.cache_dit import share_cache_dit, unshare_cache_dit
from weft.diffusers.module_hook import ModuleHook
from weft.hooks.step_cache import (
    CACHE_HOOKS,
    CacheHook,
    cache_hooks,
    check_cache,
    share_decision,
    unshare_decision,
)
from weft.hooks.wrap import WRAPPER, put_outside
from weft.run.comm import Comm

if TYPE_CHECKING:
    from weft.diffusers.region import ShardedRegion


@dataclass
class CacheSummary:
    """What the step caches of a model have skipped in a run.

    forwards    of the model, as one list: how many attentions each has computed.
    attentions  that a forward computes without a cache.
    """

    caches: tuple[str, ...] = ()
    attentions: int = 0
    forwards: list[int] = field(default_factory=list)

    @property
    def shortened(self) -> int:
        """How many forwards skipped something."""
        return sum(computed < self.attentions for computed in self.forwards)

    @property
    def skipped(self) -> float:
        """The share of the attentions that was skipped."""
        every = self.attentions * len(self.forwards)
        return 1 - sum(self.forwards) / every if every else 0.0

    def __str__(self) -> str:
        return (
            f"{', '.join(self.caches)}: {self.shortened} of {len(self.forwards)} forwards skipped blocks, "
            f"{self.skipped:.1%} of all attentions"
        )


class StepCaches:
    """Prepares the caches that are on a model before each forward, and counts what they skip."""

    def __init__(self, region: ShardedRegion) -> None:
        self.region = region
        self.computed = 0
        """Attentions of this forward."""
        self._hooks: list[CacheHook] = []
        self._has_cache_dit = False
        self._summary = CacheSummary()

    def reset(self) -> None:
        """Begin a run: caches forget an earlier one, which may have ended in an error, or on other ranks."""
        self._summary = CacheSummary()
        for cache in cache_hooks(self.region.model.modules()):
            if cache.hook._is_stateful:
                cache.hook.reset_state(cache.module)

    @property
    def is_used(self) -> bool:
        return bool(self._summary.forwards)

    def summary(self) -> CacheSummary:
        """Return what was skipped since the last `reset`, the same on all ranks."""
        return self._summary

    def prepare(self) -> None:
        """Let the caches that are on the model now decide as on one process; refuse those that cannot."""
        self.computed, self._hooks = 0, [*cache_hooks(self.region.submodules)]
        for cache in self._hooks:
            check_cache(cache)
            if method := CACHE_HOOKS[cache.kind]:
                share_decision(cache.hook, method, self._comm)
            if isinstance(vars(cache.module).get(WRAPPER), ModuleHook):  # tokens are split before
                put_outside(cache.module)
        self._has_cache_dit = share_cache_dit(self.region, self._comm)

    def count(self) -> None:
        """Note a forward."""
        if self._hooks or self._has_cache_dit:
            kinds = [cache.kind for cache in self._hooks] + ["cache-dit"] * self._has_cache_dit
            self._summary.caches = tuple(dict.fromkeys(kinds))
            self._summary.attentions = self.region.layers
            self._summary.forwards.append(self.computed)

    def remove(self) -> None:
        for cache in self._hooks:
            unshare_decision(cache.hook)
        unshare_cache_dit(self.region.model)
        self._hooks, self._has_cache_dit = [], False

    def _comm(self) -> Comm | None:
        """Return the ranks that tokens are reduced over now."""
        shards = self.region.shards
        if not self.region.active or shards.ranks == 1:
            return None
        if len({shards.is_replicated(stream) for stream in shards.sizes}) > 1:
            short = [stream for stream in shards.sizes if shards.is_replicated(stream)]
            raise InputError(
                f"A cache cannot decide over tokens of {short[0]} that every one of {shards.ranks} ranks "
                "has: they would count several times.",
                hint=f"Use at most {min(shards.sizes.values())} ranks, or no cache.",
            )
        return shards.world.comm
