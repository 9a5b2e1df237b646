"""Virtual environments to install weft into: fresh ones, and ones that see the packages of this one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.blocks import ROOT

LIMIT = 1800
"""Seconds for one command."""
PIP = "#!{python}\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # pip reads the second as build_isolation=0


@dataclass(frozen=True)
class Venv:
    folder: Path
    variables: dict[str, str] = field(default_factory=dict[str, str])

    def shell(self, line: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """Run a line as in a shell where this environment is active."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environment = os.environ | self.variables | {"PATH": path, "VIRTUAL_ENV": str(self.folder)}
        environment.pop("PYTHONPATH", None)  # tests may be run on a tree that is not installed
        return subprocess.run(
            ["bash", "-c", line], cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT
        )

    def succeeds(self, line: str, cwd: Path = ROOT) -> str:
        done = self.shell(line, cwd)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def fresh(folder: Path) -> Venv:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return Venv(folder)


def shelf(folder: Path, without: tuple[str, ...]) -> Path:
    """Links to the packages of this Python, but for weft and those whose names begin as in `without`."""
    folder.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith((*without, "weft", "_editable_impl_weft")):
            (folder / entry.name).symlink_to(entry)
    return folder


def on_shelf(folder: Path, packages: Path, wheels: Path) -> Venv:
    """An environment that has `packages`, and whose pip finds others only in `wheels`."""
    venv.create(folder, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "shelf.pth").write_text(f"{packages}\n")
    pip = folder / "bin" / "pip"
    pip.write_text(PIP.format(python=folder / "bin" / "python"))
    pip.chmod(0o755)
    return Venv(folder, {**OFFLINE, "PIP_FIND_LINKS": str(wheels)})


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel of an empty package."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": "".join(f"{one},,\n" for one in files)}.items():
            wheel.writestr(path, text)
