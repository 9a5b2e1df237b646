"""`weft demo`: check attention on 2 and 3 local ranks against one process, and generate a video on two."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import output
from weft.cli.generate import check_packages
from weft.cli.generate import run as generate
from weft.cli.numbers import counts
from weft.cli.verify import run_trials
from weft.core.errors import CommError

if TYPE_CHECKING:
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
    from weft.run.measure.compare import Trial

    trials = {
        name: Trial(tokens=TOKENS, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, rounds=3, **kind)
        for name, kind in KINDS.items()
    }
    with output.progress("one process …"):
        alone = {name: _seconds_alone(trial) for name, trial in trials.items()}
    rows = [(world, name, outcome) for world, name, _, outcome in run_trials(dict.fromkeys(worlds, trials))]
    _show(rows, alone)
    if not all(outcome.holds for _, _, outcome in rows):
        raise CommError("A result differs from one process by more than rounding.")
    typer.echo(f'\n$ weft generate "{PROMPT}" --ranks 2 --seed 1 -o {out}')
    generate(PROMPT, out=out, ranks=2, seed=1)


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


def _show(rows: list[tuple[int, str, TrialResult]], alone: dict[str, float]) -> None:
    sizes = f"{TOKENS} tokens · {HEADS} heads × {HEAD_DIM} · float32"
    typer.echo(output.fill(f"One DiT block's attention · {sizes} · one thread a rank"))
    output.table(
        [
            {
                "attention": name,
                "ranks": str(world),
                "plan": outcome.plan,
                "alone": f"{alone[name] * 1e3:.0f} ms",
                "time": f"{outcome.seconds * 1e3:.0f} ms",
                "faster": f"{alone[name] / outcome.seconds:.2f}×",
                "sent": f"{outcome.bytes_sent / 1e6:.1f} MB",
                "error": f"{outcome.output_error:.0e}",
                "grads": f"{outcome.gradient_error:.0e}",
                "": "same" if outcome.holds else "DIFFERS",
            }
            for world, name, outcome in rows
        ]
    )
    output.note(
        "alone, time: median of 3 forwards of one rank and of all · sent: by the busiest rank, one forward · "
        "error, grads: largest difference from one process in float64"
    )
