"""Selection next to the attention it feeds: 32k tokens, blocks of 64, 16 heads, one thread.

    python -m bench.selection [--quick] [--json FILE]

Every contender begins with the queries and keys and ends with the list of blocks. `limit` is the time
to read queries and keys once, which every pooling has to; the bar is 5 % of sparse attention at
density 0.1, whose time is that of torch's dense attention in the same rounds, scaled by its FLOP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.rows import (
    Line,
    Results,
    Round,
    Row,
    followed,
    interleave,
    main,
    quartiles,
    take_turns,
    undisturbed,
)
from weft.run.kernels.keep import Keep
from weft.run.kernels.proxies import Proxies, pool
from weft.run.kernels.select import top_k, top_p
from weft.run.kernels.tiles import Blocks

TOKENS, BLOCK, HEADS, DIM, DENSITY = 32768, 64, 16, 64, 0.1
SMALL = 4096, 2  # tokens and heads of the dense attention that is timed
SHARP = 20.5  # makes 0.9 of the softmax lie on a tenth of the blocks of this noise
RATE = 65e9  # FLOP/s of one thread of the machine the bar was set for
ALLOWED = 0.05
PEER, READ, DENSE = "torch.topk + booleans", "read q and k", "dense attention"


def contenders(q: Tensor, k: Tensor) -> dict[str, Callable[[], object]]:
    keep = Keep.of_tokens([(0, 256)], block_q=BLOCK)
    low_q, low_k = q.bfloat16(), k.bfloat16()
    small_q, small_k, small_v = torch.randn(3, 1, SMALL[1], SMALL[0], DIM)

    def proxies(q: Tensor, k: Tensor) -> Proxies:
        return Proxies(pool(q, BLOCK), pool(k, BLOCK), SHARP)

    def peer() -> Blocks:
        """The common way: all scores, torch.topk, a boolean per pair of blocks, its list."""
        pooled = [x.unflatten(2, (-1, BLOCK)).mean(3)[0] for x in (q, k)]
        scores = pooled[0] @ pooled[1].mT
        best = scores.topk(round(DENSITY * scores.shape[-1]), sorted=False)[1]
        return Blocks.of(torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, value=True))

    def listed(active: Tensor) -> Blocks:
        return Blocks.of(active.numpy())

    return {
        "top-k": lambda: listed(top_k(proxies(q, k), DENSITY)),
        "top-k, text and self kept": lambda: listed(top_k(proxies(q, k), DENSITY, keep=keep)),
        "top-k, bfloat16": lambda: listed(top_k(proxies(low_q, low_k), DENSITY)),
        "top-p": lambda: listed(top_p(proxies(q, k), 0.9)),
        "top-p, text and self kept": lambda: listed(top_p(proxies(q, k), 0.9, keep=keep)),
        PEER: peer,
        READ: lambda: (q.sum(), k.sum()),
        DENSE: lambda: scaled_dot_product_attention(small_q, small_k, small_v),
    }


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - bench.rows calls it so
    torch.set_num_threads(1)
    torch.manual_seed(0)
    calls = contenders(*torch.randn(2, 1, HEADS, TOKENS, DIM))
    seconds = 15 if quick else 60
    task = progress.add_task("selection", total=seconds)
    take_turns(calls, 0)
    rounds = interleave(lambda turn: [take_turns(calls, turn)], seconds)
    return report(undisturbed(followed(rounds, progress, task)))


def report(rounds: Sequence[Round]) -> Results:
    taken = {name: [1e3 * played.took[name].cpu for played in rounds] for name in rounds[0].took}
    work = HEADS * TOKENS**2 * DENSITY / (SMALL[1] * SMALL[0] ** 2)
    attention = median(taken[DENSE]) * work
    # The faster of the attention of this run and of the machine the bar was set for.
    bar = ALLOWED * min(attention, 4e3 * HEADS * TOKENS**2 * DIM * DENSITY / RATE)
    rows = Results()
    for name, times in taken.items():
        if name not in (PEER, READ, DENSE):
            typical = median(times)
            rows.rows.append(
                Row(
                    case=name,
                    measured=typical,
                    peer=median(taken[PEER]) if name == "top-k" else None,
                    peer_name=PEER if name == "top-k" else "",
                    limit=median(taken[READ]),
                    bar=f"< {bar:.0f} ms ({ALLOWED:.0%} of attention)",
                    holds=typical < bar,
                )
            )
        note = f"{median(times) / attention:.2%} of sparse attention, {median(times) / bar:.2f} of the bar"
        if name == DENSE:
            note = f"{SMALL[0]} tokens, {SMALL[1]} heads; sparse at full size: {attention:,.0f} ms"
        line = Line(
            case="one thread", name=name, measured=median(times), quartiles=quartiles(times), note=note
        )
        rows.lines.append(line)
    return rows


if __name__ == "__main__":
    main(measure, __doc__ or "")
