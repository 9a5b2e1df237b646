"""Dense attention over two ranks: weft, yunchang, Diffusers and torch on the same tensors.

    python -m bench.attention [--quick] [--json FILE]

Two processes with one thread each, float32, 8 heads of 64. Before any clock starts, each contender
is checked against dense attention; who raises, or is more than 1e-4 off, is listed as such and not
timed. Then rounds: the ranks meet at a barrier, each times the contender until it is done there,
and the slower rank counts. A ratio is the median over rounds of peer / weft in the same round, and
the fastest peer is the one with the lowest: the hardest to beat.

The limit is what two ranks cannot do without: SDPA on half of the heads, while the other rank is
busy with the other half, plus the bytes of Ulysses at the rate of the gloo link, both measured as
contenders of the same rounds. Each contender gets q, k, v in the memory order it is written for.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from bench.links import exchange, ulysses_bytes
from bench.peers import Attention, Peer, peers
from bench.rows import Line, Report, Row, Took, main, median_ratio, quartiles, take_turns
from weft.run.pool import Pool

RANKS, HEADS, DIM = 2, 8, 64
TOLERANCE = 1e-4
BAR = 0.98
MIN_ROUNDS, MAX_ROUNDS = 3, 60
WEFT, COMPUTE, LINK = "weft", "limit: SDPA on half the heads", "limit: link"

# Seconds for the rounds of (forward, forward + backward), by tokens.
FULL = {2048: (15, 20), 4096: (35, 45), 8192: (70, 90)}
QUICK = {2048: (5, 6), 4096: (7, 9)}


@dataclass(frozen=True)
class Case:
    tokens: int
    backward: bool

    def __str__(self) -> str:
        return f"S={self.tokens} {'forward + backward' if self.backward else 'forward'}"

    @property
    def nbytes(self) -> int:
        return ulysses_bytes(self.tokens, HEADS, DIM, RANKS, backward=self.backward)


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


# On a rank. The pool calls `prepare` once a case and `play` once a round; _stage lives in between.

_stage: dict[str, Callable[[], object]] = {}


class Tensors:
    """The same q, k, v and output gradient on both ranks, and dense attention's answer to them."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.tokens)
        shape = (1, HEADS, case.tokens, DIM)
        *self.qkv, self.grad_out = (torch.randn(shape) for _ in range(4))
        self.backward = case.backward
        self.rows = torch.arange(case.tokens).chunk(RANKS)[dist.get_rank()]
        half = self.half_of_heads()()
        parts = [[torch.empty_like(part) for _ in range(RANKS)] for part in half]
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


def prepare(case: Case) -> dict[str, Verdict]:
    """Ask every contender once; those that are right on both ranks go on stage."""
    warnings.simplefilter("ignore")  # the peers' own; they would tear the progress bar
    logging.disable(logging.WARNING)
    _stage.clear()
    gc.collect()
    tensors = Tensors(case)
    verdicts: dict[str, Verdict] = {}
    for peer in (Peer(WEFT, "BHSD", lambda: weft_attention(case.tokens)), *peers()):
        verdicts[peer.name] = _ask(peer, tensors)
    _stage[COMPUTE] = tensors.half_of_heads()
    _stage[LINK] = exchange(case.nbytes)
    gc.collect()
    gc.freeze()  # so that the collection between rounds has little to look at
    return verdicts


def _ask(peer: Peer, tensors: Tensors) -> Verdict:
    found: list[Verdict | None] = [None] * RANKS
    call = None
    try:
        attention = peer.build()
        qkv, grad_out = tensors.local(peer.order)
        verdict = Verdict(_error(_timed(attention, qkv, None)(), tensors.answer))
        call = _timed(attention, qkv, grad_out)
        # One that is wrong is not asked for gradients: half-way exceptions can stop both ranks.
        if tensors.backward and verdict.correct:
            verdict = Verdict(_error(call(), tensors.answer))
    except Exception as error:
        said = " ".join(str(error).split())
        verdict = Verdict(None, f"{type(error).__name__}: {said[:90]}")
    dist.all_gather_object(found, verdict)
    worst = max((v for v in found if v), key=lambda v: float("inf") if v.error is None else v.error)
    if worst.correct and call is not None:
        _stage[peer.name] = call
    return worst


def _error(got: tuple[Tensor, ...], answer: list[Tensor]) -> float:
    """The largest error of the output and the gradients, each relative to its own norm."""
    pairs = zip(got, answer, strict=False)  # the answer has gradients that `got` may lack
    return max(float((a.detach() - b).norm() / b.norm()) for a, b in pairs)


def play(turn: int) -> dict[str, Took]:
    return take_turns(_stage, turn, before=dist.barrier)


# In the parent.


def measure(quick: bool, progress: Progress) -> Report:  # noqa: FBT001 - the command line's call
    report = Report()
    with Pool(RANKS, threads=1, timeout=120.0) as pool:
        for tokens, seconds in (QUICK if quick else FULL).items():
            for backward in (False, True):
                case = Case(tokens, backward)
                task = progress.add_task(f"{case}: checking the answers", total=seconds[backward])
                verdicts = pool.run(prepare, case)[0]
                progress.update(task, description=str(case))
                rounds = []
                for spent, took in _rounds(pool, seconds[backward]):
                    rounds.append(took)
                    progress.update(task, completed=spent)
                row, lines = _summary(case, verdicts, rounds)
                report.rows.append(row)
                report.lines.extend(lines)
    return report


def _rounds(pool: Pool, seconds: float) -> Iterator[tuple[float, dict[str, Took]]]:
    """Rounds until the time is spent, after one that is thrown away; the slower rank counts."""
    pool.run(play, 0)
    began = time.monotonic()
    for turn in range(MAX_ROUNDS):
        ranks = pool.run(play, turn)
        slower = {name: Took(*(max(took[name][i] for took in ranks) for i in range(2))) for name in ranks[0]}
        spent = time.monotonic() - began
        yield spent, slower
        if turn + 1 >= MIN_ROUNDS and spent * (turn + 2) / (turn + 1) > seconds:
            return


def _summary(
    case: Case, verdicts: dict[str, Verdict], rounds: list[dict[str, Took]]
) -> tuple[Row, list[Line]]:
    wall = {name: [took[name].wall * 1e3 for took in rounds] for name in rounds[0]}
    cpu = {name: statistics.median(took[name].cpu * 1e3 for took in rounds) for name in wall}
    middle = {name: statistics.median(times) for name, times in wall.items()}
    ratio = {name: median_ratio(wall[name], wall[WEFT]) for name in wall} if WEFT in wall else {}
    rivals = [name for name in middle if name in verdicts and name != WEFT]
    fastest = min(rivals, key=lambda name: ratio.get(name, middle[name]))
    row = Row(
        case=str(case),
        measured=middle.get(WEFT),
        unit="ms",
        peer=middle[fastest],
        peer_name=fastest,
        limit=middle[COMPUTE] + middle[LINK],
        bar=f"{ratio.get(fastest, 0.0):.3f} ≥ {BAR} of the fastest peer",
        holds=ratio.get(fastest, 0.0) >= BAR,
    )
    rate = case.nbytes / middle[LINK] / 1e6
    notes = {name: str(verdict) for name, verdict in verdicts.items()}
    notes |= {COMPUTE: f"{len(rounds)} rounds", LINK: f"{case.nbytes / 1e6:.1f} MB, {rate:.2f} GB/s"}
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
