"""The `pip install` lines in messages: how to add an extra to weft as it was installed."""

from __future__ import annotations

import json
import os
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """Return a command that adds the packages of `extra` to this installation of weft.

    weft may come from a clone, a wheel or a repository, and on an index its name may belong to someone else.
    So the command names the same origin again, which pip records beside an installed package (PEP 610).
    """
    source = Path(__file__).parents[2]
    record = _record()
    url: str = record.get("url", source.as_uri() if (source / "pyproject.toml").is_file() else "")
    if vcs := record.get("vcs_info"):
        revision = vcs.get("requested_revision") or vcs.get("commit_id")
        return _pip(f"weft[{extra}] @ {vcs['vcs']}+{url}@{revision}")
    if not url.startswith("file:"):
        return _pip(f"weft[{extra}] @ {url}" if url else f"weft[{extra}]")
    path = unquote(urlsplit(url).path)
    path = "." if path == os.getcwd() else path  # noqa: PTH109 - compared with what a shell would show
    options = ["-e"] if record.get("dir_info", {}).get("editable") else []
    return _pip(*options, f"{path}[{extra}]")


def _record() -> dict[str, Any]:
    try:
        return json.loads(distribution("weft").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}


def _pip(*words: str) -> str:
    return shlex.join(["pip", "install", *words])
