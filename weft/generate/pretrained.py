"""Load pretrained pipelines from a local directory: those that Diffusers saves, and weft's own."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weft.core.errors import InputError, MissingError
from weft.core.files import read_json
from weft.core.install import install_command
from weft.video.saved_model import check_complete, is_own

if TYPE_CHECKING:
    import torch
    from torch import nn

INDEX = "model_index.json"
HINT = (
    "Pass a local folder, as pipe.save_pretrained(…) writes it, or an id of the Hub; weft downloads nothing."
)
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""OWNER/NAME."""
Kwargs = dict[str, Any]
"""Keyword arguments of a pipeline or a model."""


class PretrainedPipeline(Protocol):
    """The interface of Diffusers' pipelines that weft uses."""

    @property
    def components(self) -> Mapping[str, Any]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def set_progress_bar_config(self, *, disable: bool) -> None: ...


def locate(model: Path) -> Path:
    """Return the directory of a pipeline: `model`, or the cached snapshot of this Hub id; without torch."""
    directory = model
    if HUB_ID.fullmatch(str(model)) and not model.exists():
        directory = _snapshot(str(model))
    check(directory)
    return directory


def _snapshot(id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(id, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise InputError(
            f"{id} is neither a local directory nor in the cache of the Hugging Face Hub.",
            hint=f"Download it first: hf download {id}",
        ) from error


def check(directory: Path) -> None:
    """Refuse a directory without a pipeline; without torch."""
    if not (directory / INDEX).is_file() and not is_own(directory):
        raise InputError(
            f"{directory} is not a Diffusers checkpoint directory: it has no {INDEX}.", hint=HINT
        )
    check_complete(directory)


def pipeline_class(directory: Path) -> type[PretrainedPipeline]:
    if is_own(directory):
        from weft.video.pipeline import VideoPipeline

        return VideoPipeline
    return _diffusers_class(directory, _index(directory)["_class_name"])


def transformers(directory: Path) -> dict[str, str]:
    """Return the transformers of a pipeline with the names of their classes; Wan 2.2 has two."""
    if is_own(directory):
        return {"transformer": "VideoDiT"}
    index = _index(directory)
    components = {name: value[-1] for name, value in index.items() if isinstance(value, list) and value}
    classes = {
        name: kind
        for name, kind in components.items()
        if "transformer" in name and isinstance(kind, str) and "Transformer" in kind
    }
    if not classes:
        kind, names = index["_class_name"], ", ".join(name for name in index if name[:1] != "_")
        raise InputError(f"The {kind} in {directory} has no transformer.", hint=f"It has {names}.")
    return classes


def load_transformer(directory: Path, name: str, dtype: torch.dtype | None = None) -> nn.Module:
    if is_own(directory):
        return load_pipeline(directory, dtype).components["transformer"]
    return _load(_diffusers_class(directory, transformers(directory)[name]), directory / name, dtype)


def load_pipeline(directory: Path, dtype: torch.dtype | None = None) -> Any:
    if is_own(directory):
        from weft.video.pipeline import VideoPipeline

        return VideoPipeline.load(directory) if dtype is None else VideoPipeline.load(directory, dtype)
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    return _load(DiffusionPipeline, directory, dtype)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress the progress bars and advice of Diffusers and transformers, which every rank would print."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    levels = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity(logging.ERROR)
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
            library.enable_progress_bar()


def _index(directory: Path) -> Kwargs:
    index = read_json(directory / INDEX)
    if not isinstance(index.get("_class_name"), str):
        raise InputError(f"{directory / INDEX} does not name the class of its pipeline.", hint=HINT)
    if invalid := [
        name for name in index if not name.isidentifier()
    ]:  # components are folders of these names
        raise InputError(f"{directory / INDEX} has a component {invalid[0][:80]!r}, not a name.", hint=HINT)
    return index


def _diffusers_class(directory: Path, name: str) -> Any:
    import diffusers

    with quiet_libraries():  # the class is imported here
        cls = getattr(diffusers, name, None)
    if not hasattr(cls, "from_pretrained"):
        raise InputError(
            f"{directory} has a {name[:80]}, which Diffusers {diffusers.__version__} does not have.",
            hint="Upgrade diffusers, or use weft.parallelize in a script of your own.",
        )
    return cls


def _load(cls: Any, directory: Path, dtype: torch.dtype | None) -> Any:
    from safetensors import SafetensorError

    options = {} if dtype is None else {"dtype": dtype}
    try:
        with quiet_libraries():
            # Without use_safetensors, a folder that has only .bin files would be unpickled.
            return cls.from_pretrained(directory, local_files_only=True, use_safetensors=True, **options)
    except ValueError as error:
        if find_spec("accelerate") is not None:
            raise InputError(f"Diffusers cannot load {directory}: {error}", hint=HINT) from error
        raise MissingError(
            f"Diffusers cannot load {directory} without accelerate: {error}",
            hint=f"Add it with: {install_command('models')}",
        ) from error
    except (OSError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {error}"[:500]
        raise InputError(f"Diffusers cannot load {directory}: {reason}", hint=HINT) from error
