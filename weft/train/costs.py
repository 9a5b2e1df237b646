"""Costs: what an attention takes here, forward and backward, dense or at given shares of keys; measured.

    costs = Costs.measure(16384, 4, 64, part=part, world=world)
    costs.sparse(shares) < costs.dense()

One head of at most LENGTH tokens is timed: pairs of tokens cost by the square of the length, the rest by the
length. Contenders take turns, and their ratios count: the speed of a machine changes by the second. The clock
is that of the thread at work: what others take of the cores is not the contender's; of a GPU, that of the
wall. All ranks measure at the
same time, as they will compute, and take what the first has found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum, inf, isfinite, prod
from statistics import median
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import AnyMask, BlockMask
from weft.core.topology import Topology
from weft.models.sparsity import problem_of
from weft.plan.balanced import Balancer
from weft.plan.place import Planned, planned
from weft.plan.strategies import parse
from weft.run.attention import attention
from weft.run.kernels.attend import attend
from weft.run.kernels.proxies import at_a_time, pool
from weft.run.kernels.select import top_k
from weft.run.kernels.tiles import Blocks
from weft.run.world import SoloComm, World, world_of
from weft.train.predictor import Predictor, learn
from weft.train.select import Masses, Shares

if TYPE_CHECKING:
    from weft.train.recipe import SparsePart

LENGTH, ROUNDS = 1536, 5
MUCH, LITTLE = 2, 8  # of the keys a half, an eighth
PICO = 1e12
DRAWS = 16
"""Normal numbers that torch draws together: pieces of so many are those of one draw."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Costs:
    """Seconds, on one of the ranks if there were no others."""

    tokens: int
    heads: int
    ranks: int
    full: float
    """A head, all keys, by the faster of torch's attention and weft's."""
    head: float
    """A sparse head whatever its share, and what its share adds if it is 1."""
    share: float
    select: float
    """A head's predictor, its training, and the selection."""
    plan: float
    """A new mask: dealing it, and compiling that; all ranks do it."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or not all(map(isfinite, vars(self).values())):
            raise InputError(f"{self} were not measured.", hint="Give 1 rank or more, and finite times.")

    def dense(self) -> float:
        return self.heads * self.full / self.ranks

    def each(self, shares: Shares) -> Shares:
        """Of every head alone."""
        return (self.head + self.share * shares) / self.ranks

    def sparse(self, shares: Shares) -> float:
        return fsum(self.each(shares).tolist()) + self.heads * self.select / self.ranks + self.plan

    @staticmethod
    def measure(  # noqa: PLR0913 - the sizes of an attention
        tokens: int,
        heads: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        backend: str = "auto",
        *,
        part: SparsePart,
        world: World | None = None,
    ) -> Costs:
        """All ranks at the same time, also inside a forward; once for a size, in a second or two."""
        world = world or world_of(None, 60.0)
        tokens = part.cost_tokens or tokens
        kind = part.cube, part.block_k, part.method, part.rank, part.rows
        key = tokens, heads, dim, dtype, device, backend, kind
        known = _known.setdefault(world, {})
        if key not in known:
            with _apart():
                found = list(_kernels(tokens, dim, dtype, device, part, backend))
                found.append(_selection(tokens, dim, device, part))
                found.append(_planning(tokens, heads, device, part, world))
            agreed = world.comm.gather_numbers([round(seconds * PICO) for seconds in found])[0]
            known[key] = Costs(tokens, heads, world.comm.size, *(number / PICO for number in agreed))
        return known[key]


_known: WeakKeyDictionary[World, dict[object, Costs]] = WeakKeyDictionary()


@contextmanager
def _apart() -> Iterator[None]:
    """Nobody around a forward, be it gradient checkpointing or who answers its attentions, is to see this."""
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        torch._C.DisableTorchFunction(),
    ):
        yield


def blocks_of(part: SparsePart) -> tuple[int, int]:
    """Tokens of a block of queries and of keys."""
    cube = prod(part.cube)
    return cube, part.block_k or cube


def _kernels(
    tokens: int, dim: int, dtype: torch.dtype, device: torch.device, part: SparsePart, backend: str
) -> tuple[float, float, float]:
    """(full, head, share)"""
    length = min(tokens, LENGTH)
    q, k, v = (_draw(1, 1, length, dim).to(device, dtype).requires_grad_() for _ in range(3))
    block_q, block_k = blocks_of(part)
    how: Any = {"scale": dim**-0.5, "block_q": block_q, "block_k": block_k, "backend": backend}
    rows, cols = -(-length // block_q), -(-length // block_k)
    much, little = max(2, round(cols / MUCH)), max(1, round(cols / LITTLE))
    some, fewer = (
        Blocks.of(torch.cat([*_tiles(rows, cols, count)])[None].to(device)) for count in (much, little)
    )

    def back(out: Tensor) -> None:
        torch.autograd.grad(out.sum(), (q, k, v))

    own, theirs, more, less = _turns(
        lambda: back(attend(q, k, v, None, **how)[0]),
        lambda: back(F.scaled_dot_product_attention(q, k, v)),
        lambda: back(attend(q, k, v, some, **how)[0]),
        lambda: back(attend(q, k, v, fewer, **how)[0]),
        device=device,
    )
    share = max(0.0, more - less) / (much - little) * cols
    head, longer = max(0.0, less - share * little / cols), tokens / length
    return min(own, theirs) * longer**2, head * longer, share * longer**2


def _tiles(rows: int, cols: int, count: int, seed: int = 0) -> Iterator[Tensor]:
    """[rows, cols] of booleans, `count` in every row; some rows at a time, in all those of one draw."""
    numbers = torch.Generator().manual_seed(seed)
    some = DRAWS * max(1, at_a_time(CPU) // (DRAWS * cols))
    for first, end in pairwise([*range(0, max(1, rows - some), some), rows]):
        yield torch.randn(end - first, cols, generator=numbers).argsort(-1) < count


def _draw(*shape: int, seed: int = 0) -> Tensor:
    """Of an own generator: the run's would go on otherwise than that of a run which has its costs already."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _selection(tokens: int, dim: int, device: torch.device, part: SparsePart) -> float:
    """Of a head; without what ranks tell each other, which is little."""
    if part.method == "window":
        return 0.0
    heads, alone = 2, World(SoloComm())
    q, k = (_draw(1, heads, tokens, dim).to(device) for _ in range(2))
    predictor = Predictor(replace(part, source="qk"), heads=heads, width=heads * dim, seed=0).to(device)
    block_q, block_k = blocks_of(part)
    groups = torch.arange(-(-tokens // block_q))

    def select() -> None:
        low, block = (q, pool(k, block_k)), 1
        if part.method == "dsv":
            rows = q[:, :, : part.rows]
            learn(predictor, part.loss, rows @ k.mT, rows, k, tokens, alone)
            with torch.no_grad():
                low, block = (predictor(q, 0), predictor(k, 1)), block_k
        scores = Masses(pool(low[0], block_q)[0], low[1][0], block)
        for head in range(heads):
            top_k(scores.of(head, groups)[None], 1 / LITTLE)

    return _turns(select, device=device)[0] / heads


def _planning(tokens: int, heads: int, device: torch.device, part: SparsePart, world: World) -> float:
    """Of a mask that is new, which every step of every block has: a first call takes longer than a second."""
    block_q, block_k = blocks_of(part)
    rank, ranks = world.comm.rank, world.comm.size
    strategy = parse("ulysses+balanced" if heads >= ranks else "ring+balanced", ranks)
    layout = Layout.even(tokens, ranks)
    rows, cols = -(-tokens // block_q), -(-tokens // block_k)
    q = torch.zeros(1, heads, layout.rows(rank), 8, device=device)
    plan: Planned | None = None
    least = inf
    for seed in range(3):  # the first pays for what the others share
        bits, packing = [], 0.0
        for tiles in _tiles(heads * rows, cols, max(1, cols // 64), seed):
            began = time.thread_time()
            bits.append(np.packbits(tiles.numpy(), axis=1))
            packing += time.thread_time() - began
        began = time.thread_time() - packing
        packed = np.concatenate(bits).reshape(heads, rows, -1)
        mask = BlockMask(tokens, tokens, block_q, block_k, tuple(range(heads)), packed)
        if plan is None:
            problem, topology = problem_of(layout, q, q), Topology.local(ranks)
            balancer = Balancer(problem, AnyMask.like(mask), topology)
            plan = planned(strategy, balancer.assign(strategy).assignment, "", problem, mask, topology)
        took: list[float] = []
        for _ in range(2):
            attention(q, q, q, mask=mask, plan=plan, mesh=world)
            took.append(time.thread_time() - began)
            began += took[0]
        least = min(least, took[0] - took[1])
    return max(0.0, least)


def _turns(*contenders: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of each: those of the first at its best, of the others by their ratios to it."""
    rounds = [[_seconds(contender, device) for contender in contenders] for _ in range(1 + ROUNDS)][1:]
    best = min(took[0] for took in rounds)
    return [best * median(took[i] / took[0] for took in rounds) for i in range(len(contenders))]


def _seconds(contender: Callable[[], object], device: torch.device) -> float:
    began = _now(device)
    contender()
    return _now(device) - began


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
