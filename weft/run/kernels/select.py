"""Selection: from scores of pairs of blocks to the list of tiles that sparse attention computes.

Nothing as large as tokens × tokens is made, and scores of blocks only for some rows at a time. The
scores come from proxies: means of a block's queries and keys or of projections of them.

What is chosen depends on nothing but the bits of the float32 scores: equal scores go to the lower
index, and masses are summed as integers. So ranks with equal scores choose equal lists, and so do
the two implementations. A score of -inf is never chosen, unless kept. NaN and +inf are refused on a
CPU; on a GPU, where a look at them would wait for it, they count as -inf and as the largest number.

On a GPU with Triton nothing is read back, and nothing is copied to it but a budget of several numbers
that lies on the host: a list has room for all that its budget allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf, nan

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError, MissingError
from weft.run.kernels.budget import Budget, Keep
from weft.run.kernels.proxies import Proxies, Source, at_a_time, source_of
from weft.run.kernels.tiles import Blocks

BACKENDS = ("auto", "torch", "triton")
UNIT = 2.0**40  # of a mass of 1; sums of 2^22 blocks fit into 63 bits
EVERYTHING = 1 << 62
LARGEST = torch.finfo(torch.float32).max


def top_k(
    source: Proxies | Tensor, k: int | float | Tensor, *, keep: Keep | None = None, backend: str = "auto"
) -> Blocks:
    """The k best kv blocks of every (head, q block), of proxies or of scores [B or none, H, q, kv].

    k is a number of blocks (int) or a share of them (float from 0 to 1, rounded, at least one block
    if above 0), for all or as a tensor per head [H] or per row [H, q blocks]. Kept blocks count
    inside the budget: a row has max(k, its kept ones). A batch shares one list, by the largest score
    of its samples.
    """
    found = source_of(source)
    counts = Budget.blocks(k, *found.shape[1:])
    return _select(found, counts, keep or Keep(), backend)


def top_p(
    source: Proxies | Tensor,
    p: float | Tensor,
    *,
    keep: Keep | None = None,
    last: float = 1.0,
    backend: str = "auto",
) -> Blocks:
    """The fewest kv blocks of every (head, q block) that have a share p of its softmax over blocks.

    p is for all, per head [H] or per row [H, q blocks]; kept blocks count towards it. 1 is every
    block, 0 none but the kept. `last` is the part of the last block that has tokens: its mass is
    weighted by it (score + log(last)). Masses are exact to 2^-40 of the row's best block.
    """
    if not 0 < last <= 1:
        raise InputError(f"last={last} is no part of a block.", hint="Give tokens / block size.")
    found = source_of(source)
    shares = Budget.shares(p, *found.shape[1:])
    return _select(found, shares, keep or Keep(), backend, last)


def _choose(backend: str, device: torch.device) -> str:
    if backend not in BACKENDS:
        raise InputError(f"backend={backend!r} is unknown.", hint=f"Use one of {', '.join(BACKENDS)}.")
    there = find_spec("triton") is not None
    if backend == "triton" and not there:
        raise MissingError(
            "backend='triton' needs Triton.", hint="pip install triton, or use backend='torch'."
        )
    if backend == "auto":
        return "triton" if there and device.type == "cuda" else "torch"
    return backend


@torch.no_grad()
def _select(source: Source, budget: Budget, keep: Keep, backend: str, last: float = 1.0) -> Blocks:
    _, heads, rows, cols = source.shape
    device = source.device
    allowed = budget.to(device)
    if _choose(backend, device) == "triton":
        from weft.run.kernels.triton_select import Writer

        lists = Writer(_room(budget, keep, heads, rows, cols), device)
    else:
        lists = _Joined()
    counts: list[Tensor] = []
    for some, part in _chunks(source):
        found = source.scores(some, part).float()
        # A copy, of which a part is changed; the sum makes -0 and 0 one tie.
        scores = (found[0] if len(found) == 1 else found.amax(0)) + 0.0
        if last < 1:
            scores[..., -1] += float(np.log(last))
        kept = keep.tiles(part, rows, cols, device)
        if kept is not None:
            kept = kept.expand(scores.shape).reshape(-1, cols)
        counts.append(lists.pick(Rows.of(scores.reshape(-1, cols), kept), allowed.of(some, part)))
    starts = torch.zeros(heads * rows + 1, dtype=torch.int32, device=device)
    torch.cumsum(torch.cat(counts), 0, dtype=torch.int32, out=starts[1:])
    return Blocks(heads, rows, cols, starts, lists.kv())


def _room(budget: Budget, keep: Keep, heads: int, rows: int, cols: int) -> int:
    """How many tiles a selection may have."""
    most = heads * rows * cols
    if (allowed := budget.total(cols)) is not None:
        most = min(most, allowed + heads * keep.most(rows, cols))
    _check_count(most)
    return most


def _check_count(tiles: int) -> None:
    if tiles >= 1 << 31:
        raise InputError(f"{tiles} tiles are more than an int32 can count.", hint="Take larger blocks.")


class _Joined:
    """Lists of chunks, joined when all are there."""

    def __init__(self) -> None:
        self._columns: list[Tensor] = []

    def pick(self, rows: Rows, allowed: Tensor) -> Tensor:
        count, columns = pick_rows(rows, allowed)
        self._columns.append(columns)
        return count

    def kv(self) -> Tensor:
        _check_count(sum(columns.numel() for columns in self._columns))
        return torch.cat(self._columns)


def _chunks(source: Source) -> Iterator[tuple[slice, slice]]:
    """Heads and q blocks in the order of the list, few enough that their scores are small."""
    batch, heads, rows, cols = source.shape
    fits = max(1, at_a_time(source.device) // (batch * cols))
    some = max(1, fits // rows)
    for head in range(0, heads, some):
        for row in range(0, rows, min(fits, rows)):
            yield slice(head, min(head + some, heads)), slice(row, min(row + fits, rows))


@dataclass(frozen=True, eq=False)
class Rows:
    """Scores [rows, kv blocks] of one chunk, and what is kept of them."""

    scores: Tensor
    kept: Tensor | None
    top: Tensor
    """The best score of each row, 0 where it has none."""

    @staticmethod
    def of(scores: Tensor, kept: Tensor | None) -> Rows:
        if scores.device.type != "cpu":
            scores = scores.nan_to_num(-inf, LARGEST, -inf)
        top = scores.amax(-1)
        if scores.device.type == "cpu" and not bool((top < inf).all()):
            raise InputError(
                "Scores of blocks have NaN or +inf.", hint="Look at the proxies they are made of."
            )
        return Rows(scores, kept, top.masked_fill(top == -inf, 0.0))

    def mass(self) -> Tensor:
        """Of every block, as integers: their sums do not depend on an order."""
        return masses(self.scores, self.top[:, None])


def masses(scores: Tensor, top: Tensor) -> Tensor:
    return scores.double().sub_(top.double()).exp_().mul_(UNIT).round_().long()


def wanted(p: Tensor, total: Tensor) -> Tensor:
    """The mass that is a share p of the total."""
    return (p * total).ceil().long().masked_fill(p >= 1, EVERYTHING)


def pick_rows(rows: Rows, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """(how many [rows], which kv blocks, row after row), int32; `allowed` as in `Budget`."""
    scores, kept = rows.scores, rows.kept
    size = scores.shape[1]
    must = torch.zeros_like(allowed, dtype=torch.int64)
    if kept is not None:
        must = kept.sum(-1, dtype=torch.int32).long()
        scores = scores.masked_fill(kept, inf)
    rising = _rising(scores)
    can = size - torch.searchsorted(rising, torch.full_like(rising[:, :1], -inf), right=True)[:, 0]
    count = _reach(rising, rows, allowed) if allowed.is_floating_point() else allowed
    count = count.clamp(min=must).clamp(max=can)
    cut, below = (rising.gather(1, (size - count - i).clamp(0, size - 1)[:, None]) for i in (0, 1))
    # Nothing compares with NaN: an empty row.
    active = scores >= cut.masked_fill_((count == 0)[:, None], nan)
    tied = ((cut == below)[:, 0] & (count < size)).nonzero()[:, 0]
    if tied.numel():
        equal, above = scores[tied] == cut[tied], scores[tied] > cut[tied]
        left = count[tied] - above.sum(-1)
        active[tied] = above | (equal & (equal.cumsum(-1) <= left[:, None]))
    return count.int(), (_where(active.flatten()) % size).int()


def _reach(rising: Tensor, rows: Rows, p: Tensor) -> Tensor:
    """How many of the best blocks have a share p of the mass, the kept ones (+inf) being first."""
    spent = torch.zeros_like(p, dtype=torch.int64)
    if rows.kept is not None:
        row, col = rows.kept.nonzero(as_tuple=True)
        spent.index_add_(0, row, masses(rows.scores[row, col], rows.top[row]))
        rising = rising.masked_fill(rising == inf, -inf)
    mass = masses(rising, rows.top[:, None]).cumsum(1)
    need = wanted(p, mass[:, -1] + spent) - spent
    # The worst blocks are dropped as long as what they have together can be spared.
    dropped = torch.searchsorted(mass, mass[:, -1:] - need[:, None], right=True)[:, 0]
    return torch.where(need > 0, rising.shape[1] - dropped, 0)


def _rising(scores: Tensor) -> Tensor:
    # numpy sorts rows with vector instructions: 15 times as fast as torch on a CPU.
    return torch.from_numpy(np.sort(scores.numpy())) if scores.device.type == "cpu" else scores.sort(-1)[0]


def _where(active: Tensor) -> Tensor:
    if active.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(active.numpy()))
    return active.nonzero()[:, 0]
