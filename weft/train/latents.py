"""Latents: clips that a VAE has encoded before, in safetensors files.

    save_file({"latents": x_NTCHW}, "a.safetensors", metadata={"captions": json.dumps(captions)})

A file has several clips, or one [T, C, H, W]; if it has no captions, a captions.jsonl as of `folder` has a
line for each of its clips, in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from weft.core.files import parse_json
from weft.train.folder import CAPTIONS, Stored, UnreadableError, read_captions

FLOATS = ("F64", "F32", "F16", "BF16")


class Latents(Stored):
    """Float32 [B, T, C, H, W]; clips of another shape than most are left out."""

    def __init__(self, path: Path | str, captions: str = CAPTIONS) -> None:
        root, beside = Path(path), defaultdict[str, list[str]](list)
        if (root / captions).is_file():
            for name, caption in read_captions(root / captions):
                beside[name].append(caption)
        files, skipped = dict[str, _File](), list[tuple[str, str]]()
        for file in sorted(root.rglob("*.safetensors")):
            name = file.relative_to(root).as_posix()
            try:
                files[name] = _look(file, beside.pop(name, []))
            except UnreadableError as error:
                skipped.append((name, str(error)))
        skipped += [(name, "is not there") for name in beside]
        shapes = Counter(file.shape for file in files.values() for _ in file.captions)
        usual = max(shapes, key=shapes.__getitem__, default=())
        self._places, clips = dict[str, tuple[Path, int]](), list[tuple[str, str]]()
        for name, file in files.items():
            if file.shape != usual:
                skipped.append((name, f"has clips of {_said(file.shape)}, most are of {_said(usual)}"))
                continue
            for i, caption in enumerate(file.captions):
                clips.append((f"{name}[{i}]", caption))
                self._places[clips[-1][0]] = root / name, i
        super().__init__(root, clips, skipped)

    def read(self, name: str) -> np.ndarray:
        file, place = self._places[name]
        try:
            with safe_open(file, "pt") as stored:
                latents = stored.get_slice("latents")
                clip = latents[place] if len(latents.get_shape()) == 5 else latents[:]
        except (SafetensorError, OSError) as error:
            raise UnreadableError(f"cannot be read: {error}") from error
        if not clip.isfinite().all():
            raise UnreadableError("has numbers that are not finite")
        return clip.float().numpy()


class _File(NamedTuple):
    shape: tuple[int, ...]
    captions: list[str]


def _look(file: Path, beside: list[str]) -> _File:
    """What a file's header says."""
    if not file.is_file():
        raise UnreadableError("is not a regular file")
    try:
        with safe_open(file, "pt") as stored:
            latents, about = stored.get_slice("latents"), stored.metadata() or {}
            shape, kind = tuple(latents.get_shape()), latents.get_dtype()
            captions = parse_json(about["captions"], "captions") if "captions" in about else beside
    except (SafetensorError, OSError, ValueError) as error:
        raise UnreadableError(f"cannot be read: {error}") from error
    if len(shape) not in (4, 5) or kind not in FLOATS:
        raise UnreadableError(f"has latents {_said(shape)} of {kind}, not [N,] T, C, H, W of floats")
    count = shape[0] if len(shape) == 5 else 1
    if not isinstance(captions, list) or len(captions) != count:
        raise UnreadableError(f"has {count} clips, and not as many captions")
    if not all(isinstance(caption, str) for caption in captions):
        raise UnreadableError("has captions that are no texts")
    return _File(shape[-4:], captions)


def _said(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
