"""Lists of blocks: made where the mask lies, without a look at its values."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.run.hot_path import fake_cuda
from weft.core.indices import Indices
from weft.core.mask import BlockMask
from weft.core.schedule import Attend, Piece
from weft.run.kernels import guarded, make
from weft.run.kernels.tiles import Blocks, Tiles, TileSet


@st.composite
def masks(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return rng.random(shape) < draw(st.sampled_from((0.0, 0.2, 0.6, 1.0)))


def rows(blocks: Blocks) -> list[list[int]]:
    starts = blocks.starts.tolist()
    return [blocks.kv[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]


@given(active=masks(), spare=st.integers(0, 9))
def test_lists_have_the_active_blocks_ascending_whatever_room_they_have(
    active: np.ndarray, spare: int
) -> None:
    expected = [np.flatnonzero(row).tolist() for row in active.reshape(-1, active.shape[2])]
    exact, roomy = Blocks.of(active), Blocks.of(active, room=int(active.sum()) + spare)
    assert rows(exact) == rows(roomy) == expected
    assert exact.kv.shape[0] == active.sum() and exact.kv.dtype == exact.starts.dtype == torch.int32


def test_large_masks_are_listed_a_part_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    active = np.random.default_rng(5).random((5, 4, 7)) < 0.4
    whole = rows(Blocks.of(active))
    assert rows(Blocks.of(torch.from_numpy(active))) == whole
    monkeypatch.setattr("weft.run.kernels.tiles.TILES_PER_CHUNK", 2 * 4 * 7)
    monkeypatch.setattr("weft.run.kernels.tiles.HOST_TILES_PER_CHUNK", 3 * 7)  # neither heads nor rows divide
    assert rows(Blocks.of(active)) == rows(Blocks.of(torch.from_numpy(active))) == whole


@given(active=masks(), spare=st.integers(0, 9))
def test_lists_can_be_turned_back_and_inverted(active: np.ndarray, spare: int) -> None:
    blocks = Blocks.of(active, room=int(active.sum()) + spare)
    assert np.array_equal(blocks.active.numpy(), active)
    assert rows(blocks.inverted) == rows(Blocks.of(active.swapaxes(1, 2).copy()))


@given(active=masks())
def test_order_puts_the_longest_rows_first_and_keeps_equal_ones_in_place(active: np.ndarray) -> None:
    counts = active.sum(-1).reshape(-1)
    expected = sorted(range(len(counts)), key=lambda row: -counts[row])
    order = Blocks.of(active).order
    assert order.dtype == torch.int32 and order.tolist() == expected


def test_tiles_of_lists_are_those_of_the_mask() -> None:
    active = np.random.default_rng(3).random((2, 3, 4)) < 0.5
    ours, theirs = Tiles(active, 8, 8, 20, 30), Tiles(None, 8, 8, 20, 30, listed=Blocks.of(active))
    device = torch.device("cpu")
    assert ours.sparse and theirs.sparse and not Tiles(None, 8, 8, 8, 8).sparse
    assert rows(ours.lists(device)) == rows(theirs.lists(device))
    assert np.array_equal(ours.host, theirs.host)
    assert torch.equal(ours.lists(device).active, theirs.lists(device).active)
    assert ours.token_mask is not None and torch.equal(ours.token_mask, theirs.token_mask)


def test_lists_are_made_once_for_each_device() -> None:
    tiles = Tiles(np.eye(3, dtype=bool)[None], 8, 8, 24, 24)
    device = torch.device("cpu")
    assert tiles.lists(device) is tiles.lists(device)


@pytest.mark.parametrize("group", [1, 2])
def test_a_mask_on_the_device_is_attended_to_without_the_host(group: int) -> None:
    shape = 1, 4, 200, 64
    with fake_cuda() as seen:
        q, grad = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        k, v = (torch.empty(1, 4 // group, 200, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        seen.clear()
        blocks = Blocks.of(torch.empty(4, 4, 4, dtype=torch.bool, device="cuda"))
        assert blocks.kv.device.type == "cuda" and blocks.kv.shape[0] == prod((4, 4, 4))
        assert blocks.order.device.type == "cuda" and blocks.order.shape == (16,)
        tiles, kernel = Tiles(None, 64, 64, 200, 200, listed=blocks), make("triton")
        out, lse = kernel.attend(q, k, v, tiles, 0.1)
        kernel.attend_backward(grad, q, k, v, (out, guarded(lse)), tiles, 0.1)
        assert not seen.faults
        assert {"triton::forward", "triton::grad_keys", "aten::scatter_"} <= seen.names.keys()


def renewed() -> tuple[BlockMask, Attend]:
    """A mask, and an attend of some of its heads and blocks, in two runs each and ragged at their ends."""
    active = np.random.default_rng(3).random((4, 7, 7)) < 0.4
    active[1, 2] = False
    mask = BlockMask.from_tiles(active, q_len=50, kv_len=50, block_q=8)
    tokens = Indices(((8, 24), (40, 50)))
    return mask, Attend(0, Piece("q", Indices.span(1, 4), tokens), Piece("kv", Indices.span(1, 4), tokens))


def test_a_mask_that_was_made_on_a_device_has_the_lists_that_it_has_on_the_host() -> None:
    mask, op = renewed()
    expected = TileSet(mask).of(op).lists(torch.device("cpu"))
    mask.keep_on_device(torch.from_numpy(mask.tiles))
    tiles = TileSet(mask).of(op)
    assert tiles.listed is not None and tiles.active is None
    assert rows(tiles.lists(torch.device("cpu"))) == rows(expected)
    assert tiles.token_mask is not None and bool(tiles.token_mask.any())


def test_a_mask_that_was_made_on_a_device_waits_for_nothing() -> None:
    mask, op = renewed()
    places: dict[int, tuple[torch.Tensor, ...]] = {}
    with fake_cuda() as seen:
        for _ in range(2):  # the first copies where the blocks are, for all masks of an executor
            seen.clear()
            mask.keep_on_device(torch.empty(mask.tiles.shape, dtype=torch.bool, device="cuda"))
            lists = TileSet(mask, places).of(op).lists(torch.device("cuda", 0))
            assert lists.kv.device.type == "cuda"
    assert not seen.faults
