"""Strategies: attention split over the ranks by every plan, forward and backward, against float64."""

from __future__ import annotations

import time
from collections.abc import Iterator

from weft.doctor.part import Check, Site
from weft.plan.strategy import factors, most_machines
from weft.run import check
from weft.run.check import Trial
from weft.run.world import world_of

ATTENTIONS = {"dense": (None, 0), "sparse": (0.3, 0), "text prefix": (None, 7)}
"""By name: the share of active tiles, and tokens that every rank holds."""
RESERVED_SECONDS = 3.0


def checks(site: Site) -> Iterator[Check]:
    trials = list(_trials(site))
    longest = 0.0
    for done, (name, trial) in enumerate(trials):
        if least_left(site) < max(RESERVED_SECONDS, 1.5 * longest):
            note = f"{len(trials) - done} of {len(trials)} checks were not reached in time."
            yield Check(name="not reached", status="skipped", note=note)
            return
        start = time.monotonic()
        if site.begins(name):
            joined = check.run(trial)
            if site.rank == 0:
                yield _judged(name, trial, joined, site)
        longest = max(longest, time.monotonic() - start)


def _trials(site: Site) -> Iterator[tuple[str, Trial]]:
    """Every plan dense, then sparse, then with text: a time limit cuts what differs least."""
    small = {"tokens": 131, "heads": 3, "head_dim": 16, "block": 16}
    sizes = small if site.is_rehearsal else {"tokens": 1021, "heads": 6, "head_dim": 64, "block": 64}
    plans = [(name, 1) for name in check.plan_names(site.ranks)] + _across_machines(site)
    how = {"dtype": site.dtype, "device": site.device.type, "kv_heads": sizes["heads"]}
    for attention, (density, prefix) in ATTENTIONS.items():
        for plan, machines in plans:
            extra = {"asked": plan, "machines": machines, "density": density, "prefix": prefix}
            yield f"{plan} · {attention}", Trial(**sizes, **how, **extra)


def _across_machines(site: Site) -> list[tuple[str, int]]:
    """Plans for several machines, and how many. On one, its ranks are taken for two (or three) machines'."""
    least = next((n for n in (2, 3, 5, 7) if site.ranks % n == 0), 1)
    machines = site.machines if site.machines > 1 else least
    fits = [(u, r) for u, r in factors(site.ranks) if most_machines(u, machines, site.ranks // machines) > 1]
    names = [f"torus:{u}x{r}" for u, r in fits] + [f"swapped:{u}x{r}" for u, r in fits if r > 1]
    return [(name, machines) for name in names]


def _judged(name: str, trial: Trial, joined: check.Joined, site: Site) -> Check:
    expected = check.reference(trial)
    output_error, *gradient_errors = map(site.error, joined.tensors, expected)
    allowed = check.TOLERANCE[trial.dtype]
    worst = max(output_error, *gradient_errors)
    return Check(
        name=name,
        status="ok" if worst <= allowed else "wrong",
        note="" if joined.plan == trial.asked else f"plan {joined.plan}",
        numbers={
            "output_error": output_error,
            "gradient_error": max(gradient_errors),
            "allowed": allowed,
            "seconds": joined.seconds,
            "megabytes_sent": joined.bytes_sent / 1e6,
            "proved_steps": check.prove(trial, site.ranks),
        },
    )


def least_left(site: Site) -> float:
    """Return the seconds that the rank with the least has left; the same on all ranks, which all must ask."""
    comm = world_of(None, check.TIMEOUT).comm
    return min(milliseconds for (milliseconds,) in comm.gather_numbers([round(site.left() * 1e3)])) / 1e3
