"""AttentionCost: measured seconds of an attention, forward and backward, dense or at given shares of keys.

    costs = AttentionCost.measure(16384, 4, 64, config=config, world=world)
    costs.sparse(shares) < costs.dense()

One head of at most LENGTH tokens is timed; pairs of tokens scale with the square of the length, the rest with
the length. Contenders take turns and their ratios count, since the speed of a machine changes by the second.
On CPUs thread time is measured, which excludes other load; on GPUs, wall time. All ranks measure at the same
time, as they will compute, and use the values of rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import fsum, inf, isfinite, prod
from statistics import median
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import AnyMask, BlockMask
from weft.core.topology import Topology
from weft.plan.balanced import Balancer
from weft.plan.place import Planned, planned
from weft.plan.strategies import parse
from weft.run.attention import attention
from weft.run.kernels import choose, guarded
from weft.run.kernels.parity import parity_check
from weft.run.kernels.proxies import elements_per_chunk, pool
from weft.run.kernels.rules import KernelSpec
from weft.run.kernels.select import top_k
from weft.run.kernels.tiles import Blocks, Tiles
from weft.run.world import LocalComm, World, world_of
from weft.sparse.mask_cache import problem_of
from weft.train.attention_stats import key_mass
from weft.train.cubes import Shares
from weft.train.predictor import Predictor, loss_backward

if TYPE_CHECKING:
    from weft.train.recipe import SparseConfig

LENGTH, ROUNDS = 1536, 5
LARGE_SHARE, SMALL_SHARE = 2, 8  # a half and an eighth of the keys
PICO = 1e12
CPU = torch.device("cpu")


@dataclass(frozen=True)
class AttentionCost:
    """Seconds on one rank, if it had all heads."""

    tokens: int
    heads: int
    ranks: int
    full: float
    """A dense head, with the faster of torch's attention and weft's."""
    head: float
    """A sparse head, independent of its share of keys."""
    share: float
    """The additional time of a sparse head per share of keys."""
    select: float
    """Predictor, its training, and the selection, per head."""
    plan: float
    """Planning and compiling a new mask, on all ranks."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or not all(map(isfinite, vars(self).values())):
            raise InputError(f"AttentionCost needs >= 1 rank and finite times, got {self}.")

    def dense(self) -> float:
        return self.heads * self.full / self.ranks

    def per_head(self, shares: Shares) -> Shares:
        return (self.head + self.share * shares) / self.ranks

    def sparse(self, shares: Shares) -> float:
        return fsum(self.per_head(shares).tolist()) + self.heads * self.select / self.ranks + self.plan

    @staticmethod
    def measure(  # noqa: PLR0913 - the sizes of an attention
        tokens: int,
        heads: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        backend: str = "auto",
        *,
        config: SparseConfig,
        world: World | None = None,
    ) -> AttentionCost:
        """Measure on all ranks at once, also inside a forward; once for a size, in a second or two."""
        world = world or world_of(None, 60.0)
        tokens = config.cost_tokens or tokens
        options = config.cube, config.block_k, config.method, config.rank, config.rows
        key = tokens, heads, dim, dtype, device, backend, options
        cache = _cache.setdefault(world, {})
        if key not in cache:
            with _isolated():
                seconds = [*_kernels(tokens, dim, dtype, device, config, backend)]
                seconds.append(_selection(tokens, dim, device, config))
                seconds.append(_planning(tokens, heads, device, config, world))
            agreed = world.comm.all_gather_ints([round(each * PICO) for each in seconds])[0]
            cache[key] = AttentionCost(tokens, heads, world.comm.size, *(number / PICO for number in agreed))
        return cache[key]


_cache: WeakKeyDictionary[World, dict[object, AttentionCost]] = WeakKeyDictionary()


@contextmanager
def _isolated() -> Iterator[None]:
    """Suspend the hooks and modes of a surrounding forward: gradient checkpointing and replaced attention."""
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        torch._C.DisableTorchFunction(),
    ):
        yield


def block_sizes(config: SparseConfig) -> tuple[int, int]:
    """Return the tokens of a query block and of a key block."""
    cube = prod(config.cube)
    return cube, config.block_k or cube


def _kernels(
    tokens: int, dim: int, dtype: torch.dtype, device: torch.device, config: SparseConfig, backend: str
) -> tuple[float, float, float]:
    """Return (full, head, share)."""
    length = min(tokens, LENGTH)
    q, k, v = (_draw(1, 1, length, dim).to(device, dtype).requires_grad_() for _ in range(3))
    block_q, block_k = block_sizes(config)
    rows, cols = -(-length // block_q), -(-length // block_k)
    large, small = max(2, round(cols / LARGE_SHARE)), max(1, round(cols / SMALL_SHARE))
    active = [torch.cat([*_tiles(rows, cols, count)])[None].to(device) for count in (large, small)]
    sizes = block_q, block_k, length, length
    all_tiles, large_tiles, small_tiles = (
        Tiles(None, *sizes, listed=each) for each in (None, *map(Blocks.of, active))
    )
    spec = KernelSpec.of_operands(q, k, small_tiles, dim**-0.5)
    kernel = choose(backend, spec.dtype, str(device), spec, parity_check(None, device))
    grad = torch.ones_like(q)

    @torch.no_grad()
    def attend(tiles: Tiles) -> None:
        out, lse = kernel.attend(q, k, v, tiles, dim**-0.5)
        kernel.attend_backward(grad, q, k, v, (out, guarded(lse)), tiles, dim**-0.5)

    def attend_by_torch() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), grad)

    own, torch_sdpa, large_seconds, small_seconds = _time_in_turns(
        lambda: attend(all_tiles),
        attend_by_torch,
        lambda: attend(large_tiles),
        lambda: attend(small_tiles),
        device=device,
    )
    share = max(0.0, large_seconds - small_seconds) / (large - small) * cols
    head, scale = max(0.0, small_seconds - share * small / cols), tokens / length
    return min(own, torch_sdpa) * scale**2, head * scale, share * scale**2


def _tiles(rows: int, cols: int, count: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield booleans [rows, cols] in pieces of bounded size, `count` true in every row."""
    numbers = torch.Generator().manual_seed(seed)
    chunk = max(1, elements_per_chunk(CPU) // cols)
    for first in range(0, rows, chunk):
        yield torch.randn(min(chunk, rows - first), cols, generator=numbers).argsort(-1) < count


def _draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw without the global generator, which must not depend on whether costs were measured before."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _selection(tokens: int, dim: int, device: torch.device, config: SparseConfig) -> float:
    """Return the seconds of a head's selection, without communication, which is little."""
    if config.method == "window":
        return 0.0
    heads, alone = 2, World(LocalComm())
    q, k = (_draw(1, heads, tokens, dim).to(device) for _ in range(2))
    predictor = Predictor(replace(config, source="qk"), heads=heads, width=heads * dim, seed=0).to(device)
    block_q, block_k = block_sizes(config)
    groups = torch.arange(-(-tokens // block_q))

    def select() -> None:
        low, block = (q, pool(k, block_k)), 1
        if config.method == "dsv":
            rows = q[:, :, : config.rows]
            loss_backward(predictor, config.loss, rows @ k.mT, rows, k, tokens, alone)
            with torch.no_grad():
                low, block = (predictor(q, 0), predictor(k, 1)), block_k
        scores = key_mass(pool(low[0], block_q)[0], low[1][0], block)
        for head in range(heads):
            top_k(scores(head, groups)[None], 1 / SMALL_SHARE)

    return _time_in_turns(select, device=device)[0] / heads


def _planning(tokens: int, heads: int, device: torch.device, config: SparseConfig, world: World) -> float:
    """Return the seconds of planning a new mask: a first call minus a second one. Each step has new masks."""
    block_q, block_k = block_sizes(config)
    rank, ranks = world.comm.rank, world.comm.size
    strategy = parse("ulysses+balanced" if heads >= ranks else "ring+balanced", ranks)
    layout = Layout.even(tokens, ranks)
    rows, cols = -(-tokens // block_q), -(-tokens // block_k)
    q = torch.zeros(1, heads, layout.rows(rank), 8, device=device)
    plan: Planned | None = None
    fastest = inf
    for seed in range(3):  # the first includes imports and other shared work
        bits, packing = [], 0.0
        for tiles in _tiles(heads * rows, cols, max(1, cols // 64), seed):
            start = time.thread_time()
            bits.append(np.packbits(tiles.numpy(), axis=1))
            packing += time.thread_time() - start
        start = time.thread_time() - packing
        packed = np.concatenate(bits).reshape(heads, rows, -1)
        mask = BlockMask(tokens, tokens, block_q, block_k, tuple(range(heads)), packed)
        if plan is None:
            problem, topology = problem_of(layout, q, q), Topology.local(ranks)
            balancer = Balancer(problem, AnyMask.like(mask), topology)
            plan = planned(strategy, balancer.assign(strategy).assignment, "", problem, mask, topology)
        seconds: list[float] = []
        for _ in range(2):
            attention(q, q, q, mask=mask, plan=plan, mesh=world)
            seconds.append(time.thread_time() - start)
            start += seconds[0]
        fastest = min(fastest, seconds[0] - seconds[1])
    return max(0.0, fastest)


def _time_in_turns(*contenders: Callable[[], object], device: torch.device) -> list[float]:
    """Return seconds of each: of the first its fastest round, of the others by median ratio to the first."""
    rounds = [[_seconds(contender, device) for contender in contenders] for _ in range(1 + ROUNDS)][1:]
    best = min(seconds[0] for seconds in rounds)
    return [best * median(seconds[i] / seconds[0] for seconds in rounds) for i in range(len(contenders))]


def _seconds(contender: Callable[[], object], device: torch.device) -> float:
    start = _now(device)
    contender()
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
