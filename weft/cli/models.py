"""`weft models`: list the transformers that `weft.parallelize` supports, with their features."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from weft.cli import output
from weft.cli.options import Json

LISTS = {"ZImageTransformer2DModel"}
"""Models whose input is a list of latents: without a batch there are no guidance halves."""


def run(*, as_json: Json = False) -> None:
    """List the models that weft.parallelize supports, with their kind of attention and features."""
    rows = _rows()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _show(rows)


def _rows() -> list[dict[str, Any]]:
    from weft.diffusers.adapters import ADAPTERS
    from weft.diffusers.vae import TILED_VAES

    decoders = _decoders()
    return [
        {
            "model": name,
            "attention": adapter.kind,
            "masks": adapter.grid is not None,
            "guidance": name not in LISTS,  # detected from the calls, for any model
            "vae": decoders[name] <= TILED_VAES if name in decoders else None,
            "note": adapter.note,
        }
        for name, adapter in sorted(ADAPTERS.items())
    ]


def _decoders() -> dict[str, set[str]]:
    """Return the VAE classes of each transformer, read from the pipelines of the installed Diffusers."""
    spec = find_spec("diffusers")
    folders = (spec.submodule_search_locations or []) if spec else []
    decoders: dict[str, set[str]] = {}
    for path in (path for folder in folders for path in Path(folder, "pipelines").rglob("pipeline*.py")):
        text = path.read_text(encoding="utf-8")
        vaes = re.findall(r"\bvae: .*?(Autoencoder\w+)", text)
        for model in re.findall(r"\btransformer: .*?(\w+Transformer\w+)", text):
            decoders.setdefault(model, set()).update(vaes)
    return decoders


def _show(rows: list[dict[str, Any]]) -> None:
    from weft.diffusers.refused import REFUSED

    words = {True: "yes", False: "–", None: "?"}
    output.table(
        [
            {
                "model": row["model"],
                "attention": row["attention"],
                "masks": words[row["masks"]],
                "CFG": words[row["guidance"]],
                "VAE": words[row["vae"]],
                "": row["note"],
            }
            for row in rows
        ]
    )
    output.note(
        "masks: sparse attention · CFG: its two branches on two halves of the ranks · VAE: tiles decoded by "
        "all ranks, after vae.enable_tiling()\n"
        "any other model: weft.parallelize(model, adapter=…), see docs/models.md"
    )
    lines = (f"  {name}: {reason}" for name, reason in sorted(REFUSED.items()))
    output.note("\n".join(("of Diffusers, not split:", *lines)))
