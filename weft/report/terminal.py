"""Text views without color: a timeline of at most 80 columns, and bars of load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.core import units
from weft.core.timeline import Timeline

WIDTH = 80
MOST_ROWS = 8
SPARKS = 64
COMPUTES, WAITS, IDLE = "█", "░", " "
EIGHTHS = " ▏▎▍▌▋▊▉█"
BARS = "▁▂▃▄▅▆▇█"


def text_gantt(timeline: Timeline, width: int = WIDTH) -> list[str]:
    """Return one line per rank: its dominant activity in each column; the slowest rank is always shown."""
    ranks = shown_rows(timeline)
    label = len(f"rank {timeline.ranks - 1}") + 2
    columns = width - label - 5
    rows = [
        f"{f'rank {rank}':<{label}}{_row(timeline, rank, columns)}{_busy(timeline, rank):>5}"
        for rank in ranks
    ]
    end = units.time(timeline.seconds)
    axis = " " * label + "0" + end.rjust(columns - 1)
    left = timeline.ranks - len(ranks)
    more = f" · {left} more ranks" if left else ""
    return [*rows, axis, f"{COMPUTES} computes  {WAITS} waits for data  blank: idle{more}"]


def shown_rows(timeline: Timeline) -> list[int]:
    """Return all ranks, or the slowest and some others."""
    if timeline.ranks <= MOST_ROWS:
        return list(range(timeline.ranks))
    step = -(-timeline.ranks // (MOST_ROWS - 1))
    return sorted({*range(0, timeline.ranks, step), timeline.slowest})


def _row(timeline: Timeline, rank: int, columns: int) -> str:
    """Return the dominant activity of each column: compute, wait or idle."""
    share = np.zeros((2, columns))
    for span in timeline.of(rank):
        if span.lane == "compute" and timeline.seconds:
            kind = 1 if span.kind in ("wait", "barrier", "launch") else 0
            _spread(share[kind], span.start / timeline.seconds, span.end / timeline.seconds)
    idle = 1 - share.sum(axis=0)
    order = np.argmax([*share, idle], axis=0)
    return "".join((COMPUTES, WAITS, IDLE)[which] for which in order)


def _spread(shares: np.ndarray, start: float, end: float) -> None:
    """Add the overlap of an interval with each column."""
    edges = np.arange(shares.size + 1)
    low, high = start * shares.size, end * shares.size
    shares += np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None)


def _busy(timeline: Timeline, rank: int) -> str:
    return f"{timeline.computing[rank] / (timeline.seconds or 1.0):.0%}"


def load_lines(loads: Sequence[float], bound: float = 1.0) -> list[str]:
    """Return one bar per rank as a multiple of the mean, and the lower bound of the longest."""
    mean = float(np.mean(loads)) or 1.0
    ratios = [load / mean for load in loads]
    shown = _chosen(ratios)
    label = len(f"rank {len(loads) - 1}") + 2
    scale = (WIDTH - label - 8) / max(*ratios, bound)
    rows = [f"{f'rank {rank}':<{label}}{_bar(ratios[rank] * scale)} {ratios[rank]:.3f}×" for rank in shown]
    return [*rows, f"{f'bound {bound:.3f}× ▲':>{label + round(bound * scale)}}"]


def _chosen(ratios: Sequence[float]) -> list[int]:
    """Return all ranks, or the longest and the shortest."""
    if len(ratios) <= MOST_ROWS:
        return list(range(len(ratios)))
    by_load = sorted(range(len(ratios)), key=lambda rank: (-ratios[rank], rank))
    return sorted(by_load[: MOST_ROWS // 2] + by_load[-MOST_ROWS // 2 :])


def _bar(length: float) -> str:
    whole, eighths = divmod(round(8 * length), 8)
    return "█" * whole + EIGHTHS[eighths].strip()


def sparkline(values: np.ndarray) -> str:
    """Return a sparkline of the values; NaN is blank."""
    parts = [bucket[np.isfinite(bucket)] for bucket in np.array_split(values, min(SPARKS, len(values)))]
    means = np.array([bucket.mean() if bucket.size else np.nan for bucket in parts])
    if not np.isfinite(means).any():
        return " " * len(means)
    # Logarithmic, as on the page; on a linear scale the first steps would flatten the others.
    means = np.log(means) if np.nanmin(means) > 0 else means
    low, high = np.nanmin(means), np.nanmax(means)
    scaled = (means - low) / ((high - low) or 1.0) * (len(BARS) - 1)
    return "".join(" " if np.isnan(one) else BARS[round(one)] for one in scaled)
