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
from typing import Any

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import ITEM_BYTES, Problem
from weft.core.topology import Topology
from weft.masks.grid import TokenGrid
from weft.masks.spec import PRODUCERS, mask_from_spec
from weft.plan.balanced import Balancer
from weft.plan.choose import candidates
from weft.serve.jobs import Shape
from weft.serve.observations import Cost, Observations
from weft.serve.tasks import sizes
from weft.simulate.models import Model
from weft.simulate.whole import AROUND_ATTENTION, AROUND_MLP
from weft.simulate.whole import step as around

STEP_OVERHEAD_SECONDS, FIXED_OVERHEAD_SECONDS = 0.05, 0.5
"""That kernels, messages and files may take beside the work itself; see `weft.serve.observations`."""
PIXEL_SECONDS = 1.5e-8  # to decode a pixel (on several ranks) and write it to a file, until it was seen
SWITCH = 0.1  # seconds to stop a task and have it run elsewhere
BLOCK = 64
TOKENS = 2**17
"""Dealing takes time and memory by the token, and clients may ask of any size: larger ones are scaled."""
MAX_BATCH = 2**16
WAYS, PREDICTIONS = 32, 4096
"""That are remembered."""
RULES = ("dense_steps", "dense_layers", "dense_last", "refresh", "recall", "block")
"""Options of sparse attention that say when it is used; see `weft.models.methods`."""


class Latency:
    """Of one model on one group of ranks; all numbers are of whole jobs, in seconds and bytes."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        topology: Topology,
        *,
        sparse: str | None = None,
        limit: float = math.inf,
        switch: float = SWITCH,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`facts` as a rank tells them; `sparse` as the server was given it; `limit` is a rank's memory."""
        names = ("heads", "head_dim", "depth", "patch", "text_tokens", "params")
        if missing := [name for name in names if name not in facts]:
            raise InputError(
                f"The model's facts have no {', '.join(missing)}.", hint="See weft/serve/facts.py."
            )
        self.facts, self.topology, self.sparse = facts, topology, sparse
        self.limit, self.switch = limit, switch
        self.model = _model(facts)
        self._dtype = str(facts.get("dtype", "float32"))
        self._predict = lru_cache(PREDICTIONS)(self._predict)
        self._ways = lru_cache(WAYS)(self._ways)
        self._density = lru_cache(PREDICTIONS)(self._density)
        self.observed_steps = Observations(STEP_OVERHEAD_SECONDS)
        self._fixed = Observations(FIXED_OVERHEAD_SECONDS)
        self._estimates: dict[tuple[Shape, int, int], float] = {}
        """Of steps, since one was last observed."""
        self._clock = clock
        self._observed_at = clock()

    def step(self, shape: Shape, ranks: int, jobs: int = 1) -> float:
        """Seconds of a denoising step of a batch; `inf` where it does not fit in memory."""
        fits = self.memory(shape, ranks, jobs) <= self.limit
        return self.estimated(shape, ranks, jobs) if fits else math.inf

    def estimated(self, shape: Shape, ranks: int, jobs: int = 1) -> float:
        """Seconds of a step, whether or not it fits in memory."""
        key, estimates = (_size(shape), ranks, jobs), self._estimates
        if (seconds := estimates.get(key)) is None:  # a schedule asks for the same ones many times
            cost = Cost(self.predicted(shape, ranks, jobs), ranks)
            seconds = self.observed_steps.estimate(key, cost)
            if len(estimates) < PREDICTIONS:  # clients may ask of any size, and nothing may be observed
                estimates[key] = seconds
        return seconds

    def fixed(self, shape: Shape) -> float:
        """Seconds of all that is no step: encoding, decoding and writing the file."""
        return self._fixed.estimate(_size(shape), Cost(self.predicted_fixed(shape)))

    def predicted_fixed(self, shape: Shape) -> float:
        # An image is the first of as many frames as the model makes at least.
        least = self.facts.get("first") or self.facts.get("multiple", (1,))[0]
        return PIXEL_SECONDS * _pixels(shape) * max(1, least // shape.frames)

    def alone(self, shape: Shape) -> float:
        """Seconds of a job if it has all ranks that are of use to it."""
        return min(self.whole(shape, ranks) for ranks in self.sizes)

    def whole(self, shape: Shape, ranks: int) -> float:
        return shape.steps * self.step(shape, ranks) + self.fixed(shape)

    @property
    def sizes(self) -> list[int]:
        return sizes(self.topology.ranks)

    def observe(
        self, shape: Shape, ranks: int, jobs: int, seconds: float, *, steps: int = 1, warmup: bool = False
    ) -> None:
        """`steps` of a batch took `seconds` each."""
        self._observed_at = self._clock()
        cost = Cost(self.predicted(shape, ranks, jobs), ranks)
        self.observed_steps.add((_size(shape), ranks, jobs), cost, seconds, steps=steps, warmup=warmup)
        self._estimates = {}

    def seconds_since_observed(self) -> float:
        """Since a step was last observed."""
        return self._clock() - self._observed_at

    def observe_fixed(self, shape: Shape, seconds: float) -> None:
        """All that is no step took so long."""
        self._fixed.add(_size(shape), Cost(self.predicted_fixed(shape)), seconds)

    def memory(self, shape: Shape, ranks: int, jobs: int = 1) -> int:
        """Bytes that the fullest rank holds: all weights, one layer's activations, and the decoded pixels."""
        item, batch = ITEM_BYTES[self._dtype], jobs * (1 + shape.guided)
        rows = -(-math.prod(self.grid(shape)) // ranks) + self.model.text
        live = AROUND_ATTENTION + AROUND_MLP + 2 * self.model.mlp  # more than live at once
        pixels = 3 * 4 * 2 * _pixels(shape) * jobs
        weights = self.facts.get("bytes", item * self.facts["params"])  # text encoders and the VAE too
        return int(weights + item * live * batch * rows * self.model.hidden) + pixels

    def no_room(self, shape: Shape, jobs: int = 1) -> str | None:
        """What to say of a batch that does not even fit on all ranks together."""
        needs = self.memory(shape, self.topology.ranks, jobs)
        if needs <= self.limit:
            return None
        step = min(self.estimated(shape, ranks, jobs) for ranks in self.sizes)
        seconds = shape.steps * step + jobs * self.fixed(shape)
        return (
            f"{shape.frames} frames of {shape.width}x{shape.height} need {needs / 2**30:.1f} GiB per "
            f"rank, {self.limit / 2**30:.1f} are there; and they would take about {max(1, seconds):,.0f} s. "
            "Ask for a smaller size or fewer frames."
        )

    def predicted(self, shape: Shape, ranks: int, jobs: int = 1) -> float:
        """Seconds of a step, from sizes alone."""
        return self._predict(_size(shape), ranks, jobs)[0]

    def explain(self, shape: Shape) -> dict[str, Any]:
        """What `GET /v1/plan` shows: the plan, the seconds by number of ranks, and why so many."""
        by_ranks = {ranks: self.whole(shape, ranks) for ranks in self.sizes}
        fits = {ranks: seconds for ranks, seconds in by_ranks.items() if math.isfinite(seconds)}
        best = min(by_ranks, key=lambda ranks: (by_ranks[ranks], ranks))
        cost = {ranks: ranks * seconds for ranks, seconds in by_ranks.items()}
        cheapest = min(cost, key=lambda ranks: (cost[ranks], ranks))
        density = self._density(self.grid(shape))
        return {
            "plan": self._predict(_size(shape), best, 1)[1],
            "ranks": best,
            "seconds": fits.get(best),  # JSON has no infinity
            "seconds_by_ranks": {str(ranks): seconds for ranks, seconds in fits.items()},
            "plans_by_ranks": {str(n): self._predict(_size(shape), n, 1)[1] for n in self.sizes},
            "tokens": math.prod(self.grid(shape)),
            "density": density,
            "memory": self.memory(shape, best),
            "observed": any((_size(shape), ranks, 1) in self.observed_steps for ranks in self.sizes),
            "reason": _reason(by_ranks, best, cheapest),
        }

    def grid(self, shape: Shape) -> Grid:
        """Tokens in time, height and width."""
        t, h, w = self.facts["patch"]
        return -(-shape.frames // t), -(-shape.height // h), -(-shape.width // w)

    def _predict(self, shape: Shape, ranks: int, jobs: int) -> tuple[float, str]:
        """Seconds of a step, and the name of its plan."""
        grid, batch = self.grid(shape), jobs * (1 + shape.guided)
        attention, name = self._ways(math.prod(grid), ranks).best(batch, self._density(grid))
        rest = around(self.model, grid, 0.0, part(self.topology, ranks)).seconds
        return self.model.layers * attention + batch * rest, name

    def _ways(self, tokens: int, ranks: int) -> _Ways:
        return _Ways(self.model, tokens, part(self.topology, ranks), self._dtype)

    def _density(self, grid: Grid) -> float:
        """The share of attention that the mask leaves, over all steps and layers."""
        return density(self.sparse, grid, self.model) if self.sparse else 1.0


Grid = tuple[int, int, int]


class _Ways:
    """The ways to run one attention on so many ranks. Dealing takes long: once for all batches."""

    def __init__(self, model: Model, tokens: int, topology: Topology, dtype: str) -> None:
        self.topology = topology
        self.scale = -(-tokens // TOKENS)  # tokens that one stands for
        tokens = -(-tokens // self.scale)
        layout = Layout.even(tokens + model.text, topology.ranks, prefix=model.text)
        heads = model.heads
        self.problem = Problem(
            batch=1, heads=heads, kv_heads=heads, head_dim=model.head_dim, q=layout, kv=layout, dtype=dtype
        )
        everything = BlockMask.dense(heads, tokens + model.text)
        balancer = Balancer(self.problem, everything, topology)
        # Tori win by a few percent only, and balancing by less: a prediction errs by more.
        found = [each for each in candidates(self.problem, everything, topology) if each.balance == "none"]
        self.costs = [(each, balancer.assign(each)) for each in found if not each.costly]

    def best(self, batch: int, density: float) -> tuple[float, str]:
        """Seconds and the name of the fastest, of a mask whose work is spread evenly."""
        times = batch * self.scale
        share = min(1.0, MAX_BATCH / times)  # of what is asked for; a problem's size is bounded
        problem = replace(self.problem, batch=max(1, round(times * share)))
        work = times * share * density * self.scale
        costs = [(way, replace(cost, seconds=cost.seconds * work)) for way, cost in self.costs]
        return min((way.estimate(problem, self.topology, cost) / share, str(way)) for way, cost in costs)


def part(topology: Topology, ranks: int) -> Topology:
    """As many ranks of a cluster: within a machine if they fit there, else on as few as divide them."""
    devices = max(each for each in range(1, topology.devices + 1) if ranks % each == 0)
    return replace(topology, machines=ranks // devices, devices=devices, links=())


def density(sparse: str, grid: Grid, model: Model) -> float:
    """The share of an attention that is computed, of all layers and steps, as far as its spec tells.

    >>> density("topk:0.2,dense_steps=0.25", (4, 8, 8), Model(name="", layers=2, heads=2, head_dim=8))
    0.4
    """
    name, _, rest = sparse.partition(":")
    options = [word.partition("=") for word in rest.split(",") if word]
    rules = {key: float(value) for key, equals, value in options if equals and key in RULES}
    own = [key + equals + value for key, equals, value in options if key not in RULES]
    if name == "topk":
        share = float(own[0]) if own else 1.0
    elif name in PRODUCERS and name != "trace":
        spec = f"{name}:{','.join(own)}" if own else name
        # Of one that is too large, as of a smaller: there a share is rather too great.
        while math.prod(grid) > TOKENS:
            grid = (-(-grid[0] // 2), -(-grid[1] // 2), -(-grid[2] // 2))
        video = TokenGrid(*grid, prefix=model.text)
        block = max(int(rules.get("block", BLOCK)), -(-video.tokens // 1024))
        share = mask_from_spec(spec, heads=min(model.heads, 8), grid=video, block=block).density
    else:
        share = 1.0  # what is seen will tell
    dense = [rules[key] for key in ("dense_steps", "dense_layers", "dense_last") if rules.get(key, 1) < 1]
    return share + (1 - share) * min(sum(dense), 1.0)


def _model(facts: Mapping[str, Any]) -> Model:
    """The sizes that predictions need; the width of the MLP is what its parameters leave for it."""
    heads, dim, layers = int(facts["heads"]), int(facts["head_dim"]), int(facts["depth"])
    mlp = max(facts["params"] / layers / (heads * dim) ** 2 - 4, 0) / 2
    name, text = str(facts.get("model", "")), int(facts["text_tokens"])
    return Model(name=name, layers=layers, heads=heads, head_dim=dim, text=text, mlp=mlp)


def _pixels(shape: Shape) -> int:
    return shape.frames * shape.height * shape.width


def _size(shape: Shape) -> Shape:
    """The same for all numbers of steps: a step takes as long in each."""
    return replace(shape, steps=1)


def _reason(by_ranks: Mapping[int, float], best: int, cheapest: int) -> str:
    """One sentence on the number of ranks."""
    ranks = f"{best} rank{'s' * (best > 1)}"
    more = [n for n in by_ranks if n > best]
    if not math.isfinite(by_ranks[best]):
        return "It fits in the memory of no number of ranks here."
    if best == cheapest:
        end = (
            f": on {more[0]} it waits for messages longer than it saves"
            if more
            else ", and no other is faster"
        )
        return f"It is fastest on {ranks}{end}."
    gain, cost = by_ranks[cheapest] / by_ranks[best], best / cheapest
    return (
        f"Alone it is fastest on {ranks}, {gain:.1f} times as fast as on {cheapest}, which is "
        f"{gain / cost:.0%} of what {cost:.0f} times the ranks could give; when others wait, it gets as few "
        "as meet its deadline."
    )
