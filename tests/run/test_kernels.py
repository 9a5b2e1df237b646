"""Every kernel against the reference, and the reference against attention written out."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.run.dense import dense, error
from weft.core.backends import BACKENDS
from weft.core.errors import InputError, MissingError
from weft.core.indices import Indices
from weft.core.mask import BlockMask
from weft.core.schedule import Attend, Piece
from weft.run.kernels import Accumulator, choose, make
from weft.run.kernels.tiles import Tiles

TESTED = ("exact", "reference")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tile:
    """One Attend's operands, its tiles and the gradient of its output."""

    tiles: Tiles
    operands: tuple[Tensor, Tensor, Tensor]
    grad: Tensor
    scale: float


@st.composite
def tiles(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Tile:
    batch, heads, head_dim = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(1, 9))
    q_len, kv_len = draw(st.integers(1, 37)), draw(st.integers(1, 37))
    block_q, block_k = draw(st.sampled_from((1, 5, 8))), draw(st.sampled_from((1, 3, 8)))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    shape = (heads, -(-q_len // block_q), -(-kv_len // block_k))
    active = rng.random(shape) < draw(st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0)))
    random = torch.Generator().manual_seed(int(rng.integers(2**16)))
    sizes = [(batch, heads, n, head_dim) for n in (q_len, kv_len, kv_len, q_len)]
    q, k, v, grad = (torch.randn(size, generator=random, dtype=torch.float64).to(dtype) for size in sizes)
    found = Tiles(None if active.all() else active, block_q, block_k, q_len, kv_len)
    return Tile(found, (q, k, v), grad, draw(st.sampled_from((0.0, -0.4, 0.3, 2.0))))


def both_ways(backend: str, tile: Tile) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    kernel = choose(backend)
    out, lse = kernel.attend(*tile.operands, tile.tiles, tile.scale)
    final = out, lse.masked_fill(lse == -torch.inf, torch.inf)
    grads = kernel.attend_backward(tile.grad, *tile.operands, final, tile.tiles, tile.scale)
    return [out, lse, *grads]


@given(tile=tiles())
def test_the_reference_equals_dense_attention(tile: Tile) -> None:
    inputs = [x.clone().requires_grad_() for x in tile.operands]
    expected = dense(*inputs, tile.scale, tile.tiles.token_mask)
    grads = torch.autograd.grad(expected, inputs, tile.grad)
    out, _, *found = both_ways("reference", tile)
    assert max(error(x, y) for x, y in zip([out, *found], [expected, *grads], strict=True)) < 1e-12


@settings(max_examples=200)
@given(tile=tiles())
def test_sdpa_equals_the_reference_forward_and_backward(tile: Tile) -> None:
    pairs = list(zip(both_ways("exact", tile), both_ways("reference", tile), strict=True))
    empty = pairs[0][0].new_full((), -torch.inf)
    assert torch.equal(pairs[1][0] == empty, pairs[1][1] == empty)
    assert max(error(x.clamp(min=-1e9), y.clamp(min=-1e9)) for x, y in pairs) < 1e-11


@pytest.mark.parametrize("backend", TESTED)
@given(tile=tiles())
def test_a_row_with_no_tile_gives_zero_and_no_weight(backend: str, tile: Tile) -> None:
    out, lse, dq, dk, dv = both_ways(backend, tile)
    active = tile.tiles.token_mask
    empty = torch.zeros(lse.shape[1:], dtype=torch.bool) if active is None else ~active.any(-1)
    unseen = torch.zeros(dk.shape[1:3], dtype=torch.bool) if active is None else ~active.any(-2)
    assert ((lse == -torch.inf) == empty).all()
    assert not any(x[:, empty].any() for x in (out, dq))
    assert not any(x[:, unseen].any() for x in (dk, dv))


@pytest.mark.parametrize("backend", TESTED)
@given(tile=tiles())
def test_gradients_of_the_parts_of_a_row_add_up(backend: str, tile: Tile) -> None:
    out, lse, *whole = both_ways(backend, tile)
    cut = tile.tiles.block_k  # after the first column of blocks
    if tile.tiles.kv_len <= cut:
        return
    final = out, lse.masked_fill(lse == -torch.inf, torch.inf)
    q, k, v = tile.operands
    left, right = (
        choose(backend).attend_backward(
            tile.grad, q, k[:, :, part], v[:, :, part], final, columns(tile, part), tile.scale
        )
        for part in (slice(None, cut), slice(cut, None))
    )
    joined = [left[0] + right[0], *(torch.cat(pair, 2) for pair in zip(left[1:], right[1:], strict=True))]
    assert max(error(x, y) for x, y in zip(joined, whole, strict=True)) < 1e-11


@pytest.mark.parametrize("backend", TESTED)
@given(tile=tiles())
def test_parts_attended_into_one_another_equal_the_whole(backend: str, tile: Tile) -> None:
    q, k, v = tile.operands
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    for part in (slice(tile.tiles.block_k, None), slice(None, tile.tiles.block_k)):
        if k[:, :, part].shape[2]:
            keys = k[:, :, part], v[:, :, part], columns(tile, part)
            choose(backend).attend(q, *keys, tile.scale, Accumulator(out, lse))
    whole_out, whole_lse = choose(backend).attend(*tile.operands, tile.tiles, tile.scale)
    assert error(out, whole_out) < 1e-11
    assert error(lse.clamp(min=-1e9), whole_lse.clamp(min=-1e9)) < 1e-11


def columns(tile: Tile, part: slice) -> Tiles:
    """The tiles of some keys; the cut is between blocks."""
    whole = tile.tiles
    size = len(range(whole.kv_len)[part])
    active = whole.active
    if active is not None:
        active = active[:, :, 1:] if part.start else active[:, :, :1]
    return Tiles(active, whole.block_q, whole.block_k, whole.q_len, size)


@pytest.mark.parametrize("backend", TESTED)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=20)
def test_results_are_float32_or_better_and_as_good(
    backend: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    tile = data.draw(tiles(dtype))
    exact = Tile(tile.tiles, tuple(x.double() for x in tile.operands), tile.grad.double(), tile.scale)
    found, expected = both_ways(backend, tile), both_ways("reference", exact)
    assert {x.dtype for x in found} == {torch.float64 if dtype == torch.float64 else torch.float32}
    assert all(torch.equal(x.isfinite(), y.isfinite()) for x, y in zip(found, expected, strict=True))
    pairs = [
        (x.double().nan_to_num(neginf=0.0), y.nan_to_num(neginf=0.0))
        for x, y in zip(found, expected, strict=True)
    ]
    # A weight inherits the rounding of its score, a sum of products that may cancel; a gradient takes the
    # scale once more. Of 24,000 random tiles the worst was 4.4 such units.
    q, k, _ = exact.operands
    eps = torch.finfo(found[0].dtype).eps
    unit = eps * max(1.0, abs(tile.scale) * (q.abs() @ k.abs().mT).max().item()) * max(1.0, tile.scale)
    assert max(error(x, y) / max(1.0, y.abs().max().item()) for x, y in pairs) < 6 * unit


@pytest.mark.parametrize("backend", TESTED)
@given(tile=tiles())
@settings(max_examples=40)
def test_operands_may_have_any_strides(backend: str, tile: Tile) -> None:
    def strided(x: Tensor) -> Tensor:  # [B, S, H, D] in memory, and every other number of a row
        return x.transpose(1, 2).repeat_interleave(2, -1).transpose(1, 2)[..., ::2]

    q, k, v = (strided(x) for x in tile.operands)
    odd = Tile(tile.tiles, (q, k, v), strided(tile.grad), tile.scale)
    pairs = zip(both_ways(backend, odd), both_ways(backend, tile), strict=True)
    assert max(error(x.clamp(min=-1e9), y.clamp(min=-1e9)) for x, y in pairs) < 1e-12


@given(tile=tiles())
def test_a_nan_value_reaches_the_rows_that_read_it_and_no_other(tile: Tile) -> None:
    q, k, v = (x.clone() for x in tile.operands)
    v[:, :, 0] = torch.nan
    out, _ = choose("exact").attend(q, k, v, tile.tiles, tile.scale)
    active = tile.tiles.token_mask
    reads = torch.ones(out.shape[1:3], dtype=torch.bool) if active is None else active[:, :, 0]
    assert (out.isnan().any(-1) == reads).all()


def test_the_tiles_of_an_attend_are_those_of_its_heads_and_blocks() -> None:
    mask = BlockMask.from_tiles(np.eye(4, dtype=bool)[None].repeat(3, 0), q_len=7, kv_len=8, block_q=2)
    op = Attend(
        0, Piece("q", Indices.of([1]), Indices.span(4, 7)), Piece("kv", Indices.of([1]), Indices.span(2, 8))
    )
    found = Tiles.of(mask, op)
    assert found.active is not None
    assert found.active.tolist() == [[[False, True, False], [False, False, True]]]
    assert (found.q_len, found.kv_len) == (3, 6)


def test_tiles_that_are_all_active_need_no_mask() -> None:
    mask = BlockMask.from_tiles(np.tril(np.ones((1, 2, 2), dtype=bool)), q_len=4, kv_len=4, block_q=2)
    op = Attend(
        0, Piece("q", Indices.of([0]), Indices.span(2, 4)), Piece("kv", Indices.of([0]), Indices.span(0, 4))
    )
    assert Tiles.of(mask, op).active is None


def test_an_unknown_kernel_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=f"flush.*{', '.join(BACKENDS)}"):
        choose("flush")


def test_a_kernel_that_cannot_serve_says_why() -> None:
    with pytest.raises(InputError, match="on the CPU, not float64 on cpu"):
        choose("cpu", "float64")
    with pytest.raises(InputError, match="'flash' cannot serve: it computes on a GPU, not on cpu"):
        choose("flash", "bfloat16")


def test_a_kernel_without_its_package_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("triton", "weft.run.kernels.triton_forward"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingError, match="needs triton"):
        make("triton")
