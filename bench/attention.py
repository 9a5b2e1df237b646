"""Dense attention over two ranks: weft, yunchang, Diffusers and torch on the same tensors.

    python -m bench.attention [--quick] [--json FILE]

Two processes with one thread each, float32, 8 heads of 64. Before any clock starts, each contender
is checked against dense attention on a short sequence, in a world that is then thrown away: a peer
that raises half way leaves a gloo thread spinning there, which would slow down all that follows. Who
raises, or is more than 1e-4 off, is listed as such and not timed. Then rounds: the ranks meet at a
barrier, each times the contender until it is done there, and the slower rank counts. A ratio is the
median over rounds of peer / weft in the same round, and the fastest peer is the one with the lowest:
the hardest to beat. Rounds in which other processes took more than 5 % of the machine are left out,
as long as three are left.

The limit is what two ranks cannot do without: SDPA on half of the heads, while the other rank is
busy with the other half, plus the bytes of Ulysses at the rate of the gloo link, both measured as
contenders of the same rounds. (On two cores a transfer takes its cycles from the compute, so a
schedule that hides its transfers can come below that sum by no more than the link's share; one
with a faster kernel than SDPA can come below it by more.) Each contender gets q, k, v in the memory
order it is written for.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from bench.links import exchange, ulysses_bytes
from bench.peers import Attention, Peer, peers
from bench.rows import (
    QUIET,
    Line,
    Results,
    Round,
    Row,
    followed,
    interleave,
    main,
    median_ratio,
    quartiles,
    undisturbed,
    walls,
)
from bench.stage import STAGE, play
from weft.run.spawn.pool import Pool

RANKS, HEADS, DIM = 2, 8, 64
TOLERANCE = 1e-4
SHORT = 1.05  # where the transfers weigh more, shared memory shows
WEFT, COMPUTE, LINK = "weft", "limit: SDPA on half the heads", "limit: link"


@dataclass(frozen=True)
class AttentionCase:
    tokens: int
    backward: bool
    seconds: float  # for its rounds
    bar: float = 0.98  # peer / weft

    def __str__(self) -> str:
        return f"S={self.tokens} {'forward + backward' if self.backward else 'forward'}"

    @property
    def nbytes(self) -> int:
        return ulysses_bytes(self.tokens, HEADS, DIM, RANKS, backward=self.backward)


FULL = (
    AttentionCase(1024, backward=False, seconds=12, bar=SHORT),
    AttentionCase(2048, backward=False, seconds=12, bar=SHORT),
    AttentionCase(2048, backward=True, seconds=24),
    AttentionCase(4096, backward=False, seconds=24),
    AttentionCase(4096, backward=True, seconds=40),
    AttentionCase(8192, backward=False, seconds=48),
    AttentionCase(8192, backward=True, seconds=100),
)
QUICK = (
    AttentionCase(1024, backward=False, seconds=3, bar=SHORT),
    AttentionCase(2048, backward=False, seconds=5, bar=SHORT),
    AttentionCase(2048, backward=True, seconds=8),
)  # and about 20 s in which torch's context_parallel finds out that it has no rule for this kernel
CHECKS = tuple(AttentionCase(512, backward=backward, seconds=0) for backward in (False, True))


class Verdict(NamedTuple):
    """What the check against dense attention said: the largest relative error, or what it raised."""

    error: float | None
    raises: str = ""

    @property
    def correct(self) -> bool:
        return self.error is not None and self.error <= TOLERANCE

    def __str__(self) -> str:
        if self.error is None:
            return f"raises: {self.raises}"
        return f"error {self.error:.0e}" if self.correct else f"WRONG: error {self.error:.1e}"


def weft_attention(tokens: int) -> Attention:
    from weft.run.attention import attention

    return lambda q, k, v: attention(q, k, v, tokens=tokens)


# On a rank. The pool calls `prepare` once a case and `play` once a round; STAGE lives in between.


class AttentionTensors:
    """The same q, k, v and output gradient on both ranks, and dense attention's answer to them."""

    def __init__(self, case: AttentionCase) -> None:
        torch.manual_seed(case.tokens)
        shape = (1, HEADS, case.tokens, DIM)
        *self.qkv, self.grad_out = (torch.randn(shape) for _ in range(4))
        self.backward = case.backward
        self.rows = torch.arange(case.tokens).chunk(RANKS)[dist.get_rank()]
        half = self.half_of_heads()()
        parts = [[torch.empty_like(shard) for _ in range(RANKS)] for shard in half]
        for mine, gathered in zip(half, parts, strict=True):
            dist.all_gather(gathered, mine.contiguous())
        self.answer = [torch.cat(gathered, dim=1)[:, :, self.rows] for gathered in parts]

    def half_of_heads(self) -> Callable[[], tuple[Tensor, ...]]:
        """Dense attention on the heads that would be this rank's: half of the work, no transfer."""
        mine = torch.arange(HEADS).chunk(RANKS)[dist.get_rank()]
        q, k, v = (x[:, mine].requires_grad_(self.backward) for x in self.qkv)
        return _timed(sdpa, (q, k, v), self.grad_out[:, mine] if self.backward else None)

    def local(self, order: str) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """This rank's tokens of q, k, v and of the gradient, [B, H, S, D] on memory in `order`."""

        def cut(x: Tensor) -> Tensor:
            x = x[:, :, self.rows]
            if order == "BSHD":
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            return x

        qkv = tuple(cut(x).requires_grad_(self.backward) for x in self.qkv)
        return qkv, cut(self.grad_out) if self.backward else None


def _timed(
    attention: Attention, qkv: tuple[Tensor, ...], grad_out: Tensor | None
) -> Callable[[], tuple[Tensor, ...]]:
    """The call whose time counts: the output, or the output and the gradients of q, k and v."""
    q, k, v = qkv

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attention(q, k, v),)

    def both() -> tuple[Tensor, ...]:
        out = attention(q, k, v)
        return (out.detach(), *torch.autograd.grad(out, qkv, grad_out))

    return forward if grad_out is None else both


def prepare(case: AttentionCase, asked: frozenset[str] | None = None) -> dict[str, Verdict]:
    """Ask every contender, or those that are `asked`, once; who is right on both ranks goes on stage."""
    warnings.simplefilter("ignore")  # the peers' own; they would tear the progress bar
    logging.disable(logging.WARNING)
    STAGE.clear()
    gc.unfreeze()
    gc.collect()
    tensors = AttentionTensors(case)
    contenders = (Peer(WEFT, "BHSD", lambda: weft_attention(case.tokens)), *peers())
    verdicts = {one.name: _ask(one, tensors) for one in contenders if asked is None or one.name in asked}
    STAGE[COMPUTE] = tensors.half_of_heads()
    STAGE[LINK] = exchange(case.nbytes)
    gc.collect()
    gc.freeze()  # so that the collection between rounds has little to look at
    return verdicts


def _ask(peer: Peer, tensors: AttentionTensors) -> Verdict:
    call = None
    try:
        call = _timed(peer.build(), *tensors.local(peer.order))
        verdict = Verdict(_error(call(), tensors.answer))
    except Exception as error:
        verdict = Verdict(None, f"{type(error).__name__}: {' '.join(str(error).split())[:80]}")
    verdicts: list[Verdict] = [verdict] * RANKS
    dist.all_gather_object(verdicts, verdict)
    worst = max(verdicts, key=lambda v: float("inf") if v.error is None else v.error)
    if call is not None and worst.correct:
        STAGE[peer.name] = call
    return worst


def _error(got: tuple[Tensor, ...], answer: list[Tensor]) -> float:
    """The largest error of the output and the gradients, each relative to its own norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, answer, strict=True))


# In the parent.


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - the command line's call
    report = Results()
    task = progress.add_task("checking the answers", total=None)
    checked = _check()
    progress.update(task, total=1, completed=1)
    with Pool(RANKS, threads=1, timeout=120.0) as pool:
        for case in QUICK if quick else FULL:
            task = progress.add_task(f"{case}: warming up", total=case.seconds)
            verdicts = checked[case.backward]
            verdicts = verdicts | pool.run(prepare, case, _correct(verdicts))[0]
            progress.update(task, description=str(case))
            rounds = followed(interleave(partial(pool.run, play), case.seconds), progress, task)
            row, lines = _summary(case, verdicts, rounds)
            report.rows.append(row)
            report.lines.extend(lines)
    return report


def _check() -> dict[bool, dict[str, Verdict]]:
    """By backward or not, what each contender answers on a short sequence.

    Who fails forward is not asked for gradients: an exception half way can stop both ranks.
    """
    verdicts: dict[bool, dict[str, Verdict]] = {}
    checked: dict[str, Verdict] = {}
    with Pool(RANKS, threads=1, timeout=120.0) as pool:
        for case in CHECKS:
            checked = checked | pool.run(prepare, case, _correct(checked) if checked else None)[0]
            verdicts[case.backward] = checked
    return verdicts


def _correct(verdicts: dict[str, Verdict]) -> frozenset[str]:
    return frozenset(name for name, verdict in verdicts.items() if verdict.correct)


def _summary(
    case: AttentionCase, verdicts: dict[str, Verdict], rounds: list[Round]
) -> tuple[Row, list[Line]]:
    used = undisturbed(rounds)
    wall = walls(used)
    cpu = {name: median(played.took[name].cpu * 1e3 for played in used) for name in wall}
    middle = {name: median(times) for name, times in wall.items()}
    ratio = {name: median_ratio(wall[name], wall[WEFT]) for name in wall} if WEFT in wall else {}
    rivals = [name for name in middle if name in verdicts and name != WEFT]
    fastest = min(rivals, key=lambda name: ratio.get(name, middle[name]), default="")
    best = ratio.get(fastest, 0.0)
    others = median(played.others for played in used)
    busy = f", but {others:.0%} of the machine to others" if others > QUIET else ""
    row = Row(
        case=str(case),
        measured=middle.get(WEFT),
        peer=middle.get(fastest),
        peer_name=fastest,
        limit=middle[COMPUTE] + middle[LINK],
        bar=f"peer/weft ≥ {case.bar} (is {best:.3f}{busy})",
        holds=best >= case.bar,
    )
    rate = case.nbytes / middle[LINK] / 1e6
    notes = {name: str(verdict) for name, verdict in verdicts.items()}
    notes[COMPUTE] = f"{len(used)} of {len(rounds)} rounds, {others:.0%} of the machine to others"
    notes[LINK] = f"{case.nbytes / 1e6:.1f} MB, {rate:.2f} GB/s"
    lines = [
        Line(
            case=str(case),
            name=name,
            measured=middle.get(name),
            quartiles=quartiles(wall[name]) if name in wall else None,
            cpu=cpu.get(name),
            ratio=ratio.get(name) if name in verdicts else None,
            note=note,
        )
        for name, note in notes.items()
    ]
    return row, sorted(lines, key=lambda line: (line.measured is None, line.name not in verdicts))


if __name__ == "__main__":
    main(measure, __doc__ or "")
