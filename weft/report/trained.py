"""Summarize a training run: figures, verdict and a table of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.core import units
from weft.report.training import Run, finite, mean, median, share


def summary(run: Run) -> dict[str, Any]:
    """Return the figures of the summary table; None if the log lacks them."""
    end = slice(-run.window, None)
    loss, seconds = run.values["loss"], run.values["seconds"]
    held_out = run.validation[np.isfinite(run.validation[:, 1])]
    best = held_out[held_out[:, 1].argmin()] if len(held_out) else (math.nan, math.nan)
    now = run.now.values()
    broken = run.step[~np.isfinite(loss)]
    figures = {
        "step": run.last,
        "total": run.total,
        "finished": run.finished,
        "loss": mean(loss[end]),
        "validation": held_out[-1, 1] if len(held_out) else math.nan,
        "best": best[1],
        "best_step": best[0],
        "samples_per_second": median(run.values["samples"][end]),
        "tokens_per_second": median(run.values["tokens"][end]),
        "step_seconds": median(seconds[end]),
        "seconds": run.wall if run.wall == run.wall else run.every * float(finite(seconds).sum()) or math.nan,
        "layers": len(now) or None,
        "sparse_layers": sum(one.sparse for one in now) if now else None,
        "density": mean([share(one) for one in now]),
        "coverage": mean([one.coverage for one in now]),
        "lowest_coverage": min((one.coverage for one in now if one.coverage == one.coverage), default=None),
        "not_finite_from": broken[0] if len(broken) else None,
    }
    return {name: None if value != value else value for name, value in figures.items()}


def rows(run: Run) -> dict[str, tuple[str, str]]:
    """Return the rows of the summary table: a value and a note by label."""
    known = summary(run)
    left = known["step_seconds"] and known["step_seconds"] * max(0, run.total - run.last)
    state = "finished" if run.finished else "the log ends here: under way, or broken off"
    best = known["best"] is not None and f"; best {known['best']:.4f} at step {known['best_step']:,.0f}"
    late = f"of the last {run.window} {run.steps}" if run.window > 1 else "of the last one"
    candidates = [
        ("steps", f"{run.last:,} of {run.total:,}", True, state),
        ("loss", "{loss:.4f}", known["loss"], f"mean {late}"),
        ("validation", "{validation:.4f}", known["validation"], f"held-out loss{best or ''}"),
        ("step time", units.time(known["step_seconds"] or 0), known["step_seconds"], f"median {late}"),
        ("speed", "{samples_per_second:,.3g} samples/s", known["samples_per_second"], _tokens(known)),
        (
            "time",
            units.clock(known["seconds"] or 0),
            known["seconds"],
            f"of the run; {units.clock(left or 0)} to go",
        ),
        ("sparse layers", "{sparse_layers} of {layers}", known["layers"], "the others compute everything"),
        ("computed", "{density:.1%}", known["density"], "of all attention; a dense layer counts in full"),
        ("coverage", "{coverage:.1%}", known["coverage"], _coverage(known)),
    ]
    return {
        label: (text.format(**known), note) for label, text, figure, note in candidates if figure is not None
    }


def about(run: Run) -> str:
    """Return one line: data, attention, ranks, versions, and defects of the log."""
    recipe = run.facts.get("recipe") or {}
    known = {
        "{}": (recipe.get("data") or {}).get("set"),
        "attention {}": (recipe.get("sparse") or {}).get("method"),
        "{} ranks": run.facts.get("ranks"),
        "{} parameters": run.facts.get("parameters") and units.count(run.facts["parameters"]),
        "torch {}": run.facts.get("torch"),
        "resumed {}×": len(run.resumed),
        "lines of the log that cannot be read: {}": run.unreadable,
    }
    return " · ".join(["training run", *(text.format(value) for text, value in known.items() if value)])


def verdict(run: Run) -> str:
    """Return the verdict in a sentence."""
    known = summary(run)
    if known["not_finite_from"] is not None:
        return f"The loss is not a number from step {known['not_finite_from']:,.0f} on."
    seconds = run.values["seconds"]
    if run.changes and known["sparse_layers"]:
        dense, sparse = median(seconds[run.step <= run.dense_until]), known["step_seconds"]
        if sparse and dense == dense:
            return (
                f"A step takes {units.time(sparse)}; with all layers dense it took {units.time(dense)}: "
                f"{dense / sparse:.2f}× as fast."
            )
    if not run.layers:
        return "All attention is dense: the log has nothing about sparsity."
    return f"{known['sparse_layers']} of {known['layers']} layers are sparse."


def layer_rows(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return the table of layers at their latest readings."""
    table = [
        [
            layer,
            "sparse" if one.sparse else "dense",
            _share(mean(one.sparsity)),
            f"{_share(one.sparsity.min())} to {_share(one.sparsity.max())}" if one.sparsity.size else "–",
            _share(share(one)),
            _share(one.coverage),
            _share(one.recall),
            _share(one.keys),
        ]
        for layer, one in run.now.items()
    ]
    return ["layer", "mode", "sparsity", "its heads", "computed", "coverage", "recall", "predictor"], table


def _share(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def _tokens(known: Mapping[str, Any]) -> str:
    tokens = known["tokens_per_second"]
    return f"{units.count(tokens)} tokens/s" if tokens else "of all ranks"


def _coverage(known: Mapping[str, Any]) -> str:
    low = known["lowest_coverage"]
    what = (
        "is selected" if known["sparse_layers"] else "would be found"
    )  # by predictors, while all layers are dense
    return f"of the mass {what}; lowest layer {low:.1%}" if low is not None else ""
