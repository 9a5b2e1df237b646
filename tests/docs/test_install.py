"""The lines that install weft work as printed, from a clone and from a wheel, and so do those of messages.

In `make test` an environment sees the packages of this Python, so that pip finds what the extras require and
only installs weft. `make soak` installs everything into fresh ones, and torch from where pip's settings lead.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, inline_commands, needs, page_blocks
from tests.docs.messages import hints
from tests.docs.parse import split
from tests.docs.venvs import Venv, fresh, on_shelf, shelf, write_wheel
from weft import __version__

ABSENT = "uvicorn"
"""What `weft serve` misses in these environments until its hint was followed."""
IN_TREE = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "runs", "dist", "build", "out")
SAYS = "import weft; print(weft.__version__, weft.Layout.even(7, 2).size, weft.__file__)"


def pip_lines() -> list[str]:
    """The distinct `pip` lines of all pages, in their order, without comments."""
    every = [block for page in PAGES for block in page_blocks(page) if not block.needs]
    shown = [line for block in every for line in block.commands if not needs(line)]
    prose = [command for page in PAGES for command in inline_commands(page) if command != "pip install"]
    commands = [line for line in (*shown, *prose) if line.startswith("pip ")]
    return list(dict.fromkeys(re.split(r"\s+#", line)[0] for line in commands))


LOCAL = [line for line in pip_lines() if line.startswith("pip install") and "--no-index" not in line]
OFFLINE = [line for line in pip_lines() if line not in LOCAL]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shelf(tmp_path_factory.mktemp("packages") / "shelf", (ABSENT,))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, ABSENT, "99.0")
    return folder


@pytest.fixture
def environment(tmp_path: Path, packages: Path, wheels: Path) -> Venv:
    return on_shelf(tmp_path / "venv", packages, wheels)


def check_weft(environment: Venv, cwd: Path) -> None:
    """The weft that is imported is the one that was installed, with its files and its command."""
    version, tokens, file = environment.succeeds(f'python -c "{SAYS}"', cwd).split()
    assert (version, tokens) == (__version__, "7")
    assert file.startswith(str(environment.folder))
    assert environment.succeeds("weft --version", cwd).split()[1] == __version__


def follow_hint(environment: Venv, cwd: Path) -> str:
    """Run what `weft serve` says that it needs, and return that line."""
    refused = environment.shell("weft serve", cwd)
    assert refused.returncode == 3, refused
    _, _, line = refused.stderr.strip().rpartition("Add it with: ")
    assert environment.shell(f"python -c 'import {ABSENT}'", cwd).returncode, f"{ABSENT} is there already"
    environment.succeeds(line, cwd)
    environment.succeeds(f"python -c 'import {ABSENT}'", cwd)
    return line


def build_wheel(folder: Path) -> Path:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds the package")
    [wheel] = builder.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(wheel)


@pytest.mark.parametrize("line", LOCAL)
def test_a_line_installs_weft_from_a_clone(line: str, environment: Venv, tmp_path: Path) -> None:
    environment.succeeds(line, ROOT)
    check_weft(environment, tmp_path)


def test_hints_of_a_clone_and_of_a_wheel_install_what_is_missing(
    packages: Path, wheels: Path, tmp_path: Path
) -> None:
    clone = on_shelf(tmp_path / "clone", packages, wheels)
    clone.succeeds("pip install .", ROOT)
    assert follow_hint(clone, ROOT) == "pip install '.[serve]'"
    wheel, environment = build_wheel(tmp_path), on_shelf(tmp_path / "venv", packages, wheels)
    environment.succeeds(f"pip install {wheel}", tmp_path)
    check_weft(environment, tmp_path)
    assert follow_hint(environment, tmp_path) == f"pip install '{wheel}[serve]'"


def test_pages_have_these_lines() -> None:
    assert {"pip install .", "pip install '.[models]'", "pip install '.[serve]'"} <= set(LOCAL)
    assert [words[1] for line in OFFLINE for words in split(line)] == ["download", "install"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("clone") / "weft", ignore=IN_TREE)


@pytest.mark.soak
@pytest.mark.parametrize("line", LOCAL)
def test_a_line_installs_weft_and_its_packages_in_a_fresh_environment(
    line: str, clone: Path, tmp_path: Path
) -> None:
    environment = fresh(tmp_path / "venv")
    environment.succeeds(line, clone)
    environment.succeeds("pip check", tmp_path)
    check_weft(environment, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("line", [command for _, command in hints() if command.startswith("pip ")])
def test_other_hints_for_pip_work_in_a_fresh_environment(line: str, tmp_path: Path) -> None:
    fresh(tmp_path / "venv").succeeds(line, tmp_path)


@pytest.mark.soak
def test_hints_install_everything_that_a_server_needs(tmp_path: Path) -> None:
    wheel, environment = build_wheel(tmp_path), fresh(tmp_path / "venv")
    environment.succeeds(f"pip install {wheel}", tmp_path)
    assert follow_hint(environment, tmp_path) == f"pip install '{wheel}[serve]'"
    serve = "timeout --preserve-status --signal TERM 20 weft serve --port 0 --data data"
    environment.succeeds(serve, tmp_path)


@pytest.mark.soak
def test_the_lines_for_a_machine_without_an_index(clone: Path, tmp_path: Path) -> None:
    download, install = OFFLINE
    fresh(tmp_path / "online").succeeds(download, clone)
    environment = fresh(tmp_path / "offline")
    environment.succeeds(install, clone)
    check_weft(environment, tmp_path)
