"""The `weft` command: a table of verbs that are imported on use, and the exit codes.

A new verb is one line in VERBS and one file with a function `run`, whose signature and docstring
become its options and its --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft import __version__
from weft.core.errors import InputError, MissingError, WeftError

VERBS = {
    "bench": ("weft.cli.bench", "Load a server with requests and measure its latencies."),
    "calibrate": ("weft.cli.calibrate", "Measure links and kernels of this machine for the planner."),
    "demo": ("weft.cli.demo", "Check an attention on a few local ranks, and make a video."),
    "doctor": ("weft.cli.doctor", "Show what this machine can do and how to add what it cannot."),
    "evaluate": ("weft.cli.evaluate", "Measure how well a trained model follows its prompts."),
    "generate": ("weft.cli.generate", "Make an image or a video from a local checkpoint."),
    "mask": ("weft.cli.mask", "Draw a mask; show its density and imbalance."),
    "models": ("weft.cli.models", "List the models that weft.parallelize supports."),
    "plan": ("weft.cli.plan", "Rank the ways to run a model's attention on a cluster."),
    "report": ("weft.cli.report", "Write a page with figures of a run, a schedule or a plan."),
    "run": ("weft.cli.run", "Run a script on several ranks."),
    "serve": ("weft.cli.serve", "Serve images and videos over HTTP, and a page."),
    "simulate": ("weft.cli.simulate", "Time plans on clusters of several sizes."),
    "testbed": ("weft.cli.testbed", "Build several machines on this one, with slow links between."),
    "train": ("weft.cli.train", "Train a video model by a recipe, on several ranks."),
    "verify": ("weft.cli.verify", "Check that N ranks compute what one rank computes."),
}
"""Verb → (module, line in `weft --help`)."""

# The first matching class decides.
EXIT_CODES: tuple[tuple[type[WeftError], int], ...] = (
    (InputError, 2),  # as for a mistyped option
    (MissingError, 3),
    (WeftError, 4),
)


class Verbs(TyperGroup):
    """Command group that lists its verbs from the table and imports only the one that is called."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, load(name) if listed and name else listed, rest


def load(name: str) -> Any:
    """Return the typer command of a verb."""
    from weft.cli.options import flatten

    verb = typer.Typer(add_completion=False, rich_markup_mode=None)
    module = import_module(VERBS[name][0])
    verb.command(name, context_settings=getattr(module, "SETTINGS", None))(flatten(module.run))
    return typer.main.get_command(verb)


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer passes it by position
    if asked:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


def _weft(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version.")
    ] = False,
) -> None:
    """Weave one long sequence over many devices."""


def _listed() -> None:
    """Placeholder of a verb in the list; `Verbs` resolves the real command."""


def _app() -> typer.Typer:
    app = typer.Typer(
        cls=Verbs,
        add_completion=False,
        rich_markup_mode=None,  # plain help: half the time of rich's, and [extras] stay as written
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_weft)
    for name, (_, line) in VERBS.items():
        app.command(name, help=line)(_listed)
    return app


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; a WeftError ends it with a sentence and a code, not a traceback."""
    try:
        _app()(args=args, prog_name="weft")
    except WeftError as error:
        sys.exit(_report(error))
    except ModuleNotFoundError as error:
        from weft.cli.packages import missing_package

        missing = missing_package(error.name or "")
        if missing is None:
            raise
        sys.exit(_report(missing))


def _report(error: WeftError) -> int:
    typer.echo(f"weft: {error.message}", err=True)
    if error.hint:
        typer.echo(error.hint, err=True)
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


if __name__ == "__main__":
    main()
