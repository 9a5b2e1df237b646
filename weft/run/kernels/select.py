"""Block selection: from scores of pairs of blocks to the tiles that sparse attention computes.

Nothing of size tokens × tokens is allocated, and scores of blocks only for some rows at a time. The scores
are products of proxies: means of a block's queries and keys, or of projections of them.

The selection depends only on the bits of the float32 scores: ties go to the lower index, and masses are
summed as integers. So ranks with equal scores select equal tiles, on any device. A score of -inf is never
selected, unless kept. NaN and +inf raise on a CPU; on a GPU, where a check would wait for it, they count as
-inf and as the largest number. Nothing is read back from a GPU, and nothing is copied to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, inf, nan

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.run.kernels.keep import Keep
from weft.run.kernels.proxies import Proxies, elements_per_chunk

MASS_UNIT = 2.0**40  # of a mass of 1; sums of 2^22 blocks fit into 63 bits
LARGEST = torch.finfo(torch.float32).max


def top_k(source: Proxies | Tensor, k: int | float, *, keep: Keep | None = None) -> Tensor:
    """Select the k best kv blocks of every (head, q block), by proxies or by scores [B or none, H, q, kv].

    k is a number of blocks (int) or a share of them (float from 0 to 1, rounded, at least one block if above
    0). Kept blocks count towards the budget: a row has max(k, its kept ones). A batch shares the selection,
    by the largest score of its samples. Return booleans [H, q blocks, kv blocks].
    """
    if isinstance(k, bool) or not k >= 0:
        raise InputError(f"k must be >= 0 blocks (int) or a share of them (float), got {k}.")
    source = _batched(source)
    if isinstance(k, float):
        k = max(int(k > 0), floor(_share(k, "k") * source.shape[3] + 0.5))
    return _select(source, keep or Keep(), k)


def top_p(source: Proxies | Tensor, p: float, *, keep: Keep | None = None) -> Tensor:
    """Select the fewest kv blocks of every (head, q block) that have a share p of its softmax over blocks.

    Kept blocks count towards p. 1 is every block, 0 only the kept ones. Masses are exact to 2^-40 of the
    row's best block. Return booleans [H, q blocks, kv blocks].
    """
    return _select(_batched(source), keep or Keep(), float(_share(p, "p")))


def _share(value: float, name: str) -> float:
    if not 0 <= value <= 1:
        raise InputError(f"{name} must be between 0 and 1, got {value}.")
    return value


def _batched(source: Proxies | Tensor) -> Proxies | Tensor:
    if isinstance(source, Proxies):
        return source
    scores = source[None] if source.ndim == 3 else source
    if scores.ndim != 4 or not scores.numel():
        raise InputError(
            f"Scores of shape {tuple(source.shape)} cannot be selected from.",
            hint="Expected [heads, q blocks, kv blocks], with a batch before them or not.",
        )
    return scores


@torch.no_grad()
def _select(source: Proxies | Tensor, keep: Keep, budget: int | float) -> Tensor:
    """Select a number of blocks (int) or a share of the mass (float)."""
    _, heads, rows, cols = source.shape
    active = torch.empty(heads, rows, cols, dtype=torch.bool, device=source.device)
    for some, span in _chunks(source):
        batch = (source.scores(some, span) if isinstance(source, Proxies) else source[:, some, span]).float()
        # The sum makes -0 and 0 a tie.
        scores = (batch[0] if len(batch) == 1 else batch.amax(0)) + 0.0
        kept = keep.tiles(span, rows, cols, source.device)
        if kept is not None:
            kept = kept.expand(scores.shape).reshape(-1, cols)
        active[some, span] = _select_rows(scores.reshape(-1, cols), kept, budget).view(scores.shape)
    return active


def _chunks(source: Proxies | Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield heads and q blocks, few enough that their scores are small."""
    batch, heads, rows, cols = source.shape
    fits = max(1, elements_per_chunk(source.device) // (batch * cols))
    some = max(1, fits // rows)
    for head in range(0, heads, some):
        for row in range(0, rows, min(fits, rows)):
            yield slice(head, min(head + some, heads)), slice(row, min(row + fits, rows))


def _select_rows(scores: Tensor, kept: Tensor | None, budget: int | float) -> Tensor:
    """Return which blocks of each row are selected; `scores` and `kept` are [rows, kv blocks]."""
    scores = _checked(scores)
    size, order = scores.shape[1], scores if kept is None else scores.masked_fill(kept, inf)
    rising = _rising(order)
    lowest, highest = (rising.new_full((len(rising), 1), each) for each in (-inf, inf))
    must = size - torch.searchsorted(rising, highest)
    can = size - torch.searchsorted(rising, lowest, right=True)
    if isinstance(budget, int):
        count = torch.full_like(can, min(budget, size))
    else:
        count = can if budget == 1 else _count_of_mass(rising, scores, kept, budget)
    count = count.clamp(min=must).clamp(max=can)
    cut, below = (rising.gather(1, (size - count - i).clamp(0, size - 1)) for i in (0, 1))
    # No score is >= NaN: an empty row.
    cut = cut.masked_fill_(count == 0, nan)
    active = order >= cut
    # Rows in which the budget ends among equal scores; on a GPU all rows, since finding some would wait.
    tied = ((cut == below) & (count < size))[:, 0].nonzero()[:, 0] if is_on_host(scores) else ...
    above, equal = order[tied] > cut[tied], order[tied] == cut[tied]
    left = count[tied] - above.sum(-1, keepdim=True)
    active[tied] = above | (equal & (equal.cumsum(-1) <= left))
    return active


def is_on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _checked(scores: Tensor) -> Tensor:
    if not is_on_host(scores):
        return scores.nan_to_num(-inf, LARGEST, -inf)
    if not bool((scores.amax(-1) < inf).all()):
        raise InputError("Scores of blocks must not be NaN or +inf.", hint="Check the proxies.")
    return scores


def _rising(scores: Tensor) -> Tensor:
    # numpy sorts rows with vector instructions: 15 times as fast as torch on a CPU.
    return torch.from_numpy(np.sort(scores.numpy())) if is_on_host(scores) else scores.sort(-1)[0]


def _count_of_mass(rising: Tensor, scores: Tensor, kept: Tensor | None, p: float) -> Tensor:
    """Return how many of the best blocks have a share p of the mass; kept ones (+inf) come first."""
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top == -inf, 0.0).double()
    mass = _masses(rising if kept is None else rising.masked_fill(rising == inf, -inf), top).cumsum(1)
    spent = torch.zeros_like(mass[:, -1:])
    if kept is not None and is_on_host(scores):  # few are kept; on a GPU finding them would wait
        row, col = kept.nonzero(as_tuple=True)
        spent.index_add_(0, row, _masses(scores[row, col, None], top[row]))
    elif kept is not None:
        spent = _masses(scores.where(kept, -inf), top).sum(1, keepdim=True)
    need = (p * (mass[:, -1:] + spent)).ceil().long() - spent
    # The worst blocks are dropped as long as the others have the mass.
    dropped = torch.searchsorted(mass, mass[:, -1:] - need, right=True)
    return torch.where(need > 0, rising.shape[1] - dropped, 0)


def _masses(scores: Tensor, top: Tensor) -> Tensor:
    """Return the masses as integers, whose sums do not depend on the order."""
    return scores.double().sub_(top).exp_().mul_(MASS_UNIT).round_().long()
