"""Selection against lists made by hand: what is chosen, in which order ties go, what is always kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import pairwise
from math import exp, fsum, inf
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.run.hot_path import fake_cuda
from weft.core.errors import InputError
from weft.core.voxels import Voxels
from weft.run.kernels import select
from weft.run.kernels.budget import Keep
from weft.run.kernels.proxies import Proxies, pool
from weft.run.kernels.select import top_k, top_p
from weft.run.kernels.tiles import Blocks

ROOT = Path(__file__).parents[2]
without_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


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


def lists(blocks: Blocks) -> list[list[list[int]]]:
    found = [blocks.kv[a:b].tolist() for a, b in pairwise(blocks.starts.tolist())]
    assert blocks.starts.dtype == blocks.kv.dtype == torch.int32
    return [found[h * blocks.q_blocks : (h + 1) * blocks.q_blocks] for h in range(blocks.heads)]


def ranked(row: list[float], keep: Keep, i: int) -> tuple[list[int], int]:
    """(columns from the first to be chosen to the last, how many of them are kept)."""
    kept = [j for j in range(len(row)) if is_kept(keep, i, j)]
    rest = [j for j in range(len(row)) if j not in kept and row[j] > -inf]
    return kept + sorted(rest, key=lambda j: (-row[j], j)), len(kept)


def naive_k(scores: Tensor, k: Tensor, keep: Keep) -> list[list[list[int]]]:
    def one(row: list[float], i: int, budget: int) -> list[int]:
        order, kept = ranked(row, keep, i)
        return sorted(order[: max(budget, kept)])

    return [
        [one(row, i, int(k[h, i])) for i, row in enumerate(head)] for h, head in enumerate(scores.tolist())
    ]


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
    heads, rows, cols = scores.shape
    keep = data.draw(keeps(rows, cols))
    shape = data.draw(st.sampled_from(((), (heads,), (heads, rows))))
    k = torch.from_numpy(np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, cols + 2, shape))
    found = top_k(scores, int(k) if not shape else k, keep=keep)
    each = (k[:, None] if len(shape) == 1 else k).expand(heads, rows)
    assert lists(found) == naive_k(scores, each, keep)


@given(scores_of, st.data())
def test_top_p_is_the_fewest_that_have_the_mass(scores: Tensor, data: st.DataObject) -> None:
    heads, rows, cols = scores.shape
    keep = data.draw(keeps(rows, cols))
    last = data.draw(st.sampled_from((1.0, 0.5, 0.01)))
    shares = st.sampled_from((0.0, 1e-6, 0.1, 0.25, 0.5, 0.9, 0.99, 1.0)) | st.floats(0, 1)
    p = torch.tensor(data.draw(st.lists(shares, min_size=heads, max_size=heads)), dtype=torch.float64)
    found = lists(top_p(scores, p, keep=keep, last=last))
    weighted = scores.clone()
    if last < 1:
        weighted[..., -1] += float(np.log(last))
    for h, head in enumerate(weighted.tolist()):
        for i, row in enumerate(head):
            order, kept = ranked(row, keep, i)
            share = float(p[h])
            # Masses are exact to 2^-40 of the best block: at the very edge both answers are right.
            fewest = enough(row, order, kept, share - 1e-10)
            most = len(order) if share >= 1 else enough(row, order, kept, min(share + 1e-10, 1 - 1e-15))
            assert fewest <= len(found[h][i]) <= max(fewest, most)
            assert found[h][i] == sorted(order[: len(found[h][i])])


def test_shares_round_and_are_not_numbers_of_blocks() -> None:
    scores = torch.arange(60.0).view(2, 3, 10)
    assert top_k(scores, 1).starts.diff().tolist() == [1] * 6
    assert top_k(scores, 1.0).starts.diff().tolist() == [10] * 6
    assert top_k(scores, 0.01).starts.diff().tolist() == [1] * 6
    assert top_k(scores, 0.0).starts.diff().tolist() == [0] * 6
    assert top_k(scores, torch.tensor([0.3, 0.26])).starts.diff().tolist() == [3] * 6
    assert top_k(scores, torch.tensor([2, 5])).starts.diff().tolist() == [2] * 3 + [5] * 3


def test_a_share_of_equal_masses_is_met_exactly() -> None:
    scores = torch.zeros(1, 1, 8)
    for p, count in ((0.125, 1), (0.25, 2), (0.5, 4), (0.500001, 5), (0.875, 7), (0.9, 8)):
        assert lists(top_p(scores, p)) == [[list(range(count))]]
        kept = top_p(scores, p, keep=Keep(kv=((7, 8),)))
        assert lists(kept) == [[[*range(count - 1), 7]]]
    assert lists(top_p(scores, 0.5, last=0.5)) == [[[0, 1, 2, 3]]]  # of 7.5, the last being half


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
    active = top_k(torch.randn(1, 5, 10), 0, keep=keep).active[0]
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
        sizes = [
            (h.stop - h.start) * (r.stop - r.start) * 7
            for h, r in select._chunks(select.score_source(scores))
        ]
        assert max(sizes) <= max(held, 7)
        part = choose(scores, amount, keep=keep)
    assert torch.equal(whole.starts, part.starts)
    assert torch.equal(whole.kv, part.kv)


def test_proxies_give_the_scores_of_their_products() -> None:
    random = torch.Generator().manual_seed(1)
    # Small whole numbers: products are exact in any order of summation.
    q, k = (torch.randint(-4, 5, (2, h, n, 8), generator=random).float() for h, n in ((6, 5), (3, 9)))
    scores = 0.25 * torch.einsum("bhqr,bhkr->bhqk", q, k.repeat_interleave(2, 1))
    for amount, choose in ((3, top_k), (0.8, top_p)):
        expected = lists(choose(scores.amax(0), amount))
        assert lists(choose(Proxies(q, k, 0.25), amount)) == lists(choose(scores, amount)) == expected
    assert lists(top_p(Proxies(q, k), 0.5)) == lists(top_p(Proxies(q, k, 8**-0.5), 0.5))


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 5),
    st.sampled_from(("float64", "float32", "bfloat16")),
)
def test_pool_is_the_mean_of_what_a_block_has(length: int, block: int, padding: int, dtype: str) -> None:
    x = torch.randn(2, length + padding, 3, 4).to(getattr(torch, dtype)).transpose(1, 2)
    x[:, :, length:] = float("nan")
    means = pool(x, block, length=length)
    expected = torch.stack([part.double().mean(2) for part in x[:, :, :length].split(block, 2)], 2)
    assert means.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    torch.testing.assert_close(means.double(), expected, rtol=1e-5, atol=1e-6)


def test_large_rows_of_the_real_size_agree_with_torch() -> None:
    scores = torch.randn(2, 64, 512).bfloat16().float()  # bfloat16 makes many ties
    found = top_k(scores, 0.1)
    order = scores.sort(dim=-1, descending=True, stable=True)[1][..., :51].sort(-1)[0]
    assert torch.equal(found.kv.view(2, 64, 51).long(), order)


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
        (lambda: top_p(scores, torch.tensor([0.5, 0.5])), "does not fit 1 heads"),
        (lambda: top_p(scores, 0.5, last=0.0), "last must be in"),
        (lambda: top_k(scores, 1, keep=Keep(kv=((2, 4),))), "only 3"),
        (lambda: Keep(kv=((2, 1),)), "0 <= start <= stop"),
        (lambda: Keep(own=(0, 1)), "own must be"),
        (lambda: top_k(scores[0], 1), "cannot be selected from"),
        (lambda: top_k(scores, 1, backend="cuda"), "unknown"),
        (lambda: Proxies(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)), "do not fit"),
        (lambda: pool(torch.zeros(3, 4), 2, length=5), "Cannot pool"),
    ]
    for call, message in refused:
        with pytest.raises(InputError, match=message):
            call()


@without_triton
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_gpu_is_not_waited_for(kv_heads: int) -> None:
    with fake_cuda() as seen:
        q = torch.empty(2, 4, 2000, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, kv_heads, 2000, 64, dtype=torch.bfloat16, device="cuda")
        shares = torch.empty(4, dtype=torch.float64, device="cuda")
        keep = Keep.of_tokens([(1990, 2000)], block_q=64)
        seen.clear()
        proxies = Proxies(pool(q, 64), pool(k, 64))
        found = [
            top_k(proxies, 0.2, keep=keep),
            top_k(proxies, 5),
            top_p(proxies, 0.9, keep=keep, last=0.5),
            top_p(proxies, shares),
        ]
        for blocks in found:
            blocks.active  # noqa: B018 - a property that is computed
        assert seen.names and not seen.faults
    # Room for the budget: six of 32 columns, the text's row and column, and a row's own block.
    assert [blocks.kv.shape[0] for blocks in found[1:3]] == [4 * 32 * 5, 4 * 32 * 32]
    assert 4 * 32 * 6 < found[0].kv.shape[0] < 4 * 32 * 12


def test_a_gpu_takes_scores_that_a_cpu_refuses() -> None:
    scores = torch.tensor([[1.0, float("nan"), inf, 2.0]])

    class Elsewhere:
        """Scores that say they are on a GPU."""

        device = torch.device("cuda")

        def __getattr__(self, name: str) -> object:
            return getattr(scores, name)

    rows = select.ScoreRows.of(Elsewhere(), None)  # type: ignore[arg-type]
    assert rows.scores.tolist() == [[1.0, -inf, select.LARGEST, 2.0]] and rows.top.tolist() == [
        select.LARGEST
    ]


def in_a_process(function: str, **environment: str) -> None:
    code = f"from tests.run.test_select import {function}; {function}()"
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_triton_is_not_loaded_unless_asked_for() -> None:
    in_a_process("choose_without_triton")


def choose_without_triton() -> None:
    before = "triton" in sys.modules  # some builds of torch load it
    top_k(torch.zeros(1, 2, 3), 1)
    assert ("triton" in sys.modules) == before
    assert "weft.run.kernels.triton_select" not in sys.modules


@without_triton
def test_triton_makes_the_same_lists() -> None:
    in_a_process("compare_in_the_interpreter", TRITON_INTERPRET="1")


def compare_in_the_interpreter() -> None:
    """Few and mixed rows: the interpreter takes some 30 ms for each."""
    rng = np.random.default_rng()
    rows, mixed = 8, ("any", "ties", "signs", "closed")
    for turn, cols in enumerate((1, 23, 40)):
        parts = [make_scores(int(rng.integers(2**16)), kind, (1, 2, cols)) for kind in mixed]
        scores = torch.cat(parts, 1)
        keep = Keep(kv=((cols - 1, cols),), q=((4, 5),), own=(1, 2)) if turn else None
        k = torch.from_numpy(rng.integers(0, cols + 2, (1, rows)))
        p = torch.from_numpy(rng.choice((0.0, 0.1, 0.5, 0.9, 0.99, 1.0), (1, rows)))
        for ours, theirs in (
            (top_k(scores, k, keep=keep, backend="triton"), top_k(scores, k, keep=keep, backend="torch")),
            (top_p(scores, p, keep=keep, backend="triton"), top_p(scores, p, keep=keep, backend="torch")),
        ):
            assert lists(ours) == lists(theirs), (scores, k, p)


@without_triton
def test_triton_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    in_a_process("compile_for_all", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")


def compile_for_all() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as build

    from weft.run.kernels import triton_select as kernels

    wide = {"needs", "mass", "target", "starts"}
    for kernel in (kernels.find_cuts, kernels.write_lists):
        for has_mass in (False, True):
            constants = {"WIDTH": 512, "KEPT": True, "MASS": has_mass}
            types = {"scores": "*fp32", "kept": "*i8", "size": "i32", **dict.fromkeys(wide, "*i64")}
            types |= dict.fromkeys(constants, "constexpr")
            signature = {name: types.get(name, "*i32") for name in kernel.arg_names}
            source = ASTSource(kernel, signature, constants)
            for target in (
                GPUTarget("cuda", 80, 32),
                GPUTarget("cuda", 90, 32),
                GPUTarget("cuda", 100, 32),
                GPUTarget("hip", "gfx942", 64),
            ):
                built = build(source, target=target, options={"num_warps": 2})
                assert spilled(built.asm) == 0, (kernel.__name__, target, has_mass)


def spilled(assembly: dict[str, str | bytes]) -> int:
    if "amdgcn" in assembly:
        text = str(assembly["amdgcn"])
        return sum(map(int, re.findall(r"\.(?:\w+_spill_count|private_segment_fixed_size):\s+(\d+)", text)))
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(bytes(assembly["cubin"]))  # type: ignore[arg-type]
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", text)))
