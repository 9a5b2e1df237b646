"""The `weft` command: a table of verbs that are imported on use, and the exit codes.

A new verb is one line in VERBS and one file with a function `run`, whose signature and docstring
become its options and its --help.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from copy import copy
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft import __version__
from weft.cli import output
from weft.core.errors import InputError, MissingError, WeftError

VERBS = {
    "generate": ("weft.cli.generate", "Make an image or a video from a local checkpoint."),
    "serve": ("weft.cli.serve", "Serve images and videos over HTTP, and a page."),
    "train": ("weft.cli.train", "Train a video model by a recipe, on several ranks."),
    "run": ("weft.cli.run", "Run a script on several ranks."),
    "demo": ("weft.cli.demo", "Check an attention on a few local ranks, and make a video."),
    "plan": ("weft.cli.plan", "Rank the ways to run a model's attention on a cluster."),
    "simulate": ("weft.cli.simulate", "Time plans on clusters of several sizes."),
    "mask": ("weft.cli.mask", "Draw a mask; show its density and imbalance."),
    "models": ("weft.cli.models", "List the models that weft.parallelize supports."),
    "doctor": ("weft.cli.doctor", "Show what this machine can do and how to add what it cannot."),
    "verify": ("weft.cli.verify", "Check that N ranks compute what one rank computes."),
    "calibrate": ("weft.cli.calibrate", "Measure links and kernels of this machine for the planner."),
    "bench": ("weft.cli.bench", "Load a server with requests and measure its latencies."),
    "evaluate": ("weft.cli.evaluate", "Measure how well a trained model follows its prompts."),
    "report": ("weft.cli.report", "Write a page with figures of a run, a schedule or a plan."),
    "testbed": ("weft.cli.testbed", "Build several machines on this one, with slow links between."),
}
"""Verb → (module, line in `weft --help`)."""
PURPOSES = {
    "Run models": ("generate", "serve", "train", "run", "demo"),
    "Plan": ("plan", "simulate", "mask", "models"),
    "Check and measure": ("doctor", "verify", "calibrate", "bench", "evaluate", "report", "testbed"),
}
"""Headings of `weft --help`."""
LOG_LEVELS = ("debug", "info", "warning", "error")

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
        if not listed or not name:
            return name, listed, rest
        verb = load(name)
        if not verb.context_settings.get("ignore_unknown_options"):  # else they may be those of a script
            verb.params += [_unexposed(option) for option in self.params if option.name in GLOBAL]
        return name, verb, rest

    def get_help(self, ctx: typer.Context) -> str:
        from weft.cli.help import options, page

        verbs = {purpose: [(name, VERBS[name][1]) for name in names] for purpose, names in PURPOSES.items()}
        sections = verbs | {"Options": list(options(self, ctx))}
        text = [(self.help or "").strip(), "weft help COMMAND shows the options of a command."]
        return page(text, "weft [OPTIONS] COMMAND [ARGS]...", (), sections)


def _unexposed(option: Any) -> Any:
    """Return a global option as one of a verb, which runs its callback and passes nothing to the verb."""
    option = copy(option)
    option.expose_value = False
    return option


def load(name: str) -> Any:
    """Return the typer command of a verb."""
    from weft.cli.help import VerbCommand
    from weft.cli.options import flatten

    verb = typer.Typer(add_completion=False, rich_markup_mode=None)
    module = import_module(VERBS[name][0])
    settings = getattr(module, "SETTINGS", None)
    verb.command(name, cls=VerbCommand, context_settings=settings)(flatten(module.run))
    return typer.main.get_command(verb)


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer passes it by position
    if asked:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


def _set_verbosity(option: typer.CallbackParam, asked: bool) -> None:  # noqa: FBT001
    if asked:
        output.verbosity = 1 if option.name == "verbose" else -1
        if output.verbosity > 0 and not output.log_level:
            _set_log_level("info")


def _set_log_level(level: str) -> None:
    if not level:
        return
    if level not in LOG_LEVELS:
        raise InputError(f"--log-level must be one of {', '.join(LOG_LEVELS)}, got {level!r}.")
    import logging

    output.log_level = level
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("weft").setLevel(level.upper())


GLOBAL = ("version", "quiet", "verbose", "log_level")
"""Parameters of `_weft` that may stand after a verb, too."""


def _weft(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", is_eager=True, callback=_print_version, help="Show the version."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", callback=_set_verbosity, help="Show results and errors only.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", callback=_set_verbosity, help="Show logs, and tracebacks of errors."),
    ] = False,
    log_level: Annotated[
        str,
        typer.Option(
            metavar="LEVEL", callback=_set_log_level, help=f"Least level of logs: {', '.join(LOG_LEVELS)}."
        ),
    ] = "",
) -> None:
    """Weave one long sequence over many devices."""


def _listed() -> None:
    """Placeholder of a verb in the list; `Verbs` resolves the real command."""


def _app() -> typer.Typer:
    app = typer.Typer(
        cls=Verbs,
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
    words = [*(sys.argv[1:] if args is None else args)]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    output.verbosity, output.log_level = 0, ""
    try:
        _app()(args=words, prog_name="weft")
    except WeftError as error:
        sys.exit(_report(error))
    except ModuleNotFoundError as error:
        from weft.cli.packages import missing_package

        missing = missing_package(error.name or "")
        if missing is None:
            raise
        sys.exit(_report(missing))


def _report(error: WeftError) -> int:
    if output.verbosity > 0:
        traceback.print_exception(error)
    typer.echo(f"weft: {error.message}", err=True)
    if error.hint:
        typer.echo(error.hint, err=True)
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


if __name__ == "__main__":
    main()
