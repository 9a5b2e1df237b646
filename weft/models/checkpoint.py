"""Checkpoint: a directory as Diffusers saves pipelines in, or weft its own, read from disk only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.core.errors import InputError, MissingError
from weft.core.files import read_json

INDEX = "model_index.json"
HINT = "Give a local folder, as pipe.save_pretrained(…) writes it; weft downloads nothing."
OWN = "VideoPipeline"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
"""The files of weft's own; the first has the name of its class."""
LEFT_OUT = "left_out"
"""In the first, if the weights are not all that the model was trained with: what else there was."""


def shipped() -> Path:
    """The directory of the model that comes with weft. Needs no torch."""
    directory = Path(str(files("weft.models"))) / "shipped"
    if not (directory / WEIGHTS).is_file():
        raise InputError(
            "This weft has come without a model of its own.",
            hint="Give the directory of a checkpoint: weft generate MODEL_DIR PROMPT.",
        )
    return directory


def is_own(directory: Path) -> bool:
    """Whether it is of a `weft.models.video.VideoPipeline`."""
    path = directory / CONFIG
    return path.is_file() and read_json(path).get("_class_name") == OWN


def check(directory: Path) -> None:
    """Needs no torch."""
    if not (directory / INDEX).is_file() and not is_own(directory):
        raise InputError(
            f"{directory} is no Diffusers checkpoint directory: it has no {INDEX}.",
            hint=HINT,
        )
    check_whole(directory)


def check_whole(directory: Path) -> None:
    """Refuse a model of weft's own that would not compute what was judged when it was trained."""
    path = directory / CONFIG
    if is_own(directory) and (missing := str(read_json(path).get(LEFT_OUT) or "")[:80]):
        raise InputError(
            f"{directory} was trained with {missing}, which it is without: it would show something else.",
            hint="Begin a run without it there (model.start = that folder), and take the model/ of that one.",
        )


def pipeline_class(directory: Path) -> Any:
    if is_own(directory):
        from weft.models.video import VideoPipeline

        return VideoPipeline
    return _class(directory, _index(directory)["_class_name"])


def transformers(directory: Path) -> dict[str, str]:
    """The transformers of a checkpoint, with the names of their classes: Wan 2.2 has two."""
    if is_own(directory):
        return {"transformer": "VideoDiT"}
    index = _index(directory)
    parts = {name: said[-1] for name, said in index.items() if isinstance(said, list) and said}
    classes = {
        name: kind
        for name, kind in parts.items()
        if "transformer" in name and isinstance(kind, str) and "Transformer" in kind
    }
    if not classes:
        kind, names = index["_class_name"], ", ".join(name for name in index if name[:1] != "_")
        raise InputError(f"{directory} is of a {kind}, which has no transformer.", hint=f"It has {names}.")
    return classes


def load_part(directory: Path, part: str, **options: Any) -> Any:
    if is_own(directory):
        return load_pipeline(directory, **options).transformer
    return _load(_class(directory, transformers(directory)[part]), directory / part, options)


def load_pipeline(directory: Path, **options: Any) -> Any:
    if is_own(directory):
        return pipeline_class(directory).load(directory, **options)
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    return _load(DiffusionPipeline, directory, options)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Loading bars and advice of two libraries, from every rank, are not for the terminal."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    libraries = (of_diffusers, of_transformers)
    before = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity(logging.ERROR)
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, level in zip(libraries, before, strict=True):
            library.set_verbosity(level)
            library.enable_progress_bar()


def _index(directory: Path) -> dict[str, Any]:
    index = read_json(directory / INDEX)
    if not isinstance(index.get("_class_name"), str):
        raise InputError(f"{directory / INDEX} does not name the class of its pipeline.", hint=HINT)
    if outside := [name for name in index if not name.isidentifier()]:  # parts are folders of these names
        raise InputError(f"{directory / INDEX} has a part {outside[0][:80]!r}, which is no name.", hint=HINT)
    return index


def _class(directory: Path, name: str) -> Any:
    import diffusers

    with quiet_libraries():  # it is imported only now
        found = getattr(diffusers, name, None)
    if not hasattr(found, "from_pretrained"):
        raise InputError(
            f"{directory} has a {name[:80]}, which Diffusers {diffusers.__version__} does not know.",
            hint="Upgrade diffusers, or use weft.parallelize in a script of your own.",
        )
    return found


def _load(kind: Any, directory: Path, options: dict[str, Any]) -> Any:
    from safetensors import SafetensorError

    try:
        with quiet_libraries():
            # Without use_safetensors, a folder that has only .bin files would be unpickled.
            return kind.from_pretrained(directory, local_files_only=True, use_safetensors=True, **options)
    except ValueError as error:
        if find_spec("accelerate") is not None:
            raise InputError(f"Diffusers cannot load {directory}: {error}", hint=HINT) from error
        raise MissingError(
            f"Diffusers cannot load {directory} without accelerate: {error}",
            hint="Add it with: pip install 'weft[models]'",
        ) from error
    except (OSError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {error}"[:500]
        raise InputError(f"Diffusers cannot load {directory}: {reason}", hint=HINT) from error
