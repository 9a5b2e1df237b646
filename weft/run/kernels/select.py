"""Block selection: from scores of pairs of blocks to the list of tiles that sparse attention computes.

Nothing of size tokens × tokens is allocated, and scores of blocks only for some rows at a time. The scores
are products of proxies: means of a block's queries and keys, or of projections of them.

The selection depends only on the bits of the float32 scores: ties go to the lower index, and masses are
summed as integers. So ranks with equal scores select equal lists, and so do the two implementations. A score
of -inf is never selected, unless kept. NaN and +inf raise on a CPU; on a GPU, where a check would wait for
it, they count as -inf and as the largest number.

On a GPU with Triton nothing is read back, and nothing is copied to it but a budget of several numbers on the
host: a list has room for all that its budget allows.
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
from weft.core.install import install_command
from weft.run.kernels.budget import Budget, Keep
from weft.run.kernels.proxies import Proxies, ScoreSource, elements_per_chunk, score_source
from weft.run.kernels.tiles import Blocks

BACKENDS = ("auto", "torch", "triton")
MASS_UNIT = 2.0**40  # of a mass of 1; sums of 2^22 blocks fit into 63 bits
ALL_MASS = 1 << 62
LARGEST = torch.finfo(torch.float32).max


def top_k(
    source: Proxies | Tensor, k: int | float | Tensor, *, keep: Keep | None = None, backend: str = "auto"
) -> Blocks:
    """Select the k best kv blocks of every (head, q block), by proxies or by scores [B or none, H, q, kv].

    k is a number of blocks (int) or a share of them (float from 0 to 1, rounded, at least one block if above
    0): one number, or a tensor per head [H] or per row [H, q blocks]. Kept blocks count towards the budget:
    a row has max(k, its kept ones). A batch shares one list, by the largest score of its samples.
    """
    scores = score_source(source)
    return _select(scores, Budget.blocks(k, *scores.shape[1:]), keep or Keep(), backend)


def top_p(
    source: Proxies | Tensor,
    p: float | Tensor,
    *,
    keep: Keep | None = None,
    last: float = 1.0,
    backend: str = "auto",
) -> Blocks:
    """Select the fewest kv blocks of every (head, q block) that have a share p of its softmax over blocks.

    p is one number, per head [H] or per row [H, q blocks]; kept blocks count towards it. 1 is every block, 0
    only the kept ones. `last` is the share of the last block that has tokens, which weights its mass (score +
    log(last)). Masses are exact to 2^-40 of the row's best block.
    """
    if not 0 < last <= 1:
        raise InputError(f"last must be in (0, 1], got {last}.", hint="Pass tokens / block size.")
    scores = score_source(source)
    return _select(scores, Budget.shares(p, *scores.shape[1:]), keep or Keep(), backend, last)


def _choose(backend: str, device: torch.device) -> str:
    if backend not in BACKENDS:
        raise InputError(f"backend={backend!r} is unknown.", hint=f"Use one of {', '.join(BACKENDS)}.")
    is_installed = find_spec("triton") is not None
    if backend == "triton" and not is_installed:
        raise MissingError(
            "backend='triton' needs triton.",
            hint=f"Use backend='torch', or add it with: {install_command('gpu')}",
        )
    if backend == "auto":
        return "triton" if is_installed and device.type == "cuda" else "torch"
    return backend


@torch.no_grad()
def _select(source: ScoreSource, budget: Budget, keep: Keep, backend: str, last: float = 1.0) -> Blocks:
    _, heads, rows, cols = source.shape
    device = source.device
    allowed = budget.to(device)
    if _choose(backend, device) == "triton":
        from weft.run.kernels.triton_select import TritonSelection

        lists = TritonSelection(_room(budget, keep, heads, rows, cols), device)
    else:
        lists = _TorchSelection()
    counts: list[Tensor] = []
    for some, span in _chunks(source):
        batch = source.scores(some, span).float()
        # The sum copies, for the write below, and makes -0 and 0 a tie.
        scores = (batch[0] if len(batch) == 1 else batch.amax(0)) + 0.0
        if last < 1:
            scores[..., -1] += float(np.log(last))
        kept = keep.tiles(span, rows, cols, device)
        if kept is not None:
            kept = kept.expand(scores.shape).reshape(-1, cols)
        counts.append(lists.pick(ScoreRows.of(scores.reshape(-1, cols), kept), allowed.of(some, span)))
    starts = torch.zeros(heads * rows + 1, dtype=torch.int32, device=device)
    torch.cumsum(torch.cat(counts), 0, dtype=torch.int32, out=starts[1:])
    return Blocks(heads, rows, cols, starts, lists.kv())


def _room(budget: Budget, keep: Keep, heads: int, rows: int, cols: int) -> int:
    """Return an upper bound of the selected tiles."""
    most = heads * rows * cols
    if (allowed := budget.total(cols)) is not None:
        most = min(most, allowed + heads * keep.most(rows, cols))
    _check_count(most)
    return most


def _check_count(tiles: int) -> None:
    if tiles >= 1 << 31:
        raise InputError(f"{tiles} tiles exceed the range of int32.", hint="Use larger blocks.")


class _TorchSelection:
    """Select by torch; lists of chunks are concatenated at the end."""

    def __init__(self) -> None:
        self._columns: list[Tensor] = []

    def pick(self, rows: ScoreRows, allowed: Tensor) -> Tensor:
        count, columns = select_rows(rows, allowed)
        self._columns.append(columns)
        return count

    def kv(self) -> Tensor:
        _check_count(sum(columns.numel() for columns in self._columns))
        return torch.cat(self._columns)


def _chunks(source: ScoreSource) -> Iterator[tuple[slice, slice]]:
    """Yield heads and q blocks in the order of the list, few enough that their scores are small."""
    batch, heads, rows, cols = source.shape
    fits = max(1, elements_per_chunk(source.device) // (batch * cols))
    some = max(1, fits // rows)
    for head in range(0, heads, some):
        for row in range(0, rows, min(fits, rows)):
            yield slice(head, min(head + some, heads)), slice(row, min(row + fits, rows))


@dataclass(frozen=True, eq=False)
class ScoreRows:
    """Scores [rows, kv blocks] of one chunk, and which of them are kept."""

    scores: Tensor
    kept: Tensor | None
    top: Tensor
    """The best score of each row, 0 if all are -inf."""

    @staticmethod
    def of(scores: Tensor, kept: Tensor | None) -> ScoreRows:
        if scores.device.type != "cpu":
            scores = scores.nan_to_num(-inf, LARGEST, -inf)
        top = scores.amax(-1)
        if scores.device.type == "cpu" and not bool((top < inf).all()):
            raise InputError("Scores of blocks must not be NaN or +inf.", hint="Check the proxies.")
        return ScoreRows(scores, kept, top.masked_fill(top == -inf, 0.0))

    def mass(self) -> Tensor:
        """Return the mass of every block as integers, whose sums do not depend on the order."""
        return masses(self.scores, self.top[:, None])


def masses(scores: Tensor, top: Tensor) -> Tensor:
    return scores.double().sub_(top.double()).exp_().mul_(MASS_UNIT).round_().long()


def target_mass(p: Tensor, total: Tensor) -> Tensor:
    """Return the mass that is a share p of the total."""
    return (p * total).ceil().long().masked_fill(p >= 1, ALL_MASS)


def select_rows(rows: ScoreRows, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return (counts [rows], kv blocks of row after row), int32; `allowed` as in `Budget`."""
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
    # No score is >= NaN: an empty row.
    active = scores >= cut.masked_fill_((count == 0)[:, None], nan)
    tied = ((cut == below)[:, 0] & (count < size)).nonzero()[:, 0]
    if tied.numel():
        equal, above = scores[tied] == cut[tied], scores[tied] > cut[tied]
        left = count[tied] - above.sum(-1)
        active[tied] = above | (equal & (equal.cumsum(-1) <= left[:, None]))
    return count.int(), (_where(active.flatten()) % size).int()


def _reach(rising: Tensor, rows: ScoreRows, p: Tensor) -> Tensor:
    """Return how many of the best blocks have a share p of the mass; kept ones (+inf) come first."""
    spent = torch.zeros_like(p, dtype=torch.int64)
    if rows.kept is not None:
        row, col = rows.kept.nonzero(as_tuple=True)
        spent.index_add_(0, row, masses(rows.scores[row, col], rows.top[row]))
        rising = rising.masked_fill(rising == inf, -inf)
    mass = masses(rising, rows.top[:, None]).cumsum(1)
    need = target_mass(p, mass[:, -1] + spent) - spent
    # The worst blocks are dropped as long as the others have the mass.
    dropped = torch.searchsorted(mass, mass[:, -1:] - need[:, None], right=True)[:, 0]
    return torch.where(need > 0, rising.shape[1] - dropped, 0)


def _rising(scores: Tensor) -> Tensor:
    # numpy sorts rows with vector instructions: 15 times as fast as torch on a CPU.
    return torch.from_numpy(np.sort(scores.numpy())) if scores.device.type == "cpu" else scores.sort(-1)[0]


def _where(active: Tensor) -> Tensor:
    if active.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(active.numpy()))
    return active.nonzero()[:, 0]
