"""Saved VideoPipelines: names of their files, the shipped one, and checks that need no torch."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from weft.core.errors import InputError
from weft.core.files import read_json

CLASS_NAME = "VideoPipeline"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
"""The files of a saved VideoPipeline; the config has its class name."""
LEFT_OUT = "left_out"
"""Key in the config of what the model was trained with and does not have."""


SHIPPED = Path(str(files("weft.video"))) / "shipped"
SHIPPED_NAME = "weft-shapes"
"""The model that comes with weft has the name of its data set."""


def shipped() -> Path:
    """Return the directory of the model that comes with weft."""
    if not (SHIPPED / WEIGHTS).is_file():
        raise InputError(
            "This installation of weft has no model.",
            hint="Give the directory of a checkpoint: weft generate MODEL_DIR PROMPT -o out.mp4",
        )
    return SHIPPED


def name_of(directory: Path) -> str:
    """Return the name of a model: of a snapshot in the cache of the Hub, its id."""
    directory = directory.resolve()
    if directory.parent.name == "snapshots":
        return directory.parent.parent.name.removeprefix("models--").replace("--", "/")
    return SHIPPED_NAME if directory == SHIPPED.resolve() else directory.name


def is_own(directory: Path) -> bool:
    """Return whether the directory holds a saved `weft.video.pipeline.VideoPipeline`."""
    path = directory / CONFIG
    return path.is_file() and read_json(path).get("_class_name") == CLASS_NAME


def check_complete(directory: Path) -> None:
    """Refuse a VideoPipeline that lacks a component it was trained and validated with."""
    path = directory / CONFIG
    if is_own(directory) and (missing := str(read_json(path).get(LEFT_OUT) or "")[:80]):
        raise InputError(
            f"{directory} was trained with {missing} but saved without, so its output would differ.",
            hint="Train on without it (model.start = that folder), and use the model/ of that run.",
        )
