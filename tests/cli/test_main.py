"""The front door: verbs load one at a time, errors are sentences with a code."""

from __future__ import annotations

import sys
from importlib import import_module
from runpy import run_module
from types import ModuleType
from typing import Annotated

import pytest
import typer

from weft import __version__
from weft.cli import main as front
from weft.core.errors import (
    AgreementError,
    CommError,
    InputError,
    MissingError,
    ScheduleError,
    WeftError,
)
from weft.core.install import install_command


def call(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        front.main(args)
    return int(end.value.code or 0)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A verb `weave` whose module is this one; tests give it its `run`."""
    module = ModuleType("weft_weave")
    monkeypatch.setitem(sys.modules, "weft_weave", module)
    monkeypatch.setitem(front.VERBS, "weave", ("weft_weave", "Weave a little."))
    return module


def raising(error: BaseException):
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize("name", front.VERBS)
def test_every_verb_of_the_table_has_a_run_that_explains_itself(name: str) -> None:
    assert import_module(front.VERBS[name][0]).run.__doc__


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"weft {__version__}\n"


def test_python_m_weft_is_weft(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "--version"])
    with pytest.raises(SystemExit, match="0"):
        run_module("weft", run_name="__main__")
    assert capsys.readouterr().out == f"weft {__version__}\n"


def test_help_lists_each_verb_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    lines = capsys.readouterr().out.splitlines()
    for name, (_, line) in front.VERBS.items():
        assert f"{name} {line}" in [" ".join(shown.split()) for shown in lines]


def test_a_verb_gets_its_options_from_the_signature_of_run(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*, ranks: Annotated[int, typer.Option(help="How many [ranks].")] = 2) -> None:
        """Weave with ranks."""
        typer.echo(f"{ranks} ranks")

    verb.run = run
    assert call("weave", "--ranks", "3") == 0
    assert capsys.readouterr().out == "3 ranks\n"
    assert call("weave", "--help") == 0
    shown = capsys.readouterr().out
    assert "Usage: weft weave" in shown
    assert "How many [ranks]." in shown


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (InputError, 2),
        (MissingError, 3),
        (CommError, 4),
        (AgreementError, 4),
        (ScheduleError, 4),
        (WeftError, 4),
    ],
)
def test_an_error_is_a_sentence_a_hint_and_a_code(
    kind: type[WeftError], code: int, verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raising(kind("5 ranks, 3 chairs.", hint="Bring 2 chairs."))
    assert call("weave") == code
    assert capsys.readouterr() == ("", "weft: 5 ranks, 3 chairs.\nBring 2 chairs.\n")


def test_a_package_that_is_not_there_comes_with_the_command_that_adds_it(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    verb.run = raising(ModuleNotFoundError("No module named 'torch'", name="torch.nn"))
    assert call("weave") == 3
    assert capsys.readouterr().err.endswith(f"{install_command('torch')}\n")


def test_a_fault_of_weft_keeps_its_traceback(verb: ModuleType) -> None:
    for fault in (KeyError("rank"), ModuleNotFoundError("weft.rnu", name="weft.rnu")):
        verb.run = raising(fault)
        with pytest.raises(type(fault)):
            front.main(["weave"])


def test_a_mistyped_verb_or_option_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("doctr") == 2
    assert "'doctor'" in capsys.readouterr().err
    assert call("doctor", "--jsn") == 2
    assert "--json" in capsys.readouterr().err
