"""Calibrate: measure the links and the attention kernel of this world, as a Topology for the planner.

Every rank calls `calibrate` at the same time; all return the same Topology, the one rank 0 measured.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.core.codec import from_plain, to_plain
from weft.core.topology import LOOPBACK, Link, Topology
from weft.masks.random import random_mask
from weft.run.attention import attention
from weft.run.devices import check_devices, default_dtype
from weft.run.devices import device as here
from weft.run.exchange import broadcast_json
from weft.run.kernels import choose
from weft.run.kernels.rules import Work
from weft.run.kernels.tiles import Tiles
from weft.run.launch import usable_cores
from weft.run.world import world_of

SMALL, LARGE = 64, 8 << 20  # bytes
MANY = 9
HEADS, TOKENS, BLOCK, SHARES = 4, 2048, 64, (1 / 4, 1 / 16)
ROUNDS = 12
IN_PLACE = 1e12  # bytes/s of what is not moved at all
TIMEOUT = 60.0  # as attention has it, so that it is the same world


def calibrate(*, head_dim: int = 64, dtype: str = "", backend: str = "auto", machines: int = 1) -> Topology:
    """Links inside and between machines, and what attention costs on one device of each.

    Left out, dtype is that in which commands load models there: bfloat16 on GPUs.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    devices = ranks // machines
    device = here()
    if ranks > 1:  # the first messages are those of two ranks, and NCCL needs all to connect any
        comm = world_of(None, TIMEOUT).comm
        check_devices(comm, device)
        comm.warm_up(device)
    intra = measure_link(0, 1, device) if devices > 1 else LOOPBACK
    inter = measure_link(0, devices, device) if machines > 1 else intra
    cores = usable_cores() if device.type == "cpu" else 0
    # Cores that are all busy share caches and memory, and a schedule keeps them all busy.
    kernel, memory = Kernel(), 0.0
    if ranks == 1 or dist.get_rank() < min(devices, cores or 1):
        kernel = measure_kernel(head_dim, dtype or default_dtype(), device, backend)
        memory = measure_memory(device)
    call = kernel.call
    if ranks > 1:
        call = max(call, measure_call(ranks, intra, device) * min(1.0, cores / devices if cores else 1.0))
    found = Topology(
        name="calibrated",
        machines=machines,
        devices=devices,
        intra=intra,
        inter=inter,
        flops=kernel.flops,
        cores=cores,
        call_seconds=call,
        tile_seconds=kernel.tile,
        row_seconds=kernel.row,
        memory_bandwidth=memory,
        post_seconds=measure_post(0, 1, device) if devices > 1 else 0.0,
        nic_bandwidth=measure_card(machines, device) if machines > 1 and devices > 1 else 0.0,
        two_sided=machines > 1 or not _reads_in_place(device),
    )
    return _from_first(found)


def measure_link(a: int, b: int, device: torch.device) -> Link:
    """Two ranks send to each other at the same time, as they do in a schedule; the others wait."""
    small, large = (_exchange_seconds(a, b, size, device) for size in (SMALL, LARGE))
    seconds = max(large - small, LARGE / IN_PLACE)
    return _from_first(Link(latency=small, bandwidth=(LARGE - SMALL) / seconds))


def _exchange_seconds(a: int, b: int, size: int, device: torch.device, messages: int = 1) -> float:
    """Through the transport that attention uses; there a call is one of all ranks, so the others call too."""
    comm = world_of(None, TIMEOUT).comm
    peer = {a: b, b: a}.get(comm.rank)
    own = {name: torch.zeros(size, dtype=torch.uint8, device=device) for name in ("out", "back")}

    def exchange() -> None:
        lender = comm.begin(device)
        if peer is not None:
            given = lender.lend(dict.fromkeys(own, size)) if lender else own
            posts = range(messages)
            under_way = [
                comm.post([(peer, given["out"])], [(peer, given["back"])], "calibration", 0) for _ in posts
            ]
            for transit in under_way:
                transit.wait_for(peer)
                transit.finish()
        if lender:
            lender.end()

    comm.warm_up(device)
    dist.barrier()
    return _seconds(exchange, device, repeats=40 if size == SMALL else 10)


def _reads_in_place(device: torch.device) -> bool:
    """Whether ranks read each other's memory, so that no message waits for its receiver."""
    lender = world_of(None, TIMEOUT).comm.begin(device)
    if lender:
        lender.end()
    return lender is not None


def measure_card(machines: int, device: torch.device) -> float:
    """Bytes/s that the devices of a machine together send to the next machine, while all machines do."""
    dist.barrier()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out, back = (torch.zeros(LARGE // 4, dtype=torch.uint8, device=device) for _ in range(2))
    before, after = ((rank + step * ranks // machines) % ranks for step in (-1, 1))
    shift = [dist.P2POp(dist.irecv, back, before), dist.P2POp(dist.isend, out, after)]
    seconds: list[float] = []
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(4):
            _pass(shift)
        dist.barrier()  # devices do not get equal shares, and the last one counts
        seconds.append(time.perf_counter() - began)
    # The first ones pay for connections; the slow ones have met other processes.
    return _from_first(4 * ranks // machines * out.numel() / min(seconds))


def _pass(messages: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def measure_post(a: int, b: int, device: torch.device) -> float:
    """What one call costs that starts a message or waits for it, besides the message itself."""
    few, many = (_exchange_seconds(a, b, SMALL, device, messages=n) for n in (1, MANY))
    return max(0.0, many - few) / (2 * (MANY - 1))


def measure_call(ranks: int, link: Link, device: torch.device) -> float:
    """What one attention of a schedule costs with all that goes with it, however few its tokens."""
    q, k, v = (torch.zeros(1, 1, 1, 8, device=device) for _ in range(3))
    dist.barrier()
    with torch.no_grad():
        ring = _seconds(lambda: attention(q, k, v, tokens=ranks, plan="ring"), device, repeats=50)
    return (ring - (ranks - 1) * link.latency) / ranks


def measure_memory(device: torch.device) -> float:
    """Bytes/s read and written by copying heads into messages, as packing does."""
    source = torch.zeros(2 * MANY, 2, LARGE // 4 // 64 // 8, 64, device=device)
    target = torch.empty_like(source)
    turn = itertools.count()

    def copy() -> None:
        # Each time others: what attention has just gone through is not in the cache any more.
        at = next(turn) % (2 * MANY)
        target[-at, 0].copy_(source[at, 1])

    seconds = _seconds(copy, device, repeats=6 * MANY)
    return 2 * source[0, 0].numel() * source.element_size() / seconds


class Kernel(NamedTuple):
    """FLOP/s on dense tiles; seconds that a call, a tile of a sparse mask and a row of blocks add."""

    flops: float = 1.0
    call: float = 0.0
    tile: float = 0.0
    row: float = 0.0


def measure_kernel(head_dim: int, dtype: str, device: torch.device, backend: str = "auto") -> Kernel:
    """All tiles, a quarter and a sixteenth of them, in turns: a machine's speed changes by the second."""
    work = Work(sparse=True, backward=False, head_dim=head_dim, dtype=dtype, block_q=BLOCK, block_k=BLOCK)
    kernel = choose(backend, dtype, str(device), work)
    draw = [torch.randn(1, HEADS, TOKENS, head_dim, device=device) for _ in range(3)]
    q, k, v = (x.to(getattr(torch, dtype)) for x in draw)
    one_q, one_k, one_v = (x[:, :1, :BLOCK] for x in (q, k, v))
    masks = [random_mask(HEADS, TOKENS, TOKENS, block=BLOCK, density=share) for share in SHARES]
    calls = [Tiles(None, TOKENS, TOKENS, TOKENS, TOKENS)]
    calls += [Tiles(mask.tiles, BLOCK, BLOCK, TOKENS, TOKENS) for mask in masks]
    scale = head_dim**-0.5
    one = Tiles(None, BLOCK, BLOCK, BLOCK, BLOCK)
    call = _seconds(lambda: kernel.attend(one_q, one_k, one_v, one, scale), device)
    rounds = [
        [_once(lambda tiles=tiles: kernel.attend(q, k, v, tiles, scale), device) for tiles in calls]
        for _ in range(2 + ROUNDS)
    ][2:]
    dense = statistics.quantiles((took[0] for took in rounds), n=8)[0]
    some, fewer = (dense * statistics.median(took[i] / took[0] for took in rounds) for i in (1, 2))
    tiles = [int(mask.tiles.sum()) for mask in masks]
    rows, all_tiles = HEADS * TOKENS // BLOCK, HEADS * (TOKENS // BLOCK) ** 2
    sparse = (some - fewer) / (tiles[0] - tiles[1])
    row = max(0.0, fewer - call - tiles[1] * sparse) / rows
    full = max(1e-12, dense - call - rows * row) / all_tiles
    return Kernel(4 * head_dim * BLOCK**2 / full, call, max(0.0, sparse - full), row)


def _once(what: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    what()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _seconds(what: Callable[[], object], device: torch.device, repeats: int = 12) -> float:
    taken = [_once(what, device) for _ in range(repeats + 2)]
    # The first ones pay for fresh pages and connections; the slow ones have met other processes.
    return statistics.quantiles(taken[2:], n=8)[0]


def _from_first(mine: Any) -> Any:
    """Return the value of rank 0, on every rank."""
    return from_plain(broadcast_json(to_plain(mine)))
