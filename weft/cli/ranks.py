"""Ranks for commands that run whole models; failures are reported once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from weft.core.errors import WeftError
from weft.run.spawn.launch import LaunchOutcome, Nodes, launch, usable_cores
from weft.run.spawn.pool import Pool, RankFailure


def model_ranks(size: int) -> Pool:
    return Pool(size, threads=max(1, usable_cores() // size), timeout=60.0)


class LaunchedRanks:
    """The world that torchrun started, with the interface of a Pool: every rank runs each call."""

    def __init__(self) -> None:
        from weft.run.world import world_of

        comm = world_of(None, 60.0).comm
        self.rank, self.size = comm.rank, comm.size

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the result of this rank."""
        return [fn(*args)]

    def __enter__(self) -> LaunchedRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the world: gloo may abort a process whose peers end while it still has their connections."""
        import torch.distributed as dist

        if kind is None and dist.is_initialized():
            dist.destroy_process_group()


def launched(
    ranks: int, nodes: Nodes | None = None, *, grace: float | None = None, expected: Collection[int] = ()
) -> int:
    """Run this command again on each of some ranks, and return its exit code.

    A rank that ends with a code of `expected` has already reported why.
    """
    outcome = launch(["-m", "weft.cli.main", *sys.argv[1:]], ranks, nodes, grace=grace)
    if outcome.traceback:  # the error of the command itself
        typer.echo(outcome.traceback.rstrip(), err=True)
    elif outcome.code not in expected and (outcome.rank is not None or outcome.reason):
        report_outcome(outcome)
    return outcome.code


def report_outcome(outcome: LaunchOutcome) -> int:
    """Print why a launch failed, and return its exit code."""
    if outcome.rank is not None:
        text = f"weft: rank {outcome.rank} {outcome.reason}.\n{outcome.traceback}"
        typer.echo(text.rstrip(), err=True)
    elif outcome.code:
        typer.echo(f"weft: {outcome.reason or 'stopped.'}", err=True)
    return outcome.code


def run_once(pool: Pool | LaunchedRanks, fn: Callable[..., Any], *args: Any) -> list[Any]:
    with report_once():
        return pool.run(fn, *args)


@contextmanager
def report_once() -> Iterator[None]:
    """Report an error that all ranks raise as one sentence, and any other failure by one traceback."""
    try:
        yield
    except RankFailure as failure:
        first = next(iter(failure.failures.values()))
        if isinstance(first.error, WeftError):
            raise first.error from failure
        typer.echo(first.traceback, err=True, nl=False)
        raise
