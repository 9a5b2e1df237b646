"""The planner against db-SP's greedy, xDiT's deal and the bound: balance reached, and the time to plan.

    python -m bench.planner [--quick] [--json FILE]

Heads: real counts of Wan2.1-14B with SpargeAttn, one run, from ../shared/data beside the checkout.
Blocks: evolving synthetic masks, 592 blocks × 40 heads. Nothing runs on ranks here; bench.balance does
that.
"""

from __future__ import annotations

from rich.progress import Progress

from bench import blocks, heads
from bench.rows import Results, main


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - bench.rows calls it so
    report = Results()
    task = progress.add_task("heads", total=2)
    for name, module in (("heads", heads), ("blocks", blocks)):
        progress.update(task, description=name)
        report.rows.extend(module.rows(quick))
        progress.advance(task)
    return report


if __name__ == "__main__":
    main(measure, __doc__ or "")
