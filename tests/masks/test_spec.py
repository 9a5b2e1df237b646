"""Masks by name: options are read as their defaults are, and mistakes come with what there is."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from weft import masks
from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.masks import spec as naming
from weft.masks.grid import TokenGrid
from weft.masks.random import random_mask
from weft.masks.spec import PRODUCERS, mask_from_spec, options, show
from weft.masks.sta import sta_mask
from weft.masks.svg import svg_mask

GRID = TokenGrid(5, 11, 13, prefix=7)


def make(spec: str, seed: int = 0) -> BlockMask:
    return mask_from_spec(spec, heads=6, grid=GRID, block=32, seed=seed)


@pytest.mark.parametrize("name", [name for name in PRODUCERS if name != "trace"])
def test_every_mask_can_be_named_alone_and_with_all_its_options(name: str) -> None:
    written = ",".join(f"{key}={show(value)}" for key, value in options(name).items())
    mask = make(f"{name}:{written}" if written else name, seed=4)
    assert mask == make(name, seed=4)
    assert mask.grid == (6, GRID.tokens, GRID.tokens, 32, 32)
    text = GRID.text(32)
    assert mask.tiles[:, text].all()
    assert mask.tiles[:, :, text].all()


def test_options_are_those_of_the_producer() -> None:
    assert make("sta:window=1x3x3+3x1x1, dense=0.3 ,tile=2x4x4", seed=1) == sta_mask(
        6, GRID, block=32, window=[(1, 3, 3), (3, 1, 1)], dense=0.3, tile=(2, 4, 4), seed=1
    )
    assert make("svg:density=0.4,spatial=1") == svg_mask(6, GRID, block=32, density=0.4, spatial=1)
    plain = TokenGrid(5, 11, 13)
    listed = mask_from_spec("random:density=0+0.5+1", heads=3, grid=plain, block=32, seed=2)
    assert listed == random_mask(3, plain.tokens, plain.tokens, block=32, density=[0, 0.5, 1], seed=2)
    assert make("dense").is_dense


def test_a_trace_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "counts.npz"
    np.savez(path, counts=np.full((2, 1, 6), 10), total=100)
    assert make(f"trace:{path},step=1") == make(f"trace:file={path},step=1")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("radail", r"no mask 'radail'. Did you mean 'radial'\?"),
        ("", "no mask ''. Known: dense"),
        ("sta:windw=3x3x3", r"no option 'windw'. Did you mean 'window'\?"),
        ("dense:density=1", "no option 'density'. Known: none"),
        ("svg:seed=3", "no option 'seed'"),
        ("svg:block=3", "no option 'block'"),
        ("svg:0.25", "'0.25' is not an option of 'svg'. Known: density, spatial"),
        ("svg:density=", "'density=' is not an option of 'svg'"),
        ("svg:density=0.2,", "'' is not an option"),
        ("svg:density=half", "density=half cannot be read. Write it like density=0.25"),
        ("svg:density=nan", "density=nan cannot be read"),
        ("radial:decay=inf", "decay=inf cannot be read"),
        ("sta:window=3x3", "window=3x3 cannot be read. Write it like window=3x3x3"),
        ("sta:window=0x3x3", "three sizes >= 1 in tiles, such as 3x3x3, got 0x3x3"),
        ("sta:window=3xtx3", "Write it like window=3x3x3"),
        ("vsa:step=1.5", "Write it like step=0"),
        ("svg:density=1.2", "density must be in \\[0, 1\\], got 1.2"),
        ("trace", "no file ''|trace:FILE"),
        ("trace:nowhere.npz", "no file 'nowhere.npz'"),
    ],
)
def test_a_mistake_comes_with_what_there_is(spec: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make(spec)


@pytest.mark.parametrize(("spec", "tokens"), [("svg", 10**7), ("dense", 10**8)])
def test_more_tiles_than_memory_holds_are_refused_before_they_are_made(spec: str, tokens: int) -> None:
    with pytest.raises(InputError, match=r"tiles.*Use blocks of \d+ tokens"):
        mask_from_spec(spec, heads=40, grid=TokenGrid(1, 1, tokens))


@pytest.mark.parametrize("sizes", [{"heads": 0}, {"heads": 2, "block": 0}, {"heads": 2, "seed": -1}])
def test_sizes_are_checked(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError):
        mask_from_spec("svg", grid=GRID, **sizes)


def test_a_file_in_the_room_is_a_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of docs/add-mask.md, as it stands there."""
    page = Path(__file__).parents[2] / "docs/add-mask.md"
    (tmp_path / "checker.py").write_text(
        page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    )
    monkeypatch.setattr(masks, "__path__", [*masks.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "weft.masks.checker", raising=False)
    monkeypatch.setattr(naming, "PRODUCERS", naming.producers())
    frames = np.arange(6)
    kept = mask_from_spec("checker:every=3", heads=2, grid=TokenGrid(6, 4, 4), block=16).tiles
    assert (kept == ((frames[:, None] - frames) % 3 == 0)).all()
