"""Local ranks for the commands that run whole models, and their failures told once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from weft.core.errors import WeftError
from weft.run.launch import GRACE_SECONDS, Machines, launch, usable_cores
from weft.run.pool import Pool, RankFailure


def model_ranks(size: int) -> Pool:
    return Pool(size, threads=max(1, usable_cores() // size), timeout=60.0)


def launched(ranks: int, *, grace: int = GRACE_SECONDS) -> int:
    """This command again, on each of some ranks by torch's launcher; its exit code."""
    ended = launch(["-m", "weft.cli.main", *sys.argv[1:]], ranks, Machines(), grace=grace)
    if ended.stack:
        typer.echo(ended.stack.rstrip(), err=True)
    elif ended.rank is not None:
        typer.echo(f"weft: rank {ended.rank} {ended.how}.", err=True)
    return ended.code


def run_once(pool: Pool, fn: Callable[..., Any], *args: Any) -> list[Any]:
    with told_once():
        return pool.run(fn, *args)


@contextmanager
def told_once() -> Iterator[None]:
    """What all ranks of a run refuse alike is one sentence, and any other failure has one traceback."""
    try:
        yield
    except RankFailure as failure:
        first = next(iter(failure.failures.values()))
        if isinstance(first.error, WeftError):
            raise first.error from failure
        typer.echo(first.traceback, err=True, nl=False)
        raise
