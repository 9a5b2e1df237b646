"""The front door: verbs load one at a time, errors are sentences with a code."""

from __future__ import annotations

import logging
import re
import sys
from importlib import import_module
from pathlib import Path
from runpy import run_module
from types import ModuleType
from typing import Annotated

import pytest
import typer

from weft import __version__
from weft.cli import main as front
from weft.cli import output
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


@pytest.mark.parametrize("name", front.VERBS)
def test_help_shows_usage_and_examples_as_they_are_typed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(name, "-h") == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80 and "\x1b" not in shown
    assert not re.search(r"[{}<>]|\[\[", shown.replace('{"at"', "").replace("…}", "")), "no type of Python"
    assert any(line.startswith(f"Usage: weft {name} [OPTIONS]") for line in lines)
    doc = import_module(front.VERBS[name][0]).run.__doc__
    examples = re.findall(rf"^    (weft {name} .*|weft {name})$", doc, re.MULTILINE)
    assert all(f"  {example}" in lines for example in examples), "each on a line of its own"
    assert "--log-level LEVEL" in shown or name == "run", "global options may stand after a verb"


def test_help_of_a_verb_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("help",), ("help", "plan")):
        assert call(*words) == 0
        by_name = capsys.readouterr().out
        assert call(*words[1:], "--help") == 0
        assert capsys.readouterr().out == by_name


def test_every_verb_has_one_purpose() -> None:
    assert sorted(name for names in front.PURPOSES.values() for name in names) == sorted(front.VERBS)


def test_options_of_a_script_are_not_those_of_weft(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.py"
    script.write_text("import sys; print(sys.argv[1:])")
    assert call("run", str(script), "-q", "-v", "--log-level", "x", "--ranks", "1") == 0
    assert "['-q', '-v', '--log-level', 'x']" in capfd.readouterr().out


@pytest.mark.parametrize("is_before", [True, False])
def test_quiet_verbose_and_log_level_stand_before_or_after_the_verb(
    is_before: bool,  # noqa: FBT001
    verb: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = logging.getLogger("weft.weave")

    def run() -> None:
        """Weave."""
        output.note("a note")
        log.debug("a detail")
        raise InputError("no yarn")

    def shown(*options: str) -> str:
        verb.run = run
        words = (*options, "weave") if is_before else ("weave", *options)
        assert call(*words) == 2
        return " ".join(map(str, capsys.readouterr()))

    try:
        assert "a note" in shown() and "Traceback" not in shown()
        assert "a note" not in shown("--quiet") and "no yarn" in shown("-q")
        assert "Traceback" in shown("--verbose") and logging.getLogger("weft").level == logging.INFO
        shown("--log-level", "debug")
        assert log.isEnabledFor(logging.DEBUG)
    finally:
        logging.getLogger("weft").setLevel(logging.NOTSET)
    assert call("weave", "--log-level", "loud") == 2
    assert "--log-level must be one of debug, info, warning, error, got 'loud'." in capsys.readouterr().err


def test_completion_knows_verbs_options_and_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def completed(line: str) -> list[str]:
        monkeypatch.setenv("_WEFT_COMPLETE", "complete_zsh")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        call()
        return capsys.readouterr().out.split()

    assert any("plan" in word for word in completed("weft pl"))
    assert any("--topology" in word for word in completed("weft plan --topo"))
    assert any("wan2.1-14b" in word for word in completed("weft plan wan"))


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
