"""`weft calibrate`: mistakes are told before anything is measured."""

from __future__ import annotations

import pytest

from weft.cli import calibrate
from weft.cli.main import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-o", "nowhere/at/all.toml"), "no folder nowhere/at for all.toml"),
        (("-o", "/"), "/ is a folder"),
        (("--ranks", "0"), "ranks=0"),
        (("--dtype", "int8"), "dtype 'int8' is not supported"),
    ],
)
def test_mistakes_are_told_before_the_measuring(words, says, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "_measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *words])
    assert ended.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())
