"""Tuning: measure the fastest configuration of each Triton kernel, the same on all ranks.

Configurations are measured when all ranks make an executor: in a step the other ranks would have to wait, and
ranks would choose differently. A table belongs to the ranks of one `Comm`, which make its entries together.
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
from weft.run.kernels import AttentionKernel, make
from weft.run.kernels.composite import Composite
from weft.run.kernels.parity_sample import TOLERANCE
from weft.run.kernels.tiles import Blocks, Tiles
from weft.run.kernels.triton_configs import BLOCKS, Config, configs, padded
from weft.run.measure.stopwatch import device_seconds

if TYPE_CHECKING:
    from weft.run.kernels.triton_attention import TritonAttention

_log = logging.getLogger(__name__)

SECONDS = 20.0
"""No measurement for an executor starts later than this; the last one may have to compile."""
SHARE_OF_TIMEOUT = 0.3
"""Share of the timeout of the other ranks that may be spent on measuring."""
LENGTHS = (7, 14)
"""Exponents of 2: shorter and longer operands count as these. 16,384 tokens occupy all of a GPU."""
DENSITIES = 5
"""Classes of sparse masks: more than a half of the tiles active, a quarter, ... and less than a sixteenth."""
HEADS, REPEATS = 8, 5


class TuningKey(NamedTuple):
    """The kind of launch that a configuration is chosen for."""

    target: str
    kernel: str
    head_dim: int
    """Padded."""
    block_q: int
    block_k: int
    dtype: str
    group: int
    density: int
    """0 for dense tiles; else the class of the mask."""
    q_length: int
    k_length: int
    """Exponents of 2."""


TunedConfigs = dict[TuningKey, Config]

_tables: WeakKeyDictionary[Comm, TunedConfigs] = WeakKeyDictionary()
_measured: dict[tuple[TuningKey, torch.device], int] = {}


def length_class(tokens: int) -> int:
    """Return the exponent of the power of two above a number of tokens, within bounds."""
    return min(max(tokens.bit_length(), LENGTHS[0]), LENGTHS[1])


def density_class(mask: BlockMask) -> int:
    """Return 0 for a dense mask, 1 above a half, 2 above a quarter, and so on."""
    if mask.is_dense:
        return 0
    density = max(mask.counts(range(mask.heads)).mean() / mask.heads, 2.0**-DENSITIES)
    return next(n for n in range(1, DENSITIES + 1) if n == DENSITIES or density > 2.0**-n)


def candidates(key: TuningKey) -> tuple[Config, ...]:
    """Return the configurations to choose from; the first is the default."""
    return configs(*key[:5])


def request(comm: Comm, schedule: Schedule, kernel: AttentionKernel, device: torch.device) -> str:
    """Return the keys that this rank wants measured, as JSON for all ranks; "" if it cannot measure."""
    if not _triton_kernels(kernel) or not _can_measure(device):
        return ""
    table = _tables.setdefault(comm, {})
    return json.dumps(sorted(keys_of(schedule, comm.rank, kernel, device) - table.keys()))


def tune(
    comm: Comm, schedule: Schedule, kernel: AttentionKernel, device: torch.device, requests: list[str]
) -> None:
    """Measure the requested keys, each on one rank, and share the results among all."""
    ranks_of: dict[TuningKey, list[int]] = {}
    for rank, text in enumerate(requests):
        for row in json.loads(text or "[]"):
            ranks_of.setdefault(TuningKey(*row), []).append(rank)
    keys, table = sorted(ranks_of), _tables.setdefault(comm, {})
    if keys:
        timeout = getattr(comm, "timeout", SECONDS / SHARE_OF_TIMEOUT)
        deadline = time.monotonic() + min(SECONDS, SHARE_OF_TIMEOUT * timeout)
        own = [at for at, key in enumerate(keys) if ranks_of[key][at % len(ranks_of[key])] == comm.rank]
        places = {at: fastest(keys[at], device, deadline) for at in own}
        for text in gather_text(comm, json.dumps(places)):
            table |= {
                keys[int(at)]: candidates(keys[int(at)])[place] for at, place in json.loads(text).items()
            }
    for each in _triton_kernels(kernel):
        each.tuned, each.density = table, density_class(schedule.attention[1])


def keys_of(schedule: Schedule, rank: int, kernel: AttentionKernel, device: torch.device) -> set[TuningKey]:
    """Return the keys of a rank's attentions with several candidates; in no_grad without gradients."""
    assert isinstance(kernel, Composite)
    problem, mask = schedule.attention
    density = density_class(mask)
    block_q, block_k = (mask.block_q, mask.block_k) if density else (max(BLOCKS), max(BLOCKS))
    head_dim, dtype = padded(problem.head_dim), problem.dtype
    forward, backward = kernel.pair(sparse=density > 0)
    work = [("forward", forward)]
    if torch.is_grad_enabled():
        work += [("grad_queries", backward), ("grad_keys", backward)]
    keys: set[TuningKey] = set()
    for op in schedule.ops:
        if not isinstance(op, Attend) or op.rank != rank:
            continue
        heads, kv_heads = op.q.heads.size, op.kv.heads.size
        lengths = length_class(op.q.tokens.size), length_class(op.kv.tokens.size)
        group = heads // kv_heads if heads % kv_heads == 0 else 1
        for name, each in work:
            if _is_triton(each):
                kind = each.target(device), name, head_dim, block_q, block_k
                keys.add(TuningKey(*kind, dtype, group, density, *lengths))
    return {key for key in keys if len(candidates(key)) > 1}


def fastest(key: TuningKey, device: torch.device, deadline: float) -> int:
    """Return the index of the fastest candidate of those measured before the deadline; memoized.

    Those that fail are left out, and those whose result differs from the first, which is parity tested.
    """
    if (key, device) not in _measured:
        seconds: dict[int, float] = {}
        expected: tuple[Tensor, ...] = ()
        for at, config in enumerate(candidates(key)):
            if time.monotonic() > deadline:
                break
            try:
                taken, results = measure(key, config, device)
            except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver raises
                _log.warning("%s of %s is left out: %s", config, key, error)
                continue
            expected = expected or results
            tolerance = TOLERANCE.get(key.dtype, 1e-3)
            if all(_is_near(*pair, tolerance) for pair in zip(results, expected, strict=True)):
                seconds[at] = taken
            else:
                _log.warning("%s of %s is left out: its result is wrong.", config, key)
        _measured[key, device] = min(seconds, key=lambda at: seconds[at], default=0)
    return _measured[key, device]


def _is_near(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


@torch.no_grad()
def measure(key: TuningKey, config: Config, device: torch.device) -> tuple[float, tuple[Tensor, ...]]:
    """Return the seconds and the results of a kernel on random operands.

    A gradient is timed with its other kernels, which take equally long with each configuration.
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


def _triton_kernels(kernel: AttentionKernel) -> list[TritonAttention]:
    pairs = [kernel.pair(sparse=sparse) for sparse in (False, True)] if isinstance(kernel, Composite) else []
    return [each for pair in pairs for each in pair if _is_triton(each)]


def _is_triton(kernel: AttentionKernel) -> TypeGuard[TritonAttention]:
    return kernel.name == "triton"


def _can_measure(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and os.environ.get("WEFT_TUNE") != "0"
        and active_fake_mode() is None
        and not torch.cuda.is_current_stream_capturing()
    )
