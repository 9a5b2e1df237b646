"""LatentFolder: clips already encoded by a VAE, in safetensors files.

    save_file({"latents": x_NTCHW}, "a.safetensors", metadata={"captions": json.dumps(captions)})

A file has several clips, or one [T, C, H, W]. If it has no captions, a captions.jsonl as in `video_folder`
has a line for each of its clips, in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from weft.core.files import parse_json
from weft.train.video_folder import CAPTIONS, ClipDataset, UnreadableError, read_captions

FLOATS = ("F64", "F32", "F16", "BF16")


class LatentFolder(ClipDataset):
    """Float32 [B, T, C, H, W]; only clips of the most frequent shape are used."""

    def __init__(self, path: Path | str, captions: str = CAPTIONS, held_out: int = 0) -> None:
        root, beside = Path(path), defaultdict[str, list[str]](list)
        if (root / captions).is_file():
            for name, caption in read_captions(root / captions):
                beside[name].append(caption)
        files, skipped = dict[str, _LatentFile](), list[tuple[str, str]]()
        for file in sorted(root.rglob("*.safetensors")):
            name = file.relative_to(root).as_posix()
            try:
                files[name] = _read_header(file, beside.pop(name, []))
            except UnreadableError as error:
                skipped.append((name, str(error)))
        skipped += [(name, "is not there") for name in beside]
        shapes = Counter(file.shape for file in files.values() for _ in file.captions)
        common = max(shapes, key=shapes.__getitem__, default=())
        self._locations, clips = dict[str, tuple[Path, int]](), list[tuple[str, str]]()
        for name, file in files.items():
            if file.shape != common:
                skipped.append((name, f"has clips of {_shown(file.shape)}, most are of {_shown(common)}"))
                continue
            for i, caption in enumerate(file.captions):
                clips.append((f"{name}[{i}]", caption))
                self._locations[clips[-1][0]] = root / name, i
        super().__init__(root, clips, skipped, held_out)

    def read(self, name: str) -> np.ndarray:
        file, index = self._locations[name]
        try:
            with safe_open(file, "pt") as stored:
                latents = stored.get_slice("latents")
                clip = latents[index] if len(latents.get_shape()) == 5 else latents[:]
        except (SafetensorError, OSError) as error:
            raise UnreadableError(f"cannot be read: {error}") from error
        if not clip.isfinite().all():
            raise UnreadableError("has numbers that are not finite")
        return clip.float().numpy()


class _LatentFile(NamedTuple):
    shape: tuple[int, ...]
    captions: list[str]


def _read_header(file: Path, beside: list[str]) -> _LatentFile:
    """Return the shape of a file's clips and their captions, by default those `beside` it."""
    if not file.is_file():
        raise UnreadableError("is not a regular file")
    try:
        with safe_open(file, "pt") as stored:
            latents, metadata = stored.get_slice("latents"), stored.metadata() or {}
            shape, dtype = tuple(latents.get_shape()), latents.get_dtype()
            captions = parse_json(metadata["captions"], "captions") if "captions" in metadata else beside
    except (SafetensorError, OSError, ValueError) as error:
        raise UnreadableError(f"cannot be read: {error}") from error
    if len(shape) not in (4, 5) or dtype not in FLOATS:
        raise UnreadableError(f"has latents {_shown(shape)} of {dtype}, not [N,] T, C, H, W of floats")
    count = shape[0] if len(shape) == 5 else 1
    if not isinstance(captions, list) or len(captions) != count:
        raise UnreadableError(f"has {count} clips, and not as many captions")
    if not all(isinstance(caption, str) for caption in captions):
        raise UnreadableError("has captions that are not strings")
    return _LatentFile(shape[-4:], captions)


def _shown(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
