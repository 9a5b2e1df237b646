"""`weft run`: run a script on several ranks, with one traceback if it fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.nodes import NodeOptions
from weft.cli.options import Ranks
from weft.core.errors import InputError

# Unknown options belong to the script.
SETTINGS = {"ignore_unknown_options": True}


def run(
    script: Annotated[Path, typer.Argument(help="The Python file that every rank runs.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="Its arguments; after -- even those that weft has too.")
    ] = None,
    *,
    ranks: Ranks = 2,
    machines: NodeOptions,
) -> None:
    """Run a script on several ranks, as torchrun does, with one traceback if it fails.

    Ctrl-C is a KeyboardInterrupt in the script, on every rank; a second one kills. On one machine nothing
    listens beyond loopback; several machines authenticate with the token, over TLS.
    """
    if not script.is_file():
        raise InputError(f"Script {script} not found.", hint="weft run SCRIPT [ARGS] --ranks 4")
    nodes = machines.validated()
    from weft.cli.ranks import report_outcome
    from weft.run.spawn.launch import launch

    sys.exit(report_outcome(launch([str(script), *(args or [])], ranks, nodes)))
