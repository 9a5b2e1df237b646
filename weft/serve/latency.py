"""Latency model: predict the duration and memory of a denoising step, and correct it with observed steps.

latency = Latency(facts, Topology.local(8))
latency.step(shape, ranks=4)                # by the planner's closed form, until steps were observed
latency.observe(shape, 4, 1, seconds)       # from then on as observed, whatever the number of steps
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import ITEM_BYTES, Problem
from weft.core.topology import Topology
from weft.masks.grid import TokenGrid
from weft.masks.spec import PRODUCERS, mask_from_spec
from weft.plan.balanced import Balancer
from weft.plan.choose import candidates
from weft.serve.assignment import sizes
from weft.serve.jobs import JobShape, JsonObject
from weft.serve.model_facts import Grid, ModelFacts
from weft.serve.observations import Observations, PredictedCost
from weft.simulate.model_step import AROUND_ATTENTION, AROUND_MLP
from weft.simulate.model_step import step as around
from weft.simulate.models import ModelSizes

STEP_OVERHEAD_SECONDS, FIXED_OVERHEAD_SECONDS = 0.05, 0.5
"""Largest constant time of kernels, messages and files beside the work; see `weft.serve.observations`."""
PIXEL_SECONDS = 1.5e-8  # to decode a pixel (on several ranks) and write it to a file, until observed
SWITCH_SECONDS = 0.1  # to stop a batch and continue it on other ranks
BLOCK_TOKENS = 64
MAX_PLANNED_TOKENS = 2**17
"""Planning takes time and memory by the token, and requests may have any size: larger ones are scaled."""
MAX_BATCH = 2**16
MAX_CACHED_CANDIDATES, MAX_CACHED_PREDICTIONS = 32, 4096
RULE_OPTIONS = ("dense_steps", "dense_layers", "dense_last", "refresh", "recall", "block")
"""Options of sparse attention for when it is used; see `weft.sparse.methods`."""


class Latency:
    """Times and memory of one model on one group of ranks, in seconds and bytes."""

    def __init__(
        self,
        facts: ModelFacts,
        topology: Topology,
        *,
        sparse: str | None = None,
        limit: float = math.inf,
        switch: float = SWITCH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sparse` is the option of the server, `limit` the memory of a rank in bytes."""
        self.facts, self.topology, self.sparse = facts, topology, sparse
        self.limit, self.switch = limit, switch
        self.model = _model(facts)
        self._predict = lru_cache(MAX_CACHED_PREDICTIONS)(self._predict)
        self._candidates = lru_cache(MAX_CACHED_CANDIDATES)(self._candidates)
        self._density = lru_cache(MAX_CACHED_PREDICTIONS)(self._density)
        self.observed_steps = Observations(STEP_OVERHEAD_SECONDS)
        self._fixed = Observations(FIXED_OVERHEAD_SECONDS)
        self._estimates: dict[tuple[JobShape, int, int], float] = {}
        """Seconds of a step; cleared when one is observed."""
        self._clock = clock
        self._observed_at = clock()

    def step(self, shape: JobShape, ranks: int, jobs: int = 1) -> float:
        """Return the seconds of a denoising step of a batch; `inf` if it does not fit in memory."""
        fits = self.memory(shape, ranks, jobs) <= self.limit
        return self.estimated(shape, ranks, jobs) if fits else math.inf

    def estimated(self, shape: JobShape, ranks: int, jobs: int = 1) -> float:
        """Return the seconds of a step, whether or not it fits in memory."""
        key, estimates = (_size(shape), ranks, jobs), self._estimates
        if (seconds := estimates.get(key)) is None:  # a schedule needs the same ones many times
            cost = PredictedCost(self.predicted(shape, ranks, jobs), ranks)
            seconds = self.observed_steps.estimate(key, cost)
            if (
                len(estimates) < MAX_CACHED_PREDICTIONS
            ):  # clients may request any size, and none may be observed
                estimates[key] = seconds
        return seconds

    def fixed(self, shape: JobShape) -> float:
        """Return the seconds of encoding, decoding and writing the file."""
        return self._fixed.estimate(_size(shape), PredictedCost(self.predicted_fixed(shape)))

    def predicted_fixed(self, shape: JobShape) -> float:
        # An image is the first of as many frames as the model makes at least.
        least = self.facts.first or self.facts.multiple[0]
        return PIXEL_SECONDS * _pixels(shape) * max(1, least // shape.frames)

    def alone(self, shape: JobShape) -> float:
        """Return the seconds of a job on the number of ranks that is fastest."""
        return min(self.total(shape, ranks) for ranks in self.sizes)

    def total(self, shape: JobShape, ranks: int) -> float:
        return shape.steps * self.step(shape, ranks) + self.fixed(shape)

    @property
    def sizes(self) -> list[int]:
        return sizes(self.topology.ranks)

    def observe(
        self, shape: JobShape, ranks: int, jobs: int, seconds: float, *, steps: int = 1, warmup: bool = False
    ) -> None:
        """Note that `steps` of a batch took `seconds` each."""
        self._observed_at = self._clock()
        cost = PredictedCost(self.predicted(shape, ranks, jobs), ranks)
        self.observed_steps.add((_size(shape), ranks, jobs), cost, seconds, steps=steps, warmup=warmup)
        self._estimates = {}

    def seconds_since_observed(self) -> float:
        return self._clock() - self._observed_at

    def observe_fixed(self, shape: JobShape, seconds: float) -> None:
        """Note the seconds of encoding, decoding and writing the file."""
        self._fixed.add(_size(shape), PredictedCost(self.predicted_fixed(shape)), seconds)

    def memory(self, shape: JobShape, ranks: int, jobs: int = 1) -> int:
        """Return the bytes of the fullest rank: all weights, one layer's activations, and decoded pixels."""
        item, batch = ITEM_BYTES[self.facts.dtype], jobs * (1 + shape.guided)
        rows = -(-math.prod(self.grid(shape)) // ranks) + self.model.text
        live = AROUND_ATTENTION + AROUND_MLP + 2 * self.model.mlp  # more than live at once
        pixels = 3 * 4 * 2 * _pixels(shape) * jobs
        weights = self.facts.bytes or item * self.facts.params  # text encoders and the VAE too
        return int(weights + item * live * batch * rows * self.model.hidden) + pixels

    def no_room(self, shape: JobShape, jobs: int = 1) -> str | None:
        """Return why a batch does not fit on all ranks together, or None."""
        needs = self.memory(shape, self.topology.ranks, jobs)
        if needs <= self.limit:
            return None
        step = min(self.estimated(shape, ranks, jobs) for ranks in self.sizes)
        seconds = shape.steps * step + jobs * self.fixed(shape)
        return (
            f"{shape.frames} frames of {shape.width}x{shape.height} need {needs / 2**30:.1f} GiB per "
            f"rank, {self.limit / 2**30:.1f} are free, and they would take about {max(1, seconds):,.0f} s. "
            "Ask for a smaller size or fewer frames."
        )

    def predicted(self, shape: JobShape, ranks: int, jobs: int = 1) -> float:
        """Return the seconds of a step, from sizes alone."""
        return self._predict(_size(shape), ranks, jobs)[0]

    def explain(self, shape: JobShape) -> JsonObject:
        """Return what `GET /v1/plan` shows: the plan, seconds by number of ranks, and the reason."""
        by_ranks = {ranks: self.total(shape, ranks) for ranks in self.sizes}
        fits = {ranks: seconds for ranks, seconds in by_ranks.items() if math.isfinite(seconds)}
        best = min(by_ranks, key=lambda ranks: (by_ranks[ranks], ranks))
        cost = {ranks: ranks * seconds for ranks, seconds in by_ranks.items()}
        cheapest = min(cost, key=lambda ranks: (cost[ranks], ranks))
        mask_density = self._density(self.grid(shape))
        return {
            "plan": self._predict(_size(shape), best, 1)[1],
            "ranks": best,
            "seconds": fits.get(best),  # JSON has no infinity
            "seconds_by_ranks": {str(ranks): seconds for ranks, seconds in fits.items()},
            "plans_by_ranks": {str(n): self._predict(_size(shape), n, 1)[1] for n in self.sizes},
            "tokens": math.prod(self.grid(shape)),
            "density": mask_density,
            "memory": self.memory(shape, best),
            "observed": any((_size(shape), ranks, 1) in self.observed_steps for ranks in self.sizes),
            "reason": _reason(by_ranks, best, cheapest),
        }

    def grid(self, shape: JobShape) -> Grid:
        """Return the tokens in time, height and width."""
        return self.facts.grid(shape.frames, shape.height, shape.width)

    def _predict(self, shape: JobShape, ranks: int, jobs: int) -> tuple[float, str]:
        """Return the seconds of a step, and the name of its plan."""
        grid, batch = self.grid(shape), jobs * (1 + shape.guided)
        attention, name = self._candidates(math.prod(grid), ranks).best(batch, self._density(grid))
        rest = around(self.model, grid, 0.0, resized_topology(self.topology, ranks)).seconds
        return self.model.layers * attention + batch * rest, name

    def _candidates(self, tokens: int, ranks: int) -> _Candidates:
        return _Candidates(self.model, tokens, resized_topology(self.topology, ranks), self.facts.dtype)

    def _density(self, grid: Grid) -> float:
        """Return the share of attention that the mask leaves, over all steps and layers."""
        return mask_density(self.sparse, grid, self.model) if self.sparse else 1.0


class _Candidates:
    """The strategies for one attention on so many ranks. Partitioning takes long: once for all batches."""

    def __init__(self, model: ModelSizes, tokens: int, topology: Topology, dtype: str) -> None:
        self.topology = topology
        self.scale = -(-tokens // MAX_PLANNED_TOKENS)  # tokens that one stands for
        tokens = -(-tokens // self.scale)
        layout = Layout.even(tokens + model.text, topology.ranks, prefix=model.text)
        heads = model.heads
        self.problem = Problem(
            batch=1, heads=heads, kv_heads=heads, head_dim=model.head_dim, q=layout, kv=layout, dtype=dtype
        )
        everything = BlockMask.dense(heads, tokens + model.text)
        balancer = Balancer(self.problem, everything, topology)
        # Tori win by a few percent only, and balancing by less: a prediction errs by more.
        strategies = candidates(self.problem, everything, topology)
        cheap = [each for each in strategies if each.balance == "none" and not each.costly]
        self.costs = [(each, balancer.assign(each)) for each in cheap]

    def best(self, batch: int, mask_density: float) -> tuple[float, str]:
        """Return the seconds and the name of the fastest, for a mask whose work is spread evenly."""
        repeats = batch * self.scale
        share = min(1.0, MAX_BATCH / repeats)  # of the batch; a problem's size is bounded
        problem = replace(self.problem, batch=max(1, round(repeats * share)))
        work = repeats * share * mask_density * self.scale
        costs = [(strategy, replace(cost, seconds=cost.seconds * work)) for strategy, cost in self.costs]
        times = ((each.estimate(problem, self.topology, cost) / share, str(each)) for each, cost in costs)
        return min(times)


def resized_topology(topology: Topology, ranks: int) -> Topology:
    """Return so many ranks of a cluster: on one machine if they fit, else on as few as divide them."""
    devices = max(each for each in range(1, topology.devices + 1) if ranks % each == 0)
    return replace(topology, machines=ranks // devices, devices=devices, links=())


def mask_density(sparse: str, grid: Grid, model: ModelSizes) -> float:
    """Return the share of attention that is computed, over all layers and steps, as far as the spec says.

    >>> model = ModelSizes(name="", layers=2, heads=2, head_dim=8)
    >>> mask_density("topk:0.2,dense_steps=0.25", (4, 8, 8), model)
    0.4
    """
    name, _, rest = sparse.partition(":")
    options = [word.partition("=") for word in rest.split(",") if word]
    rules = {key: float(value) for key, equals, value in options if equals and key in RULE_OPTIONS}
    own = [key + equals + value for key, equals, value in options if key not in RULE_OPTIONS]
    if name == "topk":
        share = float(own[0]) if own else 1.0
    elif name in PRODUCERS and name != "trace":
        spec = f"{name}:{','.join(own)}" if own else name
        # A large grid is estimated from a smaller one, whose share is rather too great.
        while math.prod(grid) > MAX_PLANNED_TOKENS:
            grid = (-(-grid[0] // 2), -(-grid[1] // 2), -(-grid[2] // 2))
        video = TokenGrid(*grid, prefix=model.text)
        block = max(int(rules.get("block", BLOCK_TOKENS)), -(-video.tokens // 1024))
        share = mask_from_spec(spec, heads=min(model.heads, 8), grid=video, block=block).density
    else:
        share = 1.0  # observed steps will correct it
    dense = [rules[key] for key in ("dense_steps", "dense_layers", "dense_last") if rules.get(key, 1) < 1]
    return share + (1 - share) * min(sum(dense), 1.0)


def _model(facts: ModelFacts) -> ModelSizes:
    """Return the sizes that predictions need. The width of the MLP follows from the number of parameters."""
    mlp = max(facts.params / facts.depth / (facts.heads * facts.head_dim) ** 2 - 4, 0) / 2
    return ModelSizes(
        name=facts.model, layers=facts.depth, heads=facts.heads, head_dim=facts.head_dim,
        text=facts.text_tokens, mlp=mlp,
    )  # fmt: skip


def _pixels(shape: JobShape) -> int:
    return shape.frames * shape.height * shape.width


def _size(shape: JobShape) -> JobShape:
    """Return the shape with one step: the time of a step does not depend on their number."""
    return replace(shape, steps=1)


def _reason(by_ranks: Mapping[int, float], best: int, cheapest: int) -> str:
    """Return a sentence that explains the number of ranks."""
    ranks = f"{best} rank{'s' * (best > 1)}"
    more = [n for n in by_ranks if n > best]
    if not math.isfinite(by_ranks[best]):
        return "It does not fit in memory on any number of ranks here."
    if best == cheapest:
        end = f": on {more[0]} the communication takes longer than what it saves" if more else ""
        return f"It is fastest on {ranks}{end}."
    gain, cost = by_ranks[cheapest] / by_ranks[best], best / cheapest
    return (
        f"It is fastest on {ranks}: {gain:.1f} times as fast as on {cheapest}, an efficiency of "
        f"{gain / cost:.0%}. While other jobs wait, it gets the fewest ranks that meet its deadline."
    )
