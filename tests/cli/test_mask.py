"""`weft mask`: what it draws is the mask, what it says of it is true, and it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from weft.cli import main as front
from weft.cli.mask import natural_cuts
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid
from weft.masks.spec import PRODUCERS, mask_from_spec

SMALL = ("--grid", "5x7x11", "--text", "9", "--block", "16", "--heads", "6")


def call(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        front.main(["mask", *args])
    return int(end.value.code or 0)


def picture(shown: str) -> list[str]:
    lines = shown.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("head "))
    return lines[start + 1 : lines.index("", start)]


def test_a_small_mask_is_drawn_tile_by_tile(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("svg:density=0.3", *SMALL, "--head", "2") == 0
    drawn = picture(capsys.readouterr().out)
    grid = TokenGrid(5, 7, 11, prefix=9)
    tiles = mask_from_spec("svg:density=0.3", heads=6, grid=grid, block=16).tiles[2]
    upper = [[mark in "▀█" for mark in line] for line in drawn]
    lower = [[mark in "▄█" for mark in line] for line in drawn]
    dots = np.stack((upper, lower), axis=1).reshape(-1, len(tiles))
    assert len(tiles) % 2 == 1  # the last line is half empty
    assert (dots[:-1] == tiles).all()
    assert not dots[-1].any()


def test_a_large_mask_is_drawn_by_density(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("random:density=0.3", "--grid", "8x16x33", "--heads", "2", "--block", "13") == 0
    drawn = picture(capsys.readouterr().out)
    assert len(drawn) == 32
    assert {len(line) for line in drawn} == {64}
    marks = "".join(drawn)
    assert set(marks) <= set(" ░▒▓█▀▄")
    assert marks.count("▒") > marks.count("░") > marks.count("▓") > marks.count("█")
    assert call("dense", "--heads", "2") == 0
    assert picture(capsys.readouterr().out) == ["█" * 64] * 32


def test_numbers_are_those_of_the_mask(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("sta:window=1x1x3,dense=0.4", *SMALL, "--ranks", "6", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    grid = TokenGrid(5, 7, 11, prefix=9)
    mask = mask_from_spec("sta:window=1x1x3,dense=0.4", heads=6, grid=grid, block=16)
    assert said["density"] == pytest.approx(mask.density)
    assert np.mean(said["densities"]) == pytest.approx(mask.density)
    assert max(said["densities"]) == 1
    assert said["digest"] == mask.digest
    assert [(cut["ulysses"], cut["ring"]) for cut in said["cuts"]] == [(6, 1), (3, 2), (2, 3), (1, 6)]
    for cut in said["cuts"]:
        assert cut["imbalance"] >= cut["without_barriers"] - 1e-9 >= 1 - 2e-9
        assert cut["without_barriers"] >= cut["bound"] - 1e-9


def test_the_spread_over_heads_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("random:density=0+0+1+0+1", "--grid", "2x8x8", "--block", "16", "--heads", "5") == 0
    assert "density 40.0% · of heads: least 0.0%, median 0.0%, most 100.0%" in capsys.readouterr().out


def test_natural_cuts_are_even_runs_of_heads_and_blocks() -> None:
    tiles = np.zeros((2, 5, 5), dtype=bool)
    tiles[0, 0, 0] = tiles[0, 4, 4] = tiles[1, 0, :] = True
    mask = BlockMask.from_tiles(tiles, q_len=50, kv_len=50, block_q=10)
    cuts = {(cut.ulysses, cut.ring): cut for cut in natural_cuts(mask, 2)}
    # Whole heads: 5 tiles against 2 of 7. Rows 0-2 against 3-4: 6 against 1.
    assert cuts[2, 1].imbalance == pytest.approx(5 / 3.5)
    assert cuts[2, 1].bound == pytest.approx(5 / 3.5)
    assert cuts[1, 2].without_barriers == pytest.approx(6 / 3.5)
    # Step 0: the ranks meet their own columns, 4 and 1. Step 1: the others', 2 and 0.
    assert cuts[1, 2].imbalance == pytest.approx((4 + 2) / 3.5)
    assert cuts[1, 2].bound == 1


def test_more_ranks_than_heads_or_blocks_leave_out_what_cannot_be() -> None:
    mask = mask_from_spec("dense", heads=2, grid=TokenGrid(1, 3, 5), block=5)
    assert [(cut.ulysses, cut.ring) for cut in natural_cuts(mask, 6)] == [(2, 3)]
    assert list(natural_cuts(mask, 7)) == []


def test_ranks_that_stay_idle_are_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("svg", "--grid", "1x3x5", "--block", "5", "--heads", "2", "--ranks", "7") == 0
    assert "2 heads and 3 blocks leave some of 7 ranks idle." in capsys.readouterr().out


def test_an_empty_mask_has_nothing_to_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("random:density=0", *SMALL[:2], "--heads", "6", "--block", "16") == 0
    shown = capsys.readouterr().out
    assert "density 0.0%" in shown and "Nothing is active" in shown and "busiest / mean" not in shown


def test_a_bad_mask_is_an_error_without_a_header(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("sta:width=3", *SMALL) == 2
    assert capsys.readouterr().out == ""


def test_without_a_mask_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    shown = capsys.readouterr().out
    for name in PRODUCERS:
        assert f"\n  {name}" in shown
    assert "sta:window=3x3x3,tile=4x4x4,dense=0" in shown
    assert "trace:FILE,step=0" in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("stq",), "Did you mean 'sta'?"),
        (("sta:width=3",), "Known: window, tile, dense"),
        (("sta", "--grid", "3x4"), "like 21x30x52"),
        (("sta", "--grid", "0x4x4"), "is not frames x rows x columns"),
        (("sta", "--head", "40"), "--head must be in [0, 39], got 40"),
        (("sta", "--heads", "0"), "heads must be ≥ 1, got 0"),
        (("sta", "--text", "-1"), "--text must be >= 0, got -1"),
        (("sta", "--ranks", "0"), "--ranks must be >= 1, got 0"),
        (("sta", "--block", "0"), "block must be ≥ 1 token, got 0"),
        (("trace:gone.npz",), "no file 'gone.npz'"),
    ],
)
def test_a_mistake_is_a_sentence_and_code_2(
    args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*args) == 2
    assert said in capsys.readouterr().err


def run_apart(*args: str, before: str = "") -> str:
    code = f"{before}\nimport sys; from weft.cli.main import main\ntry: main(sys.argv[1:])\nfinally: "
    code += "assert not {'torch', 'matplotlib', 'diffusers'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "mask", *args],
        capture_output=True,
        text=True,
        timeout=60,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pipe_gets_plain_text_and_no_torch_is_loaded() -> None:
    shown = run_apart("radial", *SMALL)
    assert "\x1b" not in shown
    first, second, *_ = shown.splitlines()
    assert first == "radial · 6 heads · 5×7×11 + 9 text tokens"
    assert second.startswith("25 blocks of 16 · density ")


def test_terminal_gets_colors_unless_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in run_apart("radial", *SMALL)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = run_apart("radial", *SMALL)
    assert "\x1b" not in plain
    assert "█" in plain
