"""`weft demo`: check attention on 2 and 3 local ranks against one process, and generate a video on two."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.generate import check_packages
from weft.cli.generate import run as generate
from weft.cli.numbers import counts
from weft.cli.tables import table
from weft.core.errors import CommError

if TYPE_CHECKING:
    from rich.console import Console

    from weft.run.measure.compare import Trial, TrialResult

# Wan2.1-1.3B has 12 heads; 16×8×16 latent tokens less one, so that no rank count divides it.
TOKENS, HEADS, HEAD_DIM = 2047, 12, 64

KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "text + video": {"prefix": 77},
    "sparse 25%": {"density": 0.25},
}


PROMPT = "a red circle moving left"


def run(
    *,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,3",
    out: Annotated[Path, typer.Option("--out", "-o", help="The video to write.")] = Path("demo.mp4"),
) -> None:
    """Check one DiT block's attention on a few local ranks, then generate a video with the small model."""
    from weft.generate import media

    worlds = counts(ranks, "ranks")
    media.check_target(out)
    check_packages(out, own=True)
    from rich.console import Console

    from weft.run.measure.compare import Trial

    console = Console()
    trials = {
        name: Trial(tokens=TOKENS, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, rounds=3, **kind)
        for name, kind in KINDS.items()
    }
    with console.status("one process …"):
        alone = {name: _seconds_alone(trial) for name, trial in trials.items()}
    rows = _measure(console, worlds, trials)
    _show(console, rows, alone)
    if not all(outcome.holds for _, _, outcome in rows):
        raise CommError("A result differs from one process by more than rounding.")
    console.print(f'\n$ weft generate "{PROMPT}" --ranks 2 --seed 1 -o {out}', highlight=False)
    generate(PROMPT, out=out, ranks=2, seed=1)


def _measure(
    console: Console, worlds: list[int], trials: dict[str, Trial]
) -> list[tuple[int, str, TrialResult]]:
    from weft.run.measure.compare import check
    from weft.run.spawn.pool import Pool

    rows: list[tuple[int, str, TrialResult]] = []
    with console.status("starting ranks …") as status:
        for world in worlds:
            with Pool(world) as pool:
                for name, trial in trials.items():
                    status.update(f"{world} ranks · {name}")
                    rows.append((world, name, check(pool, trial)))
    return rows


def _seconds_alone(trial: Trial) -> float:
    """Return the seconds of the same attention in one thread of this process, with weft's own kernel."""
    import torch

    from weft.run.attention import attention

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        q, k, v, _ = trial.tensors()
        attention(q, k, v, mask=trial.mask())
        start = time.perf_counter()
        attention(q, k, v, mask=trial.mask())
        return time.perf_counter() - start
    finally:
        torch.set_num_threads(threads)


def _show(console: Console, rows: list[tuple[int, str, TrialResult]], alone: dict[str, float]) -> None:
    sizes = f"{TOKENS} tokens · {HEADS} heads × {HEAD_DIM} · float32"
    console.print(f"One DiT block's attention · {sizes} · one thread a rank", highlight=False)
    columns = ("attention", "ranks", "plan", "alone", "time", "faster", "sent", "error", "grads", "")
    shown = table(columns, left=("attention", "plan"))
    for world, name, outcome in rows:
        shown.add_row(
            name,
            str(world),
            outcome.plan,
            f"{alone[name] * 1e3:.0f} ms",
            f"{outcome.seconds * 1e3:.0f} ms",
            f"{alone[name] / outcome.seconds:.2f}×",
            f"{outcome.bytes_sent / 1e6:.1f} MB",
            f"{outcome.output_error:.0e}",
            f"{outcome.gradient_error:.0e}",
            "same" if outcome.holds else "DIFFERS",
        )
    console.print(shown)
    console.print(
        "alone, time: median of 3 forwards of one rank and of all · sent: by the busiest rank, one forward · "
        "error, grads: largest difference from one process in float64"
    )
