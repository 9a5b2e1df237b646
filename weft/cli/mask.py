"""`weft mask`: draw a block mask, and show its density and its imbalance over ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import output
from weft.cli.numbers import sizes
from weft.cli.options import Block, Heads, Json, at_least
from weft.core.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from weft.core.mask import BlockMask
    from weft.masks.grid import TokenGrid

SIDE = 64
"""Maximum width and height of the picture in dots."""
EMPTY, FULL = (34, 34, 40), (86, 180, 233)
"""Colors of a dot whose tiles are all inactive and all active."""


@dataclass(frozen=True)
class Split:
    """An unbalanced Ulysses × ring split of heads and blocks, and its imbalance."""

    ulysses: int
    ring: int
    imbalance: float
    """Largest load / mean if each ring step waits for its slowest rank; `without_barriers`: if none does."""
    without_barriers: float
    bound: float
    """Lower bound for any assignment of whole heads to Ulysses groups."""


def run(
    spec: Annotated[
        str, typer.Argument(metavar="SPEC", help="NAME or NAME:option=value,…; omit it to list all masks.")
    ] = "",
    *,
    heads: Heads = 40,
    grid: Annotated[str, typer.Option(help="Video tokens TxHxW; Wan2.1 has 21x30x52 at 480p.")] = "21x30x52",
    text: Annotated[int, typer.Option(help="Text tokens before the video; they are never masked.")] = 0,
    block: Block = 64,
    head: Annotated[int, typer.Option(help="The head to draw.")] = 0,
    ranks: Annotated[int, typer.Option(help="Ranks to share the work.", callback=at_least(1))] = 8,
    seed: Annotated[int, typer.Option(help="Random seed of the mask.")] = 0,
    as_json: Json = False,
) -> None:
    """Draw a mask; show its density and its imbalance over ranks.

    weft mask sta:window=3x3x3,dense=0.1 --heads 24
    """
    if not spec:
        _list_masks()
        return
    if heads > 0 and not 0 <= head < heads:
        raise InputError(f"--head must be in [0, {heads - 1}], got {head}.")
    from weft.masks.spec import mask_from_spec

    tokens = read_grid(grid, text)
    with output.progress(f"drawing {spec} …"):
        mask = mask_from_spec(spec, heads=heads, grid=tokens, block=block, seed=seed)
    if as_json:
        about = {"spec": spec, "heads": heads, "grid": tokens.extent, "text": text, "block": block}
        cuts = [asdict(cut) for cut in natural_cuts(mask, ranks)]
        measured = {"density": mask.density, "densities": _densities(mask), "digest": mask.digest}
        typer.echo(json.dumps({**about, "seed": seed, **measured, "ranks": ranks, "cuts": cuts}, indent=2))
    else:
        prefix = f" + {text} text" if text else ""
        typer.echo(f"{spec} · {heads} heads · {'×'.join(map(str, tokens.extent))}{prefix} tokens")
        _show(mask, head, ranks)


def read_grid(written: str, text: int = 0) -> TokenGrid:
    """Parse a grid written as TxHxW."""
    from weft.masks.grid import TokenGrid

    t, h, w = sizes(written, "frames x rows x columns", "21x30x52")
    if text < 0:
        raise InputError(f"--text must be >= 0, got {text}.")
    return TokenGrid(t, h, w, prefix=text)


def natural_cuts(mask: BlockMask, ranks: int) -> Iterator[Split]:
    """Yield every U × R split: U contiguous runs of heads, R contiguous runs of query and of key blocks."""
    import numpy as np

    from weft.core.indices import split_evenly
    from weft.plan.balance import bound, ratio, step_ratio
    from weft.plan.counts import head_loads, tile_loads
    from weft.plan.strategy import factors

    loads = head_loads(mask)
    for ulysses, ring in reversed(factors(ranks)):
        if ulysses > mask.heads or ring > mask.q_blocks:
            continue
        starts = [start for start, _ in split_evenly(mask.q_blocks, ring)]
        tiles = np.empty((ulysses, ring, ring), dtype=np.int64)
        for loads_of_group, span in zip(tiles, split_evenly(mask.heads, ulysses), strict=True):
            rows = np.add.reduceat(tile_loads(mask, [range(*span)])[0], starts, axis=0)
            loads_of_group[:] = np.add.reduceat(rows, starts, axis=1)
        yield Split(ulysses, ring, step_ratio(tiles), ratio(tiles.sum(axis=2)), bound(loads, ulysses))


def _densities(mask: BlockMask) -> list[float]:
    """Return the active share of each head's query-key token pairs."""
    from weft.plan.counts import head_loads

    return (head_loads(mask) / (mask.q_len * mask.kv_len)).tolist()


def _show(mask: BlockMask, head: int, ranks: int) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    densities = _densities(mask)
    least, middle, most = min(densities), median(densities), max(densities)
    text = f"{mask.q_blocks} blocks of {mask.block_q} · density {mask.density:.1%} · "
    typer.echo(output.fill(f"{text}of heads: least {least:.1%}, median {middle:.1%}, most {most:.1%}"))
    dot = -(-mask.q_blocks // SIDE)
    typer.echo(f"\nhead {head}, {densities[head]:.1%} · a dot is {_tiles(dot)} · queries down, keys across")
    for line in _draw(mask, head, console):
        console.print(line)
    if not most:
        typer.echo("\nNothing is active: no rank has anything to do.")
        return
    cuts = list(natural_cuts(mask, ranks))
    if not cuts:
        typer.echo(f"\n{mask.heads} heads and {mask.q_blocks} blocks leave some of {ranks} ranks idle.")
        return
    typer.echo(f"\nOn {output.counted(ranks, 'rank')}, unbalanced: largest load / mean (1.000 is even):")
    output.table(
        [
            {
                "ulysses × ring": f"{cut.ulysses} × {cut.ring}",
                "each step waits": f"{cut.imbalance:.3f}",
                "no waiting": f"{cut.without_barriers:.3f}",
                "best with whole heads": f"{cut.bound:.3f}",
            }
            for cut in cuts
        ]
    )


def _tiles(dot: int) -> str:
    return "one tile" if dot == 1 else f"up to {dot}×{dot} tiles"


def _draw(mask: BlockMask, head: int, console: Console) -> Iterator[Text]:
    """Yield text lines, each two rows of dots; in color if the terminal supports it."""
    import numpy as np
    from rich.text import Text

    from weft.core.indices import split_evenly

    side = min(SIDE, mask.q_blocks)
    starts, stops = np.transpose(split_evenly(mask.q_blocks, side))
    tiles = mask.patterns[mask.pattern_of[head]].astype(np.float64)
    dots = np.add.reduceat(np.add.reduceat(tiles, starts, axis=0), starts, axis=1)
    dots /= np.outer(stops - starts, stops - starts)
    dots = np.pad(dots, ((0, side % 2), (0, 0)))
    if console.is_terminal and not console.no_color and console.color_system in ("256", "truecolor"):
        for upper, lower in zip(dots[::2], dots[1::2], strict=True):
            line = Text()
            for above, below in zip(upper, lower, strict=True):
                line.append("▀", style=f"{_color(above)} on {_color(below)}")
            yield line
        return
    for upper, lower in zip(dots[::2], dots[1::2], strict=True):
        yield Text("".join(_character(above, below) for above, below in zip(upper, lower, strict=True)))


def _character(above: float, below: float) -> str:
    """Return a half block for the denser of two dots, or a shade of their mean if they are similar."""
    if abs(above - below) > 0.5:
        return "▀" if above > below else "▄"
    return " ░▒▓█"[ceil(2 * (above + below))]


def _color(share: float) -> str:
    mixed = (round(empty + share * (full - empty)) for empty, full in zip(EMPTY, FULL, strict=True))
    return "rgb({},{},{})".format(*mixed)


def _list_masks() -> None:
    from weft.masks.spec import PRODUCERS, options, show

    typer.echo("Masks, with their options and defaults:\n")
    for name, make in PRODUCERS.items():
        defaults = ",".join(f"{key}={show(value)}" for key, value in options(name).items())
        typer.echo(f"  {name}{':' if defaults else ''}{defaults.replace('file=', '')}")
        typer.echo(f"      {(make.__doc__ or '').splitlines()[0]}")
    typer.echo("\nTry: weft mask sta:window=3x3x3,dense=0.1 --heads 24")
