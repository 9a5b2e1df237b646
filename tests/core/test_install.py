"""The command that adds an extra names the origin of the installed weft, whatever it was."""

import json
import shlex
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from weft.core import install

CLONE = "file:///home/a%20user/weft"


class Record:
    def __init__(self, content: object) -> None:
        self.content = content

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.content is None else json.dumps(self.content)


@pytest.mark.parametrize(
    "record, command",
    [
        ({"url": CLONE, "dir_info": {}}, "pip install '/home/a user/weft[serve]'"),
        ({"url": CLONE, "dir_info": {"editable": True}}, "pip install -e '/home/a user/weft[serve]'"),
        (
            {"url": f"{CLONE}/dist/w.whl", "archive_info": {}},
            "pip install '/home/a user/weft/dist/w.whl[serve]'",
        ),
        (
            {"url": "https://a.test/weft", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "pip install 'weft[serve] @ git+https://a.test/weft@c0ffee'",
        ),
        (
            {
                "url": "ssh://a.test/w",
                "vcs_info": {"vcs": "git", "commit_id": "1", "requested_revision": "main"},
            },
            "pip install 'weft[serve] @ git+ssh://a.test/w@main'",
        ),
        (
            {"url": "https://a.test/w.whl", "archive_info": {}},
            "pip install 'weft[serve] @ https://a.test/w.whl'",
        ),
    ],
)
def test_command_names_the_recorded_origin(
    record: object, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "distribution", lambda _: Record(record))
    assert install.install_command("serve") == command


def test_clone_in_the_current_folder_is_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install, "distribution", lambda _: Record({"url": tmp_path.as_uri(), "dir_info": {}}))
    assert install.install_command("torch") == "pip install '.[torch]'"


def test_package_of_an_index_is_named_and_a_clone_on_the_path_is_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "distribution", lambda _: Record(None))
    monkeypatch.setattr(install, "__file__", str(tmp_path / "weft" / "core" / "install.py"))
    assert install.install_command("torch") == "pip install 'weft[torch]'"

    def not_installed(_: str) -> Record:
        raise PackageNotFoundError("weft")

    monkeypatch.setattr(install, "distribution", not_installed)
    (tmp_path / "pyproject.toml").touch()
    assert shlex.split(install.install_command("torch")) == ["pip", "install", f"{tmp_path}[torch]"]
