"""`weft train`: train a model by a recipe on several ranks, or resume its training."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import output
from weft.cli.nodes import NodeOptions
from weft.cli.options import Backend, RanksHere
from weft.cli.packages import need
from weft.core.errors import WeftError

GRACE_SECONDS = 600  # for the current step and its checkpoint


def run(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a .toml or .py.")],
    *,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder; runs/RECIPE by default.")
    ] = None,
    ranks: RanksHere = 1,
    steps: Annotated[int | None, typer.Option(help="Overrides the recipe's number of steps.")] = None,
    backend: Backend = "",
    machines: NodeOptions,
) -> None:
    """Train a video model, with dense attention or attention that becomes sparse where that is faster.

    weft train recipes/shapes.toml --ranks 2

    The folder gets log.jsonl, checkpoints, sheets of samples and the model. The same command resumes from the
    last checkpoint after Ctrl-C (which stops after the step, with a checkpoint) or a crash, also on another
    number of ranks. `weft report` draws a run. A recipe in .py is run as code; a .toml is only read.
    """
    need("torch", "safetensors", "av", "PIL", extra="train")
    from weft.run.world import is_launched
    from weft.train.recipe import Recipe

    config = Recipe.load(recipe)
    if steps is not None:
        config = replace(config, train=replace(config.train, steps=steps))
    if backend:
        config = replace(config, parallel=replace(config.parallel, backend=backend))
    folder = out or Path("runs") / recipe.stem
    if not is_launched():
        nodes = machines.validated()
        if ranks * nodes.count > 1:
            from weft.cli.ranks import launched

            sys.exit(launched(ranks, nodes, grace=GRACE_SECONDS))
    from weft.train.trainer import train

    try:
        train(config, folder, live=output.verbosity >= 0)
    except WeftError as error:
        if is_launched():  # the launcher shows the message of the first rank, once
            sys.exit("\n".join(line for line in (f"weft: {error.message}", error.hint) if line))
        raise
