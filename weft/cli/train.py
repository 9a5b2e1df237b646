"""`weft train`: train a model by a recipe on several ranks, or resume its training."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from weft.cli import nodes as node_options
from weft.cli.options import Backend
from weft.cli.packages import need
from weft.core.errors import InputError, WeftError

GRACE_SECONDS = 600  # for the current step and its checkpoint


def run(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a .toml or .py.")],
    *,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder; runs/RECIPE by default.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks to start here; under torchrun its world is used.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Overrides the recipe's number of steps.")] = None,
    backend: Backend = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress line.")] = False,
    nodes: node_options.Count = 1,
    node: node_options.Node = 0,
    master: node_options.Master = "",
    token_file: node_options.TokenFile = None,
    interface: node_options.Interface = "",
    tls_cert: node_options.TLSCert = None,
    tls_key: node_options.TLSKey = None,
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
    if ranks < 1:
        raise InputError(f"--ranks must be >= 1, got {ranks}.")
    if not is_launched():
        machines = node_options.nodes_of(nodes, node, master, token_file, interface, (tls_cert, tls_key))
        if ranks * machines.count > 1:
            from weft.cli.ranks import launched

            sys.exit(launched(ranks, machines, grace=GRACE_SECONDS))
    from weft.train.trainer import train

    try:
        train(config, folder, live=not quiet)
    except WeftError as error:
        if is_launched():  # the launcher shows the message of the first rank, once
            sys.exit("\n".join(line for line in (f"weft: {error.message}", error.hint) if line))
        raise
