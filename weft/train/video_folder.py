"""VideoFolder: videos on disk with captions in JSONL, decoded on demand.

    clips/captions.jsonl    {"file": "a.mp4", "caption": "a cat on a mat"}
    clips/a.mp4             also .webm and .gif, in folders too
    clips/walk/             a folder of PNG frames is the clip "walk"
    clips/run_001.png …     PNG frames beside the captions are the clip "run_*.png"

Unusable clips are left out, counted and named. A clip that fails only when it is decoded is replaced by the
next good one; which one depends on the files alone, so ranks need not communicate.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from weft.core.errors import InputError
from weft.core.files import parse_json, read_bytes
from weft.video.vocabulary import Vocabulary

VIDEOS = (".mp4", ".webm", ".gif")
CAPTIONS = "captions.jsonl"
CACHE_BYTES = 256 << 20
MAX_CAPTIONS_BYTES = 1 << 30
MAX_PIXELS = 1 << 26
"""Per frame: a small file can hold a very large one."""
MAX_NAMED = 5
"""Skipped clips that a message names."""


class UnreadableError(Exception):
    """The reason why a clip cannot be used."""


class ClipDataset(ABC):
    """Captioned clips on disk by index; the last `held_out` of them are never trained on."""

    def __init__(
        self,
        folder: Path,
        clips: Sequence[tuple[str, str]],
        skipped: list[tuple[str, str]],
        held_out: int = 0,
    ) -> None:
        """`clips` are names with captions; `skipped`, names with reasons, grows as clips fail to decode."""
        self.folder, self.skipped, self._broken = folder, skipped, set[str]()
        self.names, self.captions = [name for name, _ in clips], [caption for _, caption in clips]
        if not clips:
            raise InputError(
                f"There is no usable clip in {folder}.",
                hint=summarize_skipped(skipped) or "The folder has no clips.",
            )
        if skipped:
            logging.getLogger(__name__).warning("%s: %s", folder, summarize_skipped(skipped))
        self.vocabulary = Vocabulary.of(self.captions)
        self._first_held_out = len(clips) - held_out
        """A broken clip is replaced by one on the same side of this border."""

    @property
    def digest(self) -> str:
        """Hash names and captions, which determine the vocabulary and the index of each clip."""
        text = json.dumps([self.names, self.captions])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def num_clips(self) -> int:
        return len(self.names)

    def batch(self, indices: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        """Return clips [B, …] and their captions."""
        clips, captions = zip(*(self._next_good(index) for index in indices), strict=True)
        return np.stack(clips), list(captions)

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """Return a clip or raise UnreadableError."""

    def _next_good(self, index: int) -> tuple[np.ndarray, str]:
        border = self._first_held_out
        first, stop = (0, border) if index < border else (border, self.num_clips)
        for i in chain(range(index, stop), range(first, index)):
            if self.names[i] in self._broken:
                continue
            try:
                return self.read(self.names[i]), self.captions[i]
            except UnreadableError as error:
                self._broken.add(self.names[i])
                self.skipped.append((self.names[i], str(error)))
                logging.getLogger(__name__).warning(
                    "%s: %s", self.folder, summarize_skipped(self.skipped[-1:])
                )
        raise InputError(f"There is no usable clip in {self.folder}.", hint=summarize_skipped(self.skipped))


class VideoFolder(ClipDataset):
    """Pixels uint8 [B, T, H, W, 3] of videos, `frames` of each, evenly spaced.

    size          of the shorter side, the longer one is cropped; or (height, width), to be filled.
    cache_bytes   memory for decoded clips.
    """

    def __init__(
        self,
        path: Path | str,
        frames: int,
        size: int | tuple[int, int],
        captions: str = CAPTIONS,
        cache_bytes: int = CACHE_BYTES,
        held_out: int = 0,
    ) -> None:
        root = Path(path)
        self.frames, self.shape = frames, (size, size) if isinstance(size, int) else size
        if min(frames, *self.shape) < 1:
            raise InputError(f"frames and size must be >= 1, got {frames} and {size}.")
        # Epochs read every clip once, so caching the first ones is as good as evicting, and simpler.
        self._max_cached = cache_bytes // (3 * frames * self.shape[0] * self.shape[1])
        self._cache = dict[str, np.ndarray]()
        captioned, self._files, self._counts = read_captions(root / captions), _find(root), dict[str, int]()
        skipped = dict[str, str]()
        for name in dict(captioned):
            try:
                self._counts[name] = self._count(name)
            except UnreadableError as error:
                skipped[name] = str(error)
        uncaptioned = self._files.keys() - skipped.keys() - self._counts.keys()
        skipped |= {name: "has no caption" for name in sorted(uncaptioned)}
        clips = [clip for clip in captioned if clip[0] in self._counts]
        super().__init__(root, clips, list(skipped.items()), held_out)

    def read(self, name: str) -> np.ndarray:
        if name in self._cache:
            return self._cache[name]
        clip = self._decode(name, self._counts[name])
        if len(self._cache) < self._max_cached:
            self._cache[name] = clip
        return clip

    def _count(self, name: str) -> int:
        """Return the number of frames according to the file's header."""
        if name not in self._files:
            raise UnreadableError("is not there")
        files = self._files[name]
        count = len(files) if _is_frame(files[0]) else _count(files[0])
        if count < self.frames:
            raise UnreadableError(f"has {count} frames, {self.frames} are needed")
        return count

    def _decode(self, name: str, count: int) -> np.ndarray:
        files, clip, decoded = self._files[name], list[np.ndarray](), 0
        # The middles of equal spans.
        wanted = [i * count // (2 * self.frames) for i in range(1, 2 * self.frames, 2)]
        if _is_frame(files[0]):  # the other files need not be opened
            files, wanted = [files[i] for i in wanted], range(self.frames)
        for decoded, frame in enumerate(chain.from_iterable(map(_frames, files)), 1):
            if decoded - 1 in wanted:
                clip.append(_fit(frame, self.shape))
        if len(clip) == self.frames:
            return np.stack(clip)
        if self.frames <= decoded < count:  # a video cut without re-encoding has frames that are not shown
            self._counts[name] = decoded
            return self._decode(name, decoded)
        raise UnreadableError(f"shows {decoded} frames, {self.frames} are needed")


def read_captions(path: Path) -> list[tuple[str, str]]:
    """Return file names, relative to the captions' folder, and their captions."""
    example = '{"file": "a.mp4", "caption": "a cat on a mat"}'
    if not path.is_file():
        raise InputError(f"There is no {path}.", hint=f"It must have a line for each clip, such as {example}")
    captions = list[tuple[str, str]]()
    for number, line in enumerate(read_bytes(path, limit=MAX_CAPTIONS_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        match parse_json(line, f"Line {number} of {path}"):
            case {"file": str(file), "caption": str(caption)} if file:
                name = PurePosixPath(file)
            case _:
                raise InputError(
                    f"Line {number} of {path} has no file or no caption.", hint=f"Write {example}"
                )
        if name.is_absolute() or ".." in name.parts:
            raise InputError(
                f"Line {number} of {path} leads out of the folder: {file}.", hint="Move the clip into it."
            )
        captions.append((str(name), caption))
    return captions


def summarize_skipped(skipped: Sequence[tuple[str, str]]) -> str:
    """Return the number of skipped clips, and the first of them with their reasons."""
    first = "; ".join(f"{name} {reason}" for name, reason in skipped[:MAX_NAMED])
    return f"{len(skipped)} skipped: {first}{'; …' if len(skipped) > MAX_NAMED else '.'}" if skipped else ""


def _find(root: Path) -> dict[str, list[Path]]:
    """Return the files of each clip by its name: a video, or PNG frames in order."""
    clips = dict[str, list[Path]]()
    for path in sorted(root.rglob("*"), key=_natural_order):
        if any(name.startswith(".") for name in path.relative_to(root).parts):
            continue
        if path.suffix.lower() in VIDEOS:
            name = path
        elif not _is_frame(path):
            continue
        else:
            name = path.parent
            if name == root:
                name = path.with_stem(re.sub("[0-9]+$", "*", path.stem))
        clips.setdefault(name.relative_to(root).as_posix(), []).append(path)
    return clips


def _natural_order(path: Path) -> list[int | str]:
    """Return a sort key that puts 9 before 10."""
    return [int(s) if i % 2 else s for i, s in enumerate(re.split("([0-9]+)", path.as_posix()))]


def _is_frame(path: Path) -> bool:
    return path.suffix.lower() == ".png"


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Open a file and its video stream; an error of the library becomes the reason to skip the clip."""
    import av
    from av.error import FFmpegError

    if not path.is_file():
        raise UnreadableError("is not a regular file")
    try:
        with av.open(str(path), metadata_errors="replace") as container:  # titles are not always in UTF-8
            if not container.streams.video:
                raise UnreadableError("has no pictures")
            stream = container.streams.video[0]
            if stream.width * stream.height > MAX_PIXELS:
                raise UnreadableError(f"has frames of {stream.width} × {stream.height} pixels")
            yield container, stream
    except (FFmpegError, OSError) as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error


def _count(path: Path) -> int:
    with _opened(path) as (container, stream):
        return stream.frames or sum(packet.size > 0 for packet in container.demux(stream))


def _frames(path: Path) -> Iterator[Any]:
    """Yield the frames of a video or an image."""
    with _opened(path) as (container, stream):
        yield from container.decode(stream)


def _fit(frame: Any, shape: tuple[int, int]) -> np.ndarray:
    """Return the pixels of a frame, scaled to fill the shape, cropped around the center, and upright."""
    turns = round(frame.rotation / 90)  # set by phones
    height, width = shape if turns % 2 == 0 else shape[::-1]
    ratio = max(height / frame.height, width / frame.width)
    tall, wide = max(height, round(frame.height * ratio)), max(width, round(frame.width * ratio))
    scaled = frame.reformat(width=wide, height=tall, format="rgb24", interpolation="AREA").to_ndarray()
    top, left = (tall - height) // 2, (wide - width) // 2
    return np.rot90(scaled[top : top + height, left : left + width], turns)
