"""Check attention split over the ranks by every plan, forward and backward, against float64."""

from __future__ import annotations

import time
from collections.abc import Iterator

from weft.doctor.suite import Check, CheckContext
from weft.plan.strategy import factors, most_machines
from weft.run.measure import compare
from weft.run.measure.compare import Trial
from weft.run.world import world_of

ATTENTIONS = {"dense": (None, 0), "sparse": (0.3, 0), "text prefix": (None, 7)}
"""By name: the share of active tiles, and tokens that every rank holds."""
RESERVED_SECONDS = 3.0


def checks(ctx: CheckContext) -> Iterator[Check]:
    trials = list(_trials(ctx))
    longest = 0.0
    for done, (name, trial) in enumerate(trials):
        if least_left(ctx) < max(RESERVED_SECONDS, 1.5 * longest):
            note = f"{len(trials) - done} of {len(trials)} checks were not reached in time."
            yield Check(name="not reached", status="skipped", note=note)
            return
        start = time.monotonic()
        if ctx.begins(name):
            joined = compare.run(trial)
            if ctx.rank == 0:
                yield _judged(name, trial, joined, ctx)
        longest = max(longest, time.monotonic() - start)


def _trials(ctx: CheckContext) -> Iterator[tuple[str, Trial]]:
    """Yield every plan dense, then sparse, then with text: a time limit cuts the least different ones."""
    small = {"tokens": 131, "heads": 3, "head_dim": 16, "block": 16}
    sizes = small if ctx.is_rehearsal else {"tokens": 1021, "heads": 6, "head_dim": 64, "block": 64}
    plans = [(name, 1) for name in compare.plan_names(ctx.ranks)] + _across_machines(ctx)
    common = {"dtype": ctx.dtype, "device": ctx.device.type, "kv_heads": sizes["heads"]}
    for attention, (density, prefix) in ATTENTIONS.items():
        for plan, machines in plans:
            extra = {"asked": plan, "machines": machines, "density": density, "prefix": prefix}
            yield f"{plan} · {attention}", Trial(**sizes, **common, **extra)


def _across_machines(ctx: CheckContext) -> list[tuple[str, int]]:
    """Return plans for several machines, and how many; one machine counts as two (or three)."""
    least = next((n for n in (2, 3, 5, 7) if ctx.ranks % n == 0), 1)
    machines = ctx.machines if ctx.machines > 1 else least
    fits = [(u, r) for u, r in factors(ctx.ranks) if most_machines(u, machines, ctx.ranks // machines) > 1]
    names = [f"torus:{u}x{r}" for u, r in fits] + [f"swapped:{u}x{r}" for u, r in fits if r > 1]
    return [(name, machines) for name in names]


def _judged(name: str, trial: Trial, joined: compare.JoinedResult, ctx: CheckContext) -> Check:
    output_error, *gradient_errors = map(ctx.error, joined.tensors, compare.reference(trial))
    allowed = compare.TOLERANCE[trial.dtype]
    return Check(
        name=name,
        status="ok" if max(output_error, *gradient_errors) <= allowed else "wrong",
        note="" if joined.plan == trial.asked else f"plan {joined.plan}",
        numbers={
            "output_error": output_error,
            "gradient_error": max(gradient_errors),
            "allowed": allowed,
            "seconds": joined.seconds,
            "megabytes_sent": joined.bytes_sent / 1e6,
            "proved_steps": compare.prove(trial, ctx.ranks),
        },
    )


def least_left(ctx: CheckContext) -> float:
    """Return the least seconds left of any rank; all ranks call this together."""
    comm = world_of(None, compare.TIMEOUT).comm
    return min(milliseconds for (milliseconds,) in comm.all_gather_ints([round(ctx.left() * 1e3)])) / 1e3
