"""Tuning: the fastest configuration of a Triton kernel for a kind of work, the same on all ranks.

Measured where an executor is made, when all ranks are there: to measure in a step would make the others wait,
and ranks would choose differently. A table belongs to the ranks of one `Comm`. Its entries are made by all
of them together, so that it is always the same on each.
"""

from __future__ import annotations

import json
import logging
import os
import time
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from weft.core.mask import BlockMask
from weft.core.schedule import Attend, Schedule
from weft.run.agree import gather_text
from weft.run.comm import Comm
from weft.run.kernels import Kernel, make
from weft.run.kernels.composite import Composite
from weft.run.kernels.parity_sample import TOLERANCE
from weft.run.kernels.tiles import Blocks, Tiles
from weft.run.kernels.triton_configs import BLOCKS, Config, configs, padded
from weft.run.stopwatch import device_seconds

if TYPE_CHECKING:
    from weft.run.kernels.gpu import Gpu

_log = logging.getLogger(__name__)

SECONDS = 20.0
"""A rank begins no measurement for an executor later than this; the last one may have to compile."""
SHARE_OF_TIMEOUT = 0.3
"""Of the time that the other ranks wait, at most so much is spent on measuring."""
LENGTHS = (7, 14)
"""Powers of two: shorter and longer operands count as these. At 16,384 tokens all of a GPU is busy."""
DENSITIES = 5
"""Classes of sparse masks: more than a half of the tiles active, a quarter, ... and less than a sixteenth."""
HEADS, REPEATS = 8, 5


class Key(NamedTuple):
    """A kind of work: what a choice holds for."""

    target: str
    kernel: str
    head_dim: int
    """As it is padded."""
    block_q: int
    block_k: int
    dtype: str
    group: int
    density: int
    """0 for dense tiles; else the class of the call's mask."""
    q_length: int
    k_length: int
    """Powers of two."""


Table = dict[Key, Config]

_tables: WeakKeyDictionary[Comm, Table] = WeakKeyDictionary()
_measured: dict[tuple[Key, torch.device], int] = {}


def length_class(tokens: int) -> int:
    """Return the power of two that is above a number of tokens, within bounds."""
    return min(max(tokens.bit_length(), LENGTHS[0]), LENGTHS[1])


def density_class(mask: BlockMask) -> int:
    """Return 0 for a dense mask, 1 above a half, 2 above a quarter, and so on."""
    if mask.is_dense:
        return 0
    density = max(mask.counts(range(mask.heads)).mean() / mask.heads, 2.0**-DENSITIES)
    return next(n for n in range(1, DENSITIES + 1) if n == DENSITIES or density > 2.0**-n)


def options(key: Key) -> tuple[Config, ...]:
    """Return the configurations to choose from; the first is taken where nothing was measured."""
    return configs(*key[:5])


def request(comm: Comm, schedule: Schedule, kernel: Kernel, device: torch.device) -> str:
    """Return the keys that this rank wants measured, as JSON for all ranks; "" where it cannot measure."""
    if not _triton_kernels(kernel) or not _can_measure(device):
        return ""
    table = _tables.setdefault(comm, {})
    return json.dumps(sorted(keys_of(schedule, comm.rank, kernel, device) - table.keys()))


def settle(comm: Comm, schedule: Schedule, kernel: Kernel, device: torch.device, requests: list[str]) -> None:
    """Measure what the ranks requested, each key on one of them, and give all ranks the same choices.

    Whether the ranks meet again here follows from `requests` alone, which all of them have.
    """
    asked: dict[Key, list[int]] = {}
    for rank, text in enumerate(requests):
        for row in json.loads(text or "[]"):
            asked.setdefault(Key(*row), []).append(rank)
    keys, table = sorted(asked), _tables.setdefault(comm, {})
    if keys:
        waits = getattr(comm, "timeout", SECONDS / SHARE_OF_TIMEOUT)
        deadline = time.monotonic() + min(SECONDS, SHARE_OF_TIMEOUT * waits)
        own = [at for at, key in enumerate(keys) if asked[key][at % len(asked[key])] == comm.rank]
        places = {at: fastest(keys[at], device, deadline) for at in own}
        for text in gather_text(comm, json.dumps(places)):
            table |= {keys[int(at)]: options(keys[int(at)])[place] for at, place in json.loads(text).items()}
    for each in _triton_kernels(kernel):
        each.tuned, each.density = table, density_class(schedule.attention[1])


def keys_of(schedule: Schedule, rank: int, kernel: Kernel, device: torch.device) -> set[Key]:
    """Return the keys of a rank's attentions that leave a choice.

    Those of gradients are left out under `torch.no_grad`: they then take the first configuration.
    """
    assert isinstance(kernel, Composite)
    problem, mask = schedule.attention
    density = density_class(mask)
    block_q, block_k = (mask.block_q, mask.block_k) if density else (max(BLOCKS), max(BLOCKS))
    head_dim, dtype = padded(problem.head_dim), problem.dtype
    forward, backward = kernel.pair(sparse=density > 0)
    work = [("forward", forward)]
    if torch.is_grad_enabled():
        work += [("grad_queries", backward), ("grad_keys", backward)]
    keys: set[Key] = set()
    for op in schedule.ops:
        if not isinstance(op, Attend) or op.rank != rank:
            continue
        heads, kv_heads = op.q.heads.size, op.kv.heads.size
        lengths = length_class(op.q.tokens.size), length_class(op.kv.tokens.size)
        group = heads // kv_heads if heads % kv_heads == 0 else 1
        for name, each in work:
            if _is_triton(each):
                kind = each.target(device), name, head_dim, block_q, block_k
                keys.add(Key(*kind, dtype, group, density, *lengths))
    return {key for key in keys if len(options(key)) > 1}


def fastest(key: Key, device: torch.device, deadline: float) -> int:
    """Return the place of the fastest configuration in `options`, of those that the time is enough for.

    One that fails is left out, and one whose result is not that of the first, which parity tests cover.
    What a process has measured once it does not measure again.
    """
    if (key, device) not in _measured:
        seconds: dict[int, float] = {}
        expected: tuple[Tensor, ...] = ()
        for at, config in enumerate(options(key)):
            if time.monotonic() > deadline:
                break
            try:
                taken, results = measure(key, config, device)
            except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver raises
                _log.warning("%s of %s is left out: %s", config, key, error)
                continue
            expected = expected or results
            if all(
                _is_near(*pair, TOLERANCE.get(key.dtype, 1e-3))
                for pair in zip(results, expected, strict=True)
            ):
                seconds[at] = taken
            else:
                _log.warning("%s of %s is left out: its result is wrong.", config, key)
        _measured[key, device] = min(seconds, key=lambda at: seconds[at], default=0)
    return _measured[key, device]


def _is_near(found: Tensor, expected: Tensor, share: float) -> bool:
    return bool((found - expected).abs().max() <= share * expected.abs().max())


@torch.no_grad()
def measure(key: Key, config: Config, device: torch.device) -> tuple[float, tuple[Tensor, ...]]:
    """Return the seconds and the results of a kernel on random operands.

    What else a gradient has to run takes equally long with each configuration.
    """
    random = torch.Generator(device).manual_seed(5)
    group = key.group
    q_len, k_len = (3 << length - 2 for length in (key.q_length, key.k_length))
    dtype = getattr(torch, key.dtype)

    def operand(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, key.head_dim, generator=random, device=device).to(dtype)

    heads = max(1, HEADS // group)
    q, k, v = operand(heads * group, q_len), operand(heads, k_len), operand(heads, k_len)
    shape = heads * group, -(-q_len // key.block_q), -(-k_len // key.block_k)
    listed = Blocks.of(torch.rand(shape, generator=random, device=device) < 0.75 * 2.0 ** (1 - key.density))
    tiles = Tiles(None, key.block_q, key.block_k, q_len, k_len, listed=listed if key.density else None)
    kernel = make("triton")
    assert _is_triton(kernel)
    kernel.tuned, kernel.density = {key: config}, key.density
    done = kernel.attend(q, k, v, tiles, key.head_dim**-0.5)

    def call() -> tuple[Tensor, ...]:
        if key.kernel == "forward":
            return kernel.attend(q, k, v, tiles, key.head_dim**-0.5)[:1]
        return kernel.attend_backward(q, q, k, v, done, tiles, key.head_dim**-0.5)

    return median(device_seconds(call, device, REPEATS)), call()


def _triton_kernels(kernel: Kernel) -> list[Gpu]:
    pairs = [kernel.pair(sparse=sparse) for sparse in (False, True)] if isinstance(kernel, Composite) else []
    return [each for pair in pairs for each in pair if _is_triton(each)]


def _is_triton(kernel: Kernel) -> TypeGuard[Gpu]:
    return kernel.name == "triton"


def _can_measure(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and os.environ.get("WEFT_TUNE") != "0"
        and active_fake_mode() is None
        and not torch.cuda.is_current_stream_capturing()
    )
