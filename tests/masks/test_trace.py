"""Traces: recorded tiles come back as they were, counts as shares, and other files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid
from weft.masks.trace import trace_mask

GRID = TokenGrid(3, 5, 7)  # 105 tokens, 11 blocks of 10
TILES = np.random.default_rng(0).random((2, 3, 4, 11, 11)) < 0.4


def read(path: Path | str, **options: Any) -> BlockMask:
    return trace_mask(**{"heads": 4, "grid": GRID, "block": 10, "file": str(path), **options})


@pytest.mark.parametrize("name", ["tiles", "bits"])
def test_tiles_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    np.savez_compressed(path, **{name: np.packbits(TILES, axis=-1) if name == "bits" else TILES})
    for step, layer in np.ndindex(2, 3):
        assert (read(path, step=step, layer=layer).tiles == TILES[step, layer]).all()
    np.savez(path, **{name: np.packbits(TILES[0, 0], axis=-1) if name == "bits" else TILES[0, 0]})
    assert (read(path).tiles == TILES[0, 0]).all()


def test_counts_become_shares_of_this_grid(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    counts = np.array([[[0, 10, 500, 1000]], [[1, 999, 3, 4]]])
    np.savez(path, counts=counts, layers=[6])
    kept = read(path, layer=6).tiles.sum(axis=(1, 2)).tolist()
    assert kept == [0, 2, 61, 121]  # of 121, rounded up
    assert read(path, layer=6) == read(path, layer=6)
    assert read(path, layer=6, seed=1) != read(path, layer=6)
    np.savez(path, counts=counts, layers=[6], total=2000)
    assert read(path, layer=6).tiles.sum(axis=(1, 2)).tolist() == [0, 1, 31, 61]


@pytest.mark.parametrize(
    ("arrays", "options", "said"),
    [
        ({"tiles": TILES}, {"step": 2}, "step=2 is not in the trace. It has steps 0 to 1"),
        ({"tiles": TILES}, {"step": -1}, "step=-1 is not"),
        ({"tiles": TILES}, {"layer": 3}, "layer=3 is not in the trace. It has 0, 1, 2"),
        ({"tiles": TILES, "layers": [0, 2, 4]}, {"layer": 1}, "It has 0, 2, 4"),
        ({"tiles": TILES}, {"heads": 5}, "heads must be 4, .* got 5"),
        ({"tiles": TILES}, {"block": 16}, "tiles of 7 × 7; in .* 11 × 11"),
        ({"tiles": TILES.astype(float)}, {}, "`tiles` of .* is float64 of shape"),
        ({"tiles": TILES[0]}, {}, "is bool of shape"),
        ({"counts": np.ones((2, 1, 4))}, {}, "`counts` of .* is float64"),
        ({"counts": np.array([5, 6, 7, 8]), "total": 7}, {}, "in \\[0, total=7\\], got 5 to 8"),
        ({"counts": np.array([-5, 6, 7, 8])}, {}, "got -5 to 8"),
        ({"counts": np.array([5, 6, 7, 8]), "total": [9, 9]}, {}, r"`total` of .* of shape \(2,\)"),
        ({"counts": np.array([5, 6, 7, 8]), "total": np.nan}, {}, "`total` of .* got float64"),
        ({"bits": np.packbits(TILES, axis=-1).astype(np.uint16)}, {}, "`bits` of .* is uint16"),
        ({"counts": np.zeros((0, 1, 4), dtype=int)}, {}, "of shape"),
        ({"sizes": TILES}, {}, "holds sizes"),
        ({}, {}, "holds nothing"),
        ({"tiles": np.array([None, "x"], dtype=object)}, {}, "not an .npz file of plain arrays"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_a_reason(
    arrays: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.npz"
    np.savez(path, **arrays)
    with pytest.raises(InputError, match=said):
        read(path, **options)


def test_no_file_is_not_the_folder_that_one_is_in() -> None:
    with pytest.raises(InputError, match="There is no file ''"):
        read("")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half a zip", b"words", b"\x80\x04\x95"])
def test_a_file_that_is_no_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not an .npz file"):
        read(path)


def test_one_array_or_a_folder_is_no_archive(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", TILES)
    with pytest.raises(InputError, match="not an .npz file"):
        read(tmp_path / "one.npy")
    with pytest.raises(InputError, match="no file"):
        read(tmp_path)


def test_counts_of_zero_only_are_an_empty_mask(tmp_path: Path) -> None:
    np.savez(tmp_path / "trace.npz", counts=np.zeros(4, dtype=int))
    assert not read(tmp_path / "trace.npz").tiles.any()
