"""Shared memory against gloo between two ranks of one machine: messages, whole attentions, a straggler.

    python -m bench.transport [--quick] [--json FILE]

Two processes with one thread each; contenders take turns in rounds, the slower rank counts, and a ratio is
the median over rounds. Messages: both ranks send and receive one that is packed already, until the
receiver may read it: gloo, shared memory read in place, and shared memory with the message copied out and
the sender told that it may write again. Attention: float32, 8 heads of 64, weft over shared memory, weft
over gloo, and the limit: the same kernel on half of the heads, while the other rank has the other half.
A straggler: rank 1 sleeps 50 ms once in each call, at a random stage of a ring; what the call loses by it.
Short sequences against other libraries are rows of bench.attention.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress

from bench.links import exchange
from bench.rows import (
    Results,
    Round,
    Row,
    followed,
    interleave,
    main,
    median_ratio,
    timed,
    undisturbed,
    walls,
)
from bench.stage import STAGE, play
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.plan.choose import build
from weft.run.attention import attention
from weft.run.comm import shm
from weft.run.comm.group import GroupComm
from weft.run.comm.onesided import OneSidedComm
from weft.run.execute import Executor
from weft.run.kernels import AttentionKernel, choose
from weft.run.kernels.tiles import Tiles
from weft.run.spawn.pool import Pool

RANKS, HEADS, DIM = 2, 8, 64
CPU = torch.device("cpu")
SLEEP = 0.05
GLOO, SHM, COPY, COMPUTE = "gloo", "shared memory", "with copy and ack", "compute alone"
MB = 1 << 20
TIMEOUTS = {GLOO: 120.0, SHM: 121.0}  # a world is made once for each time-out, with the transport of then

# On a rank.


def prepare_messages(num_bytes: int) -> None:
    STAGE.clear()
    STAGE[GLOO] = exchange(num_bytes)
    STAGE[SHM] = _message(num_bytes, copied=False)
    STAGE[COPY] = _message(num_bytes, copied=True)


def _comm(kind: str) -> Any:
    assert dist.group.WORLD is not None
    base = GroupComm(dist.group.WORLD, TIMEOUTS[GLOO])
    if kind == GLOO:
        return base
    return OneSidedComm(base, shm.rendezvous, base.timeout)


def _message(num_bytes: int, *, copied: bool) -> Callable[[], None]:
    comm, peer = _comm(SHM), 1 - dist.get_rank()
    own = torch.zeros(num_bytes, dtype=torch.uint8)
    nowhere = torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def call() -> None:
        lender = comm.begin(CPU)
        out = lender.lend({"message": num_bytes})["message"]
        message = comm.post([(peer, out)], [(peer, nowhere)], "op 0 (message)", 0).wait_for(peer)
        if copied:
            own.copy_(message)
        lender.end()
        if copied:
            comm.window.barrier(comm.calls, comm.timeout)

    for turn in range(2):  # both halves get their pages, and the reader its view of them
        lender = comm.begin(CPU)
        lender.lend({"message": num_bytes})["message"].fill_(turn)
        lender.end()
        call()
        own.copy_(comm.window.get(peer, 0, num_bytes))
    return call


def prepare_attention(tokens: int) -> None:
    """Every contender once, so that plans are made, memory is there, and answers are the same."""
    STAGE.clear()
    torch.manual_seed(tokens)
    whole = [torch.randn(1, HEADS, tokens, DIM) for _ in range(3)]
    mine = torch.arange(tokens).chunk(RANKS)[dist.get_rank()]
    shards = [x[:, :, mine].contiguous() for x in whole]
    for kind, asked in ((GLOO, "group"), (SHM, "shm")):
        os.environ["WEFT_TRANSPORT"] = asked
        STAGE[kind] = partial(attention, *shards, tokens=tokens, timeout=TIMEOUTS[kind])
    some = HEADS // RANKS
    half = [x[:, dist.get_rank() * some :][:, :some].contiguous() for x in whole]
    STAGE[COMPUTE] = partial(choose("auto").attend, *half, Tiles(None, 64, 64, tokens, tokens), DIM**-0.5)
    answers = [call() for call in (STAGE[GLOO], STAGE[SHM], STAGE[SHM])]
    if not all(torch.equal(answers[0], answer) for answer in answers):  # type: ignore[call-overload]
        raise RuntimeError("the transports do not agree")


class _Sleepy:
    """A kernel that sleeps before one of its next calls."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.kernel, self.name, self.awake = kernel, kernel.name, -1
        self.grouped = kernel.grouped
        self.attend_backward = kernel.attend_backward

    def attend(self, *args: Any, **named: Any) -> Any:
        if self.awake == 0:
            time.sleep(SLEEP)
        self.awake -= 1
        return self.kernel.attend(*args, **named)


def prepare_straggler(tokens: int) -> None:
    STAGE.clear()
    layout = Layout.even(tokens, RANKS)
    problem = Problem(
        batch=1, heads=HEADS, kv_heads=HEADS, head_dim=DIM, q=layout, kv=layout, dtype="float32"
    )
    schedule = build("ring", problem, BlockMask.dense(HEADS, tokens))
    shards = [torch.randn(1, HEADS, layout.rows(dist.get_rank()), DIM) for _ in range(3)]
    chance = random.Random(dist.get_rank())
    for kind in (GLOO, SHM):
        kernel = _Sleepy(choose("auto"))
        executor = Executor(schedule, _comm(kind), kernel, name=kind)

        def call(*, sleepy: bool, kernel: _Sleepy = kernel, executor: Executor = executor) -> None:
            kernel.awake = chance.randrange(RANKS) if sleepy and dist.get_rank() == 1 else -1
            executor.forward(*shards, DIM**-0.5, keep=False)  # type: ignore[call-arg]

        STAGE[kind], STAGE[f"{kind}, asleep"] = partial(call, sleepy=False), partial(call, sleepy=True)
    for call_once in [*STAGE.values()] * 2:
        call_once()


# In the parent.


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - the command line's call
    report = Results()
    sizes = (1, 16) if quick else (1, 4, 16, 64)
    lengths = (4096,) if quick else (4096, 8192)
    share = 4.0 if quick else 12.0

    def rounds(prepare: Callable[[int], None], argument: int, seconds: float) -> Sequence[Round]:
        pool.run(prepare, argument)
        task = progress.add_task(f"{prepare.__name__} {argument}", total=seconds)
        return undisturbed(followed(interleave(partial(pool.run, play), seconds), progress, task))

    with Pool(RANKS, threads=1, timeout=120.0) as pool:
        for size in sizes:
            _messages(report, f"{size} MB", rounds(prepare_messages, size * MB, share))
        for tokens in lengths:
            _attention(report, tokens, rounds(prepare_attention, tokens, 2 * share))
        _straggler(report, rounds(prepare_straggler, 1024, share))
    return report


def _messages(report: Results, case: str, played: Sequence[Round]) -> None:
    wall = walls(played)
    for name, least in ((SHM, 5.0), (COPY, 3.0)):
        ratio = median_ratio(wall[GLOO], wall[name])
        report.rows.append(
            Row(
                case=f"{case} {'read in place' if name == SHM else name}",
                measured=median(wall[name]),
                peer=median(wall[GLOO]),
                peer_name="gloo",
                bar=f"gloo/weft ≥ {least:g} (is {ratio:.1f})",
                holds=ratio >= least,
            )
        )
    report.lines.extend([timed(case, name, played, SHM) for name in wall])


def _attention(report: Results, tokens: int, played: Sequence[Round]) -> None:
    wall = walls(played)
    over_limit = median_ratio(wall[SHM], wall[COMPUTE])
    report.rows.append(
        Row(
            case=f"attention S={tokens}",
            measured=median(wall[SHM]),
            peer=median(wall[GLOO]),
            peer_name="weft over gloo",
            limit=median(wall[COMPUTE]),
            bar=f"weft/limit ≤ 1.03 (is {over_limit:.3f})",
            holds=over_limit <= 1.03,
        )
    )
    report.lines.extend([timed(f"attention S={tokens}", name, played, SHM) for name in wall])


def _straggler(report: Results, played: Sequence[Round]) -> None:
    wall = walls(played)
    lost = {
        kind: median(
            late - on_time for late, on_time in zip(wall[f"{kind}, asleep"], wall[kind], strict=True)
        )
        for kind in (GLOO, SHM)
    }
    report.rows.append(
        Row(
            case="a rank sleeps 50 ms: lost",
            measured=lost[SHM],
            peer=lost[GLOO],
            peer_name="weft over gloo",
            limit=SLEEP * 1e3,
            bar="lost ≤ 1.05 × the sleep",
            holds=lost[SHM] <= 1.05e3 * SLEEP,
        )
    )
    report.lines.extend([timed("straggler", name, played, SHM) for name in wall])


if __name__ == "__main__":
    main(measure, __doc__ or "")
