"""Block-sparse attention kernels on the CPU against the ideal: SDPA's own dense time × density.

    python -m bench.kernels [--quick] [--json FILE]

H = 8, float32, random masks with the same expected density in every row. In each round every
contender runs once: torch's SDPA on the dense problem (the yardstick), weft's compiled kernel, and
two ways that exist today, FlexAttention and gathering K/V for SDPA row by row. With one thread the
clock is CPU time, which other processes do not touch; with two it is wall time. FlexAttention is
left out of --quick (its compilation alone takes half a minute) and has no backward on the CPU. Rows
are printed as they come (on stderr), so that a run that is cut short is not lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from rich.progress import Progress

from bench.rows import Line, Results, Round, Row, interleave, main, median_ratio, quartiles, take_turns
from weft.masks.random import random_mask
from weft.run.kernels.cpu import Cpu
from weft.run.kernels.exact import Exact
from weft.run.kernels.tiles import Tiles

HEADS = 8
FORWARD_BAR = {128: 0.92, 64: 0.88}
DENSE_BAR = 0.95
BACKWARD_BAR = 0.85
DENSITIES = (1.0, 0.5, 0.2, 0.1)
PEER_DENSITIES = (0.2, 0.1)  # at 0.5 the peers take longer than all the rest


@dataclass(frozen=True)
class Grid:
    """One run of interleaved contenders: everything that shares its dense yardstick."""

    tokens: int
    dim: int
    threads: int
    backward: bool
    seconds: float
    blocks: tuple[int, ...] = (128, 64)
    densities: tuple[float, ...] = DENSITIES
    flex: bool = False
    rounds: int = 3  # at least

    @property
    def cells(self) -> list[tuple[int, float]]:
        """(block, density) of each row; without a mask the size of a block plays no part."""
        pairs = [(block, density) for block in self.blocks for density in self.densities]
        return [(block, density) for block, density in pairs if density < 1 or block == self.blocks[0]]

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        return f"S={self.tokens} D={self.dim} {way} {self.threads} thread{'s' * (self.threads > 1)}"


def grids(*, quick: bool) -> list[Grid]:
    if quick:
        few = (1.0, 0.2)
        return [
            Grid(4096, 64, 1, backward=False, seconds=7, densities=few),
            Grid(4096, 64, 1, backward=True, seconds=9, blocks=(128,), densities=few),
            Grid(4096, 64, 2, backward=False, seconds=5, densities=few),
            Grid(4096, 128, 1, backward=False, seconds=5, blocks=(64,), densities=(0.1,)),
            Grid(4096, 128, 1, backward=True, seconds=7, blocks=(64,), densities=(0.2,), rounds=2),
        ]
    return [
        Grid(
            tokens,
            dim,
            threads,
            backward,
            seconds=10,
            flex=not backward and threads == 1,
            rounds=3 if tokens == 4096 else 2,  # one of the largest takes 40 s
        )
        for tokens in (4096, 8192)
        for dim in (64, 128)
        for threads in (1, 2)
        for backward in (False, True)
    ]


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - bench.rows calls it so
    report = Results()
    todo = grids(quick=quick)
    task = progress.add_task("kernels", total=len(todo))
    for grid in todo:
        progress.update(task, description=str(grid))
        torch.set_num_threads(grid.threads)
        stage = Contest(grid)
        play = interleave(lambda turn, s=stage: [take_turns(s.contenders, turn)], grid.seconds, grid.rounds)
        rounds = list(play)
        for block, density in grid.cells:
            _report(report, stage, rounds[1:] if len(rounds) > 3 else rounds, block, density)
            row = report.rows[-1]
            verdict = "" if row.holds else " MISSED"
            progress.console.print(f"{row.case}: {row.measured:.0f} ms, {row.bar}{verdict}", highlight=False)
        progress.advance(task)
    return report


class Contest:
    """Tensors of a grid and the callables that take turns."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        torch.manual_seed(grid.tokens + grid.dim)
        shape = (1, HEADS, grid.tokens, grid.dim)
        self.q, self.k, self.v, self.grad = (torch.randn(shape) for _ in range(4))
        self.scale = grid.dim**-0.5
        self.share: dict[tuple[int, float], float] = {}
        self.notes: dict[str, str] = {}
        whole = Tiles(None, grid.tokens, grid.tokens, grid.tokens, grid.tokens)
        self.contenders: dict[str, Callable[[], object]] = {"dense": self._call(Exact(), whole)}
        for block, density in grid.cells:
            self._add(block, density)

    def _add(self, block: int, density: float) -> None:
        grid = self.grid
        mask = random_mask(HEADS, grid.tokens, grid.tokens, block=block, density=density, seed=block)
        self.share[block, density] = mask.density
        active = None if mask.is_dense else mask.tiles
        tiles = Tiles(active, block, block, grid.tokens, grid.tokens)
        self.contenders[name("weft", block, density)] = self._call(Cpu(), tiles)
        if density in PEER_DENSITIES and not grid.backward:
            self.contenders[name("gather + SDPA", block, density)] = self._call(Exact(), tiles)
            if grid.flex:
                self._add_flex(block, density, mask.tiles)

    def _call(self, kernel: Cpu | Exact, tiles: Tiles) -> Callable[[], object]:
        if not self.grid.backward:
            return lambda: kernel.attend(self.q, self.k, self.v, tiles, self.scale)
        done = kernel.attend(self.q, self.k, self.v, tiles, self.scale)
        return lambda: kernel.attend_backward(self.grad, self.q, self.k, self.v, done, tiles, self.scale)

    def _add_flex(self, block: int, density: float, active: np.ndarray) -> None:
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        tiles = torch.as_tensor(active)[None]
        counts = tiles.sum(-1, dtype=torch.int32)
        order = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
        none = torch.zeros_like(counts)
        size = (block, block)
        mask = BlockMask.from_kv_blocks(none, torch.zeros_like(order), counts, order, BLOCK_SIZE=size)
        torch.compiler.reset()  # it compiles one function eight times at most
        flex = torch.compile(flex_attention, dynamic=False)
        call = name("FlexAttention", block, density)
        try:
            flex(self.q, self.k, self.v, block_mask=mask)
        except Exception as error:  # noqa: BLE001 - a peer that raises is shown as such
            self.notes[call] = f"raises: {str(error).splitlines()[0][:80]}"
            return
        self.contenders[call] = lambda: flex(self.q, self.k, self.v, block_mask=mask)


def name(who: str, block: int, density: float) -> str:
    return f"{who} block {block} density {density}"


def _report(report: Results, stage: Contest, rounds: list[Round], block: int, density: float) -> None:
    grid = stage.grid

    def seconds(who: str) -> list[float]:
        return [r.took[who].cpu if grid.threads == 1 else r.took[who].wall for r in rounds]

    ours, dense = seconds(name("weft", block, density)), seconds("dense")
    share = stage.share[block, density]
    ideal = [second * share for second in dense]
    peers: dict[str, list[float]] = {}
    for who in ("gather + SDPA", "FlexAttention"):
        if (full := name(who, block, density)) in stage.contenders:
            peers[who] = seconds(full)
    if density == 1:
        peers["SDPA"] = dense
    best = min(peers, key=lambda who: median(peers[who]), default="")
    bar = BACKWARD_BAR if grid.backward else DENSE_BAR if density == 1 else FORWARD_BAR[block]
    reached = median_ratio(ideal, ours)
    case = f"{grid} block {block} density {density}"
    row = Row(
        case=case,
        measured=median(ours) * 1e3,
        peer=median(peers[best]) * 1e3 if best else None,
        peer_name=best,
        limit=median(ideal) * 1e3,
        bar=f"{reached:.2f} of ideal, must be ≥ {bar}",
        holds=reached >= bar,
    )
    report.rows.append(row)
    line = Line(case=case, name="weft", measured=row.measured, quartiles=quartiles([x * 1e3 for x in ours]))
    report.lines.append(line)
    for who, times in peers.items():
        ratio = median_ratio(times, ours)
        report.lines.append(
            replace(line, name=who, measured=median(times) * 1e3, quartiles=None, ratio=ratio)
        )
    for who, note in stage.notes.items():
        if who.endswith(f"block {block} density {density}"):
            report.lines.append(replace(line, name=who, measured=None, quartiles=None, note=note))


if __name__ == "__main__":
    main(measure, __doc__ or "")
