"""Files: whole or not at all, and refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.core.errors import InputError
from weft.core.files import whole, writing


def test_a_file_is_there_when_it_is_complete_and_as_it_was_when_not(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, fails in (("first", False), ("second", True), ("third", False)):
        before = path.read_text() if path.exists() else None
        try:
            with whole(path) as temporary:
                temporary.write_text(text)
                assert temporary.suffix == ".json" and (path.read_text() if before else None) == before
                if fails:
                    raise KeyError
        except KeyError:
            assert path.read_text() == before
        else:
            assert path.read_text() == text
        assert [*tmp_path.iterdir()] == [path]


def test_what_the_system_refuses_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "none" / "a.json"
    with pytest.raises(InputError) as end, writing(path, hint="Give another --out."):
        path.write_text("x")
    assert str(end.value) == f"{path} cannot be written: No such file or directory. Give another --out."
    with pytest.raises(InputError, match=r"cannot be written: of its own kind\."), writing(path, hint=""):
        raise OSError("of its own kind")
