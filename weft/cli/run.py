"""`weft run`: a script on several ranks, with one traceback if it fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.numbers import meeting_point
from weft.core.errors import InputError

# Options that are not weft's are the script's.
SETTINGS = {"ignore_unknown_options": True}


def run(
    script: Annotated[Path, typer.Argument(help="The Python file that every rank runs.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="Its arguments; after -- even those that weft has too.")
    ] = None,
    *,
    ranks: Annotated[int, typer.Option(help="Ranks to start on this machine.")] = 2,
    nodes: Annotated[int, typer.Option(help="Machines; this command is given on each of them.")] = 1,
    node: Annotated[int, typer.Option(help="Which machine this is, from 0.")] = 0,
    master: Annotated[str, typer.Option(help="HOST:PORT of machine 0.")] = "",
) -> None:
    """Run a script on several ranks, as torchrun does, with one traceback if it fails.

    Ctrl-C is a KeyboardInterrupt in the script, on every rank; a second one kills.
    """
    if not script.is_file():
        raise InputError(f"There is no script {script}.", hint="weft run SCRIPT [ARGS] --ranks 4")
    if ranks < 1 or nodes < 1 or not 0 <= node < nodes:
        given = f"ranks={ranks}, nodes={nodes}, node={node}"
        raise InputError(f"{given}: no such world.", hint="Ranks and nodes are 1 or more, node < nodes.")
    if nodes > 1:
        meeting_point(master, nodes)
    from weft.run.launch import Machines, launch

    machines = Machines(count=nodes, this=node, master=master)
    ended = launch([str(script), *(args or [])], ranks, machines)
    if ended.rank is not None:
        typer.echo(f"weft: rank {ended.rank} {ended.how}.\n{ended.stack}".rstrip(), err=True)
    elif ended.code:
        typer.echo("weft: stopped.", err=True)
    sys.exit(ended.code)
