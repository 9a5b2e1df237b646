"""The package as it is shipped: what is in the wheel, one version, and what a bare installation says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import weft
from weft import __version__
from weft.cli.main import VERBS
from weft.cli.packages import PACKAGES
from weft.core.errors import MissingError
from weft.core.install import install_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# What code reads beside the modules; each was missing from a wheel of somebody once.
NEEDED = {
    "weft/py.typed",
    "weft/video/shipped/config.json",
    "weft/video/shipped/model.safetensors",
    "weft/report/page.html",
    "weft/run/comm/csrc/signals.c",
    "weft/run/kernels/csrc/forward.c",
    "weft/run/kernels/csrc/lanes.h",
    "weft/serve/page/index.html",
    "weft/serve/page/style.css",
}


@pytest.fixture(scope="module")
def builders() -> dict[str, Any]:
    sdist = pytest.importorskip("hatchling.builders.sdist", reason="hatchling builds the package")
    wheel = pytest.importorskip("hatchling.builders.wheel")
    return {"sdist": sdist.SdistBuilder(str(ROOT)), "wheel": wheel.WheelBuilder(str(ROOT))}


def listed(builder: Any) -> set[str]:
    return {Path(file.distribution_path).as_posix() for file in builder.recurse_included_files()}


def test_the_wheel_has_all_of_weft_and_nothing_else(builders: dict[str, Any]) -> None:
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "weft").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert listed(builders["wheel"]) == here
    assert here >= NEEDED


def test_the_source_package_can_be_tested_and_read(builders: dict[str, Any]) -> None:
    files = listed(builders["sdist"])
    assert files > NEEDED
    assert {"Makefile", "README.md", "CHANGELOG.md", "docs/results.md", "tests/test_package.py"} < files
    assert {"bench/rows.py", "recipes/shapes.toml"} < files
    assert not [name for name in files if name.startswith((".venv", "runs/", "dist/", "build/"))]


def test_the_version_is_one(builders: dict[str, Any]) -> None:
    assert builders["wheel"].metadata.version == __version__
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest and latest[1] == __version__


@pytest.mark.parametrize("name", PACKAGES)
def test_the_extra_that_is_named_adds_the_package(name: str) -> None:
    package = PACKAGES[name]
    wanted = [re.split(r"[<>=;\[ ]", text)[0] for text in PROJECT["optional-dependencies"][package.extra]]
    assert (package.distribution or name) in wanted


# A verb, and the extra that is named where no optional package is there; "" works without any.
BARE = {
    ("bench", "serve", "http://127.0.0.1:9"): "serve",
    ("calibrate",): "torch",
    ("demo",): "video",
    ("doctor",): "",
    ("evaluate", "{shipped}"): "torch",
    ("generate", "a red circle", "-o", "{folder}/ball.mp4"): "video",
    ("generate", "{folder}", "a loom", "-o", "{folder}/loom.png"): "models",
    ("mask", "sta", "--grid", "3x4x5"): "",
    ("models",): "torch",
    ("plan", "512x4x64", "--topology", "2xh100"): "",
    ("report", "512x4x64", "--topology", "2xh100", "-o", "{folder}/report"): "",
    ("run", "{folder}/script.py"): "torch",
    ("serve",): "serve",
    ("simulate", "512x4x64", "--topology", "2xh100"): "",
    ("testbed",): "torch",
    ("train", "recipes/shapes.toml"): "train",
    ("verify",): "torch",
}

ALONE = """
import sys
from importlib.machinery import PathFinder
from weft.cli.main import main
from weft.cli.packages import PACKAGES
from weft.core.errors import MissingError

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in PACKAGES
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
for line in sys.stdin.read().splitlines():
    try:
        code = main(line.split("|")) or 0
    except SystemExit as end:
        code = end.code
    print(f"ended with {code}", file=sys.stderr)
"""


def test_a_bare_installation_plans_and_says_what_the_rest_needs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    (tmp_path / "model_index.json").write_text("{}")
    places = {"folder": tmp_path, "shipped": ROOT / "weft" / "video" / "shipped"}
    calls = "\n".join("|".join(word.format(**places) for word in call) for call in BARE)
    done = subprocess.run(
        [sys.executable, "-c", ALONE], input=calls, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = re.split(r"^ended with (\d+)\n", done.stderr, flags=re.MULTILINE)
    found = dict(zip(BARE, zip(map(int, said[1::2]), said[0::2], strict=False), strict=True))
    for call, extra in BARE.items():
        code, words = found[call]
        assert code == (3 if extra else 0), (call, words)
        assert not extra or words.endswith(f"Add it with: {install_command(extra)}\n"), (call, words)


def test_every_verb_was_tried_bare() -> None:
    assert {call[0] for call in BARE} == set(VERBS)


def test_names_that_are_not_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str, *_: Any) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=missing)

    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'loom'"):
        weft.loom  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.delitem(vars(weft), "attention", raising=False)
    monkeypatch.setattr("importlib.import_module", lacks)
    missing = "torch"
    with pytest.raises(MissingError, match="weft.attention needs torch"):
        weft.attention  # noqa: B018
    missing = "numpy"  # a defect, not a choice
    with pytest.raises(ModuleNotFoundError, match=r"weft\.run\.attention"):
        weft.attention  # noqa: B018
    assert {"attention", "switch"} <= set(dir(weft))
