"""`weft verify`: mistakes are one sentence, whoever finds them."""

from __future__ import annotations

import re

import pytest

from weft.cli.main import main
from weft.core.errors import InputError
from weft.run.pool import Failure, Pool, RankFailure


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *words])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--plan", "nosuch"), "There is no strategy 'nosuch'."),
        (("--plan", "usp:1x2", "--ranks", "2,3"), "usp:1x2 needs 2 ranks; there are 3."),
        (("--dtype", "int8"), "dtype 'int8' is not supported."),
        (("--backend", "fa5"), "backend='fa5' is unknown."),
        (("--device", "tpu"), "--device tpu is unknown."),
        (("--tokens", "0"), "tokens=0 is no size."),
        (("--ranks", "two"), "ranks='two' is not a list of counts."),
    ],
)
def test_mistakes_are_told_before_ranks_are_started(words, says, capsys, monkeypatch):
    monkeypatch.setattr(Pool, "__init__", lambda *_: pytest.fail("started ranks"))
    assert call(*words) == 2
    assert capsys.readouterr().err.startswith(f"weft: {says}")


def test_what_all_ranks_refuse_is_told_once(capsys, monkeypatch):
    refused = Failure.of(InputError("6 heads cannot share 4.", hint="Use 3."))

    def run(*_: object) -> None:
        raise RankFailure({0: refused, 1: refused}, 2)

    monkeypatch.setattr(Pool, "_fresh_ranks", lambda _: None)
    monkeypatch.setattr(Pool, "run", run)
    assert call("--ranks", "2") == 2
    assert capsys.readouterr().err.endswith("weft: 6 heads cannot share 4.\nUse 3.\n")


def test_programs_that_can_race_are_told_before_they_run(capsys, monkeypatch):
    """Slots whose messages nothing waits for: their bytes are used again too early."""
    monkeypatch.setattr(Pool, "_fresh_ranks", lambda _: None)
    monkeypatch.setattr(Pool, "run", lambda *_: pytest.fail("ran"))
    monkeypatch.setattr("weft.program.workspace.Wait", ())
    assert call("--ranks", "2", "--plan", "ring") != 0
    assert re.match(r"weft: Rank \d, step \d+ \(\w+ of op .*\); Rank \d, step", capsys.readouterr().err)


@pytest.mark.parametrize(("gpus", "hint"), [(2, "Use --ranks 2, or --device cpu."), (0, "Use --device cpu.")])
def test_more_ranks_than_gpus_are_refused_before_they_are_started(gpus, hint, capsys, monkeypatch):
    monkeypatch.setattr(Pool, "__init__", lambda *_: pytest.fail("started ranks"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert call("--ranks", "2,3", "--device", "cuda") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith(f"weft: 3 ranks need as many GPUs; {gpus} are visible. {hint}")


def test_the_backend_is_that_of_the_ranks(capsys):
    assert call("--ranks", "2", "--plan", "ring", "--device", "cpu", "--backend", "flash") == 2
    assert "weft: backend='flash' cannot serve: it computes on a GPU, not on cpu." in capsys.readouterr().err
