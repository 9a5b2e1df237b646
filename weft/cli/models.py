"""`weft models`: the transformers that `weft.parallelize` knows, and what it can do with each."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from weft.cli.options import Json

LISTS = {"ZImageTransformer2DModel"}
"""Models that are given a list of latents: no batch, so no two halves of it."""


def run(*, as_json: Json = False) -> None:
    """List the models that weft.parallelize knows: how they attend, and what else is split."""
    rows = _rows()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _show(rows)


def _rows() -> list[dict[str, Any]]:
    from weft.models.adapters import ADAPTERS
    from weft.models.decode import KNOWN

    decoders = _decoders()
    return [
        {
            "model": name,
            "attention": adapter.kind,
            "masks": adapter.grid is not None,
            "guidance": name not in LISTS,  # its calls are seen from outside, whichever model it is
            "vae": decoders[name] <= KNOWN if name in decoders else None,
            "note": adapter.note,
        }
        for name, adapter in sorted(ADAPTERS.items())
    ]


def _decoders() -> dict[str, set[str]]:
    """The VAEs of each transformer's pipelines, as the text of the installed Diffusers names them."""
    spec = find_spec("diffusers")
    folders = (spec.submodule_search_locations or []) if spec else []
    found: dict[str, set[str]] = {}
    for path in (path for folder in folders for path in Path(folder, "pipelines").rglob("pipeline*.py")):
        text = path.read_text(encoding="utf-8")
        vaes = re.findall(r"\bvae: .*?(Autoencoder\w+)", text)
        for model in re.findall(r"\btransformer: .*?(\w+Transformer\w+)", text):
            found.setdefault(model, set()).update(vaes)
    return found


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in ("model", "attention", "masks", "CFG", "VAE", ""):
        table.add_column(name, no_wrap=name != "")
    words = {True: "yes", False: "–", None: "?"}
    for row in rows:
        said = [words[row[name]] for name in ("masks", "guidance", "vae")]
        table.add_row(row["model"], row["attention"], *said, row["note"])
    console = Console()
    console.print(table)
    console.print(
        "masks: sparse attention · CFG: its two branches on two halves of the ranks · VAE: tiles decoded by "
        "all ranks, after vae.enable_tiling()\n"
        "any other model: weft.parallelize(model, adapter=…), see docs/models.md",
        highlight=False,
        soft_wrap=True,
    )
