"""What pages talk about and do not make themselves: files, and names in their Python.

A file is made once a session, as small as it can be, and copied into the folder where the page runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.docs.blocks import ROOT
from weft.core.topology import Topology

PRELUDES = {
    "README.md": "import torch; q = k = v = torch.randn(1, 3, 2047, 64)",
    "docs/balance.md": """
import numpy as np
from weft import Layout, Problem
from weft.masks.random import random_mask
layers, steps, counts = 2, 2, np.arange(80).reshape(2, 40) + 9
shards = Layout.even(1024, 8)
problem = Problem(batch=1, heads=40, kv_heads=40, head_dim=128, q=shards, kv=shards)
masks = [random_mask(40, 1024, 1024, block=64, density=(0.3,), seed=seed) for seed in range(layers)]
""",
    "docs/generate.md": "import av, json, PIL.Image",
    "docs/switching.md": """
import torch
from tests.diffusers.toys import Video
from tests.diffusers import test_latte
model, x = Video(), torch.randn(1, 17, 1024, 6)
transformer = test_latte.model(frames=3)
video, t, text = test_latte.video(batch=1, frames=3).values()
spatial = temporal = torch.nn.Identity()
""",
    "docs/testbed.md": "from math import sqrt as fn; x = 2.0",
    "docs/tracing.md": """
import torch, weft
mask, q, shards = weft.BlockMask.dense(2, 64), torch.randn(1, 2, 64, 8), weft.Layout.even(64, 8)
problem = weft.Problem(batch=1, heads=2, kv_heads=2, head_dim=8, q=shards, kv=shards)
k, v, schedule = q, q, weft.build("ring", problem, mask)
""",
}
"""What the Python of a page is about, where it does not say so itself."""

SCRIPT = """
import os, torch, weft
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
tokens = len(weft.Layout.even(2047, ranks).held(rank))
weft.attention(*torch.randn(3, 1, 4, tokens, 16).unbind())
"""


def wan(path: Path) -> None:
    from tests.diffusers.checkpoints import tiny_wan

    tiny_wan(path)


def ltx(path: Path) -> None:
    from tests.diffusers.checkpoints import tiny_ltx

    tiny_ltx(path)


def flux(path: Path) -> None:
    from tests.diffusers.checkpoints import tiny_flux

    tiny_flux(path)


def own(path: Path) -> None:
    shutil.copytree(ROOT / "weft" / "video" / "shipped", path)


def script(path: Path) -> None:
    path.write_text(SCRIPT)


def trace(path: Path) -> None:
    import torch

    import weft

    with weft.trace(str(path)):
        weft.attention(*torch.randn(3, 1, 2, 64, 16).unbind())


def log(path: Path) -> None:
    path.mkdir()
    shutil.copy(ROOT / "recipes" / "shapes.log.jsonl", path / "log.jsonl")


def run(path: Path) -> None:
    log(path)
    own(path / "model")


def topology(path: Path) -> None:
    path.write_text(Topology.local(8).to_toml())


def token(path: Path) -> None:
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)


def media(path: Path) -> None:
    from weft.generate.media import write

    write(
        path,
        np.zeros((1, 32, 48, 3), np.uint8),
        {"seed": 7, "prompt": "a loom", "versions": {"weft": "0"}},
        fps=8,
    )


INPUTS: dict[str, dict[str, Callable[[Path], None]]] = {
    "README.md": {"wan": wan},
    "docs/generate.md": {
        "ltx": ltx, "checkpoint": flux, "script.py": script, "loom.png": media, "loom.mp4": media
    },
    "docs/machines.md": {"wan": wan, "script.py": script},
    "docs/parallelize.md": {"wan2.1-t2v-1.3b": wan},
    "docs/report.md": {
        "out/trace": trace, "here.toml": topology, "runs/shapes": run, "runs/dense": log, "runs/sparse": log
    },
    "docs/serving.md": {"Wan2.1-T2V-1.3B-Diffusers": wan},
    "docs/testbed.md": {"train.py": script},
    "docs/training.md": {"runs/shapes": run},
    "messages": {
        "Wan2.1-T2V-1.3B-Diffusers": wan, "wan": wan, "runs/shapes/model": own, "runs/dense/model": own,
        "train.py": script, "script.py": script, "here.toml": topology,
    },
}  # fmt: skip
"""By page: its files, and how each is made."""


class Inputs:
    """Copies of the files of pages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def copy(self, page: str, text: str, target: Path) -> None:
        """Copy the files of a page that `text` names."""
        for name, make in INPUTS.get(page, {}).items():
            if name not in text:
                continue
            source = self._folder / make.__name__ / Path(name).name
            if not source.exists():
                source.parent.mkdir(exist_ok=True)
                make(source)
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
