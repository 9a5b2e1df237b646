"""Selection against one made by hand: what is chosen, in which order ties go, what is always kept."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, fsum, inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.run.hot_path import fake_cuda
from weft.core.errors import InputError
from weft.core.voxels import Voxels
from weft.run.kernels import select
from weft.run.kernels.keep import Keep
from weft.run.kernels.proxies import Proxies, pool
from weft.run.kernels.select import top_k, top_p


def make_scores(seed: int, kind: str, shape: tuple[int, ...]) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random) * 2
    if kind == "ties":
        x = x.round()  # zeros of both signs among them
    if kind == "equal":
        x = torch.zeros(shape)
    if kind == "signs":
        x = torch.zeros(shape).copysign(x)
    if kind == "closed":
        x[torch.rand(shape, generator=random) < 0.4] = -inf
    if kind == "far":
        x = x * 40
    return x


kinds = st.sampled_from(("any", "ties", "equal", "signs", "closed", "far"))
shapes = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 24))
scores_of = st.builds(make_scores, st.integers(0, 2**16), kinds, shapes)


@st.composite
def keeps(draw: st.DrawFn, rows: int, cols: int) -> Keep:
    def ranges(size: int) -> tuple[tuple[int, int], ...]:
        ends = st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda x: (min(x), max(x)))
        return tuple(draw(st.lists(ends, max_size=2)))

    own = draw(st.sampled_from((None, (1, 1), (8, 4), (4, 8), (3, 5))))
    return Keep(ranges(cols) if draw(st.booleans()) else (), ranges(rows) if draw(st.booleans()) else (), own)


def is_kept(keep: Keep, row: int, col: int) -> bool:
    if any(start <= col < stop for start, stop in keep.kv) or any(a <= row < b for a, b in keep.q):
        return True
    if keep.own is None:
        return False
    q, k = keep.own
    return bool(set(range(row * q, row * q + q)) & set(range(col * k, col * k + k)))


def lists(active: Tensor) -> list[list[list[int]]]:
    assert active.dtype == torch.bool
    return [[row.nonzero()[:, 0].tolist() for row in head] for head in active]


def ranked(row: list[float], keep: Keep, i: int) -> tuple[list[int], int]:
    """(columns from the first to be chosen to the last, how many of them are kept)."""
    kept = [j for j in range(len(row)) if is_kept(keep, i, j)]
    rest = [j for j in range(len(row)) if j not in kept and row[j] > -inf]
    return kept + sorted(rest, key=lambda j: (-row[j], j)), len(kept)


def naive_k(scores: Tensor, k: int, keep: Keep) -> list[list[list[int]]]:
    def one(row: list[float], i: int) -> list[int]:
        order, kept = ranked(row, keep, i)
        return sorted(order[: max(k, kept)])

    return [[one(row, i) for i, row in enumerate(head)] for head in scores.tolist()]


def enough(row: list[float], order: list[int], kept: int, p: float) -> int:
    """How many of the first columns have p of the mass."""
    if p >= 1:
        return len(order)
    top = max((x for x in row if x > -inf), default=0.0)
    mass = [exp(x - top) for x in row]
    count = kept
    while count < len(order) and fsum(mass[j] for j in order[:count]) < p * fsum(mass):
        count += 1
    return count


@given(scores_of, st.data())
def test_top_k_is_the_best_k_ties_to_the_lower_index(scores: Tensor, data: st.DataObject) -> None:
    _, rows, cols = scores.shape
    keep = data.draw(keeps(rows, cols))
    k = data.draw(st.integers(0, cols + 2))
    assert lists(top_k(scores, k, keep=keep)) == naive_k(scores, k, keep)


@given(scores_of, st.data())
def test_top_p_is_the_fewest_that_have_the_mass(scores: Tensor, data: st.DataObject) -> None:
    _, rows, cols = scores.shape
    keep = data.draw(keeps(rows, cols))
    shares = st.sampled_from((0.0, 1e-6, 0.1, 0.25, 0.5, 0.9, 0.99, 1.0)) | st.floats(0, 1)
    share = data.draw(shares)
    found = lists(top_p(scores, share, keep=keep))
    for h, head in enumerate(scores.tolist()):
        for i, row in enumerate(head):
            order, kept = ranked(row, keep, i)
            # Masses are exact to 2^-40 of the best block: at the very edge both answers are right.
            fewest = enough(row, order, kept, share - 1e-10)
            most = len(order) if share >= 1 else enough(row, order, kept, min(share + 1e-10, 1 - 1e-15))
            assert fewest <= len(found[h][i]) <= max(fewest, most)
            assert found[h][i] == sorted(order[: len(found[h][i])])


def test_shares_round_and_are_not_numbers_of_blocks() -> None:
    scores = torch.arange(60.0).view(2, 3, 10)
    for k, count in ((1, 1), (1.0, 10), (0.01, 1), (0.0, 0), (0.3, 3), (0.26, 3), (0.25, 3), (0.24, 2)):
        assert top_k(scores, k).sum(-1).tolist() == [[count] * 3] * 2


def test_a_share_of_equal_masses_is_met_exactly() -> None:
    scores = torch.zeros(1, 1, 8)
    for p, count in ((0.125, 1), (0.25, 2), (0.5, 4), (0.500001, 5), (0.875, 7), (0.9, 8)):
        assert lists(top_p(scores, p)) == [[list(range(count))]]
        kept = top_p(scores, p, keep=Keep(kv=((7, 8),)))
        assert lists(kept) == [[[*range(count - 1), 7]]]


def test_a_budget_of_nothing_leaves_the_kept_ones() -> None:
    scores = torch.randn(2, 4, 4)
    keep = Keep(kv=((0, 1),), own=(1, 1))
    wanted = [[[0], [0, 1], [0, 2], [0, 3]]] * 2
    assert lists(top_k(scores, 0, keep=keep)) == lists(top_p(scores, 0.0, keep=keep)) == wanted
    closed = torch.full_like(scores, -inf)
    assert lists(top_k(closed, 3, keep=keep)) == lists(top_p(closed, 0.9, keep=keep)) == wanted
    assert lists(top_p(closed, 0.9)) == [[[]] * 4] * 2


def test_text_of_voxels_is_kept_by_its_tokens() -> None:
    v = Voxels((4, 4, 4), (2, 2, 2), prefix=5, suffix=9)
    keep = Keep.of_tokens(v.text, block_q=16, block_k=8, own=False)
    assert keep == Keep(kv=((0, 1), (8, 10)), q=((0, 1), (4, 5)))
    active = top_k(torch.randn(1, 5, 10), 0, keep=keep)[0]
    assert active[[0, 4]].all()
    assert active[1:4].nonzero()[:, 1].view(3, -1).tolist() == [[0, 8, 9]] * 3


@given(st.integers(0, 999), kinds, st.integers(1, 40), st.sampled_from((0.25, 0.7, 3)))
@settings(max_examples=30)
def test_chunks_change_nothing_and_stay_small(seed: int, kind: str, held: int, amount: float) -> None:
    scores = make_scores(seed, kind, (3, 5, 7))
    keep = Keep(kv=((6, 7),), q=((3, 4),), own=(1, 1))
    choose = top_p if amount == 0.7 else top_k
    whole = choose(scores, amount, keep=keep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "elements_per_chunk", lambda _: held)
        sizes = [(h.stop - h.start) * (r.stop - r.start) * 7 for h, r in select._chunks(scores[None])]
        assert max(sizes) <= max(held, 7)
        part = choose(scores, amount, keep=keep)
    assert torch.equal(whole, part)


def test_proxies_give_the_scores_of_their_products() -> None:
    random = torch.Generator().manual_seed(1)
    # Small whole numbers: products are exact in any order of summation.
    q, k = (torch.randint(-4, 5, (2, h, n, 8), generator=random).float() for h, n in ((6, 5), (6, 9)))
    scores = 0.25 * torch.einsum("bhqr,bhkr->bhqk", q, k)
    for amount, choose in ((3, top_k), (0.8, top_p)):
        expected = lists(choose(scores.amax(0), amount))
        assert lists(choose(Proxies(q, k, 0.25), amount)) == lists(choose(scores, amount)) == expected
    assert lists(top_p(Proxies(q, k), 0.5)) == lists(top_p(Proxies(q, k, 8**-0.5), 0.5))


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from(("float64", "float32", "bfloat16")),
)
def test_pool_is_the_mean_of_what_a_block_has(length: int, block: int, dtype: str) -> None:
    x = torch.randn(2, length, 3, 4).to(getattr(torch, dtype)).transpose(1, 2)
    means = pool(x, block)
    expected = torch.stack([part.double().mean(2) for part in x.split(block, 2)], 2)
    assert means.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    torch.testing.assert_close(means.double(), expected, rtol=1e-5, atol=1e-6)


def test_large_rows_of_the_real_size_agree_with_torch() -> None:
    scores = torch.randn(2, 64, 512).bfloat16().float()  # bfloat16 makes many ties
    found = top_k(scores, 0.1)
    best = scores.sort(dim=-1, descending=True, stable=True)[1][..., :51]
    assert torch.equal(found, torch.zeros_like(found).scatter_(-1, best, value=True))


def test_what_cannot_be_chosen_from_is_refused() -> None:
    scores = torch.zeros(1, 2, 3)
    bad = scores.clone()
    for value in (float("nan"), inf):
        bad[0, 1, 1] = value
        for choose in (top_k, top_p):
            with pytest.raises(InputError, match="NaN or"):
                choose(bad, 0.5)
    refused = [
        (lambda: top_k(scores, -1), "k must be >= 0 blocks"),
        (lambda: top_k(scores, True), "k must be >= 0 blocks"),
        (lambda: top_k(scores, 1.5), "between 0 and 1"),
        (lambda: top_p(scores, -0.1), "between 0 and 1"),
        (lambda: top_p(scores, float("nan")), "between 0 and 1"),
        (lambda: top_k(scores, 1, keep=Keep(kv=((2, 4),))), "only 3"),
        (lambda: Keep(kv=((2, 1),)), "0 <= start <= stop"),
        (lambda: Keep(own=(0, 1)), "own must be"),
        (lambda: top_k(scores[0], 1), "cannot be selected from"),
        (lambda: Proxies(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)), "do not fit"),
        (lambda: pool(torch.zeros(3, 4), 0), "block must be >= 1"),
    ]
    for call, message in refused:
        with pytest.raises(InputError, match=message):
            call()


def test_a_gpu_is_not_waited_for() -> None:
    with fake_cuda() as seen:
        q, k = (torch.empty(2, 4, 2000, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        keep = Keep.of_tokens([(1990, 2000)], block_q=64)
        seen.clear()
        proxies = Proxies(pool(q, 64), pool(k, 64))
        found = [
            top_k(proxies, 0.2, keep=keep),
            top_k(proxies, 5),
            top_p(proxies, 0.9, keep=keep),
            top_p(proxies, 0.9),
        ]
        assert seen.names and not seen.faults
    assert all(tiles.shape == (4, 32, 32) and tiles.device.type == "cuda" for tiles in found)


def elsewhere(kernel: Callable[..., Any], *operands: Any) -> Any:
    """Run a function of `select` by its way for GPUs, on tensors of this CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "is_on_host", lambda _: False)
        return kernel(*operands)


@given(scores_of, st.integers(0, 26) | st.floats(0, 1), st.booleans())
def test_the_way_of_a_gpu_selects_the_same(scores: Tensor, budget: int | float, keeping: bool) -> None:
    rows = scores.flatten(0, 1)
    kept = torch.zeros_like(rows, dtype=torch.bool)
    kept[::2, -1] = kept[1:, 0] = True
    operands = rows, kept if keeping else None, budget
    assert torch.equal(elsewhere(select._select_rows, *operands), select._select_rows(*operands))


def test_a_gpu_takes_scores_that_a_cpu_refuses() -> None:
    scores = torch.tensor([[1.0, float("nan"), inf, 2.0]])
    assert elsewhere(select._checked, scores).tolist() == [[1.0, -inf, select.LARGEST, 2.0]]
