"""Folder: videos on disk with captions in JSONL, read as they are asked for.

    clips/captions.jsonl    {"file": "a.mp4", "caption": "a cat on a mat"}
    clips/a.mp4             also .webm and .gif, in folders too
    clips/walk/             a folder of PNG frames is the clip "walk"
    clips/run_001.png …     PNG frames beside the captions are the clip "run_*.png"

What cannot be used is left out, counted and named. What turns out to be broken only when it is decoded is
replaced by the next good clip: which one depends on the files alone, so ranks need not tell each other.
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
from weft.models.vocabulary import Vocabulary

VIDEOS = (".mp4", ".webm", ".gif")
CAPTIONS = "captions.jsonl"
MEMORY = 256 << 20
MAX_CAPTIONS = 1 << 30
"""Bytes of a captions.jsonl."""
MAX_PIXELS = 1 << 26
"""Of a frame: a small file can hold a very large one."""
TOLD = 5
"""Skipped clips that a message names."""


class UnreadableError(Exception):
    """Why a clip cannot be used."""


class Stored(ABC):
    """Clips from disk by index, each with a caption."""

    def __init__(self, where: Path, clips: Sequence[tuple[str, str]], skipped: list[tuple[str, str]]) -> None:
        """Names of clips with captions; `skipped` has names with reasons, and gets more."""
        self.where, self.skipped, self._broken = where, skipped, set[str]()
        self.names, self.captions = [name for name, _ in clips], [caption for _, caption in clips]
        if not clips:
            raise InputError(f"There is no clip left in {where}.", hint=told(skipped) or "There was none.")
        if skipped:
            logging.getLogger(__name__).warning("Of %s, %s", where, told(skipped))
        self.vocabulary = Vocabulary.of(self.captions)
        self.border = len(clips)
        """Where the clips begin that are held out: a clip that breaks is replaced on its own side of it."""

    @property
    def digest(self) -> str:
        """Of names and captions: other ones make other words and other clips of the same numbers."""
        said = json.dumps([self.names, self.captions])
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    @property
    def size(self) -> int:
        return len(self.names)

    def batch(self, indices: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        """Clips [B, …] and their captions."""
        found = [self._next_good(index) for index in indices]
        return np.stack([clip for clip, _ in found]), [caption for _, caption in found]

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """A clip, or UnreadableError."""

    def _next_good(self, index: int) -> tuple[np.ndarray, str]:
        first, stop = (0, self.border) if index < self.border else (self.border, self.size)
        for i in chain(range(index, stop), range(first, index)):
            if self.names[i] in self._broken:
                continue
            try:
                return self.read(self.names[i]), self.captions[i]
            except UnreadableError as error:
                self._broken.add(self.names[i])
                self.skipped.append((self.names[i], str(error)))
                logging.getLogger(__name__).warning("Of %s, %s", self.where, told(self.skipped[-1:]))
        raise InputError(f"There is no clip left in {self.where}.", hint=told(self.skipped))


class Folder(Stored):
    """Pixels uint8 [B, T, H, W, 3] of videos, `frames` of each at even distances.

    size      the shorter side is scaled to it, the longer one cropped; or (height, width), to be filled.
    memory    bytes of decoded clips that are kept.
    """

    def __init__(
        self,
        path: Path | str,
        frames: int,
        size: int | tuple[int, int],
        captions: str = CAPTIONS,
        memory: int = MEMORY,
    ) -> None:
        root = Path(path)
        self.frames, self.shape = frames, (size, size) if isinstance(size, int) else size
        if min(frames, *self.shape) < 1:
            raise InputError(f"{frames} frames of {self.shape} pixels are no clips.", hint="Take 1 or more.")
        # Epochs ask for every clip once: the first ones are as good to keep as the last, and no work.
        self._room, self._kept = memory // (3 * frames * self.shape[0] * self.shape[1]), dict[str, Any]()
        said, self._files, self._counts = read_captions(root / captions), _find(root), dict[str, int]()
        skipped = dict[str, str]()
        for name in dict(said):
            try:
                self._counts[name] = self._count(name)
            except UnreadableError as error:
                skipped[name] = str(error)
        silent = self._files.keys() - skipped.keys() - self._counts.keys()
        skipped |= {name: "has no caption" for name in sorted(silent)}
        super().__init__(root, [each for each in said if each[0] in self._counts], list(skipped.items()))

    def read(self, name: str) -> np.ndarray:
        if name in self._kept:
            return self._kept[name]
        clip = self._decode(name, self._counts[name])
        if len(self._kept) < self._room:
            self._kept[name] = clip
        return clip

    def _count(self, name: str) -> int:
        """Frames, by what the file says."""
        if name not in self._files:
            raise UnreadableError("is not there")
        files = self._files[name]
        count = len(files) if _is_frame(files[0]) else _count(files[0])
        if count < self.frames:
            raise UnreadableError(f"has {count} frames, {self.frames} are needed")
        return count

    def _decode(self, name: str, count: int) -> np.ndarray:
        files, clip, seen = self._files[name], list[np.ndarray](), 0
        middles = range(1, 2 * self.frames, 2)  # of equal spans
        wanted = [i * count // (2 * self.frames) for i in middles]
        if _is_frame(files[0]):  # others need not be opened
            files, wanted = [files[i] for i in wanted], range(self.frames)
        for seen, frame in enumerate(chain.from_iterable(map(_frames, files)), 1):
            if seen - 1 in wanted:
                clip.append(_fit(frame, self.shape))
        if len(clip) == self.frames:
            return np.stack(clip)
        if self.frames <= seen < count:  # a film that was cut without a copy has frames that are not shown
            self._counts[name] = seen
            return self._decode(name, seen)
        raise UnreadableError(f"shows {seen} frames, {self.frames} are needed")


def read_captions(path: Path) -> list[tuple[str, str]]:
    """Files, which lie beside the captions or below, and what they show."""
    example = '{"file": "a.mp4", "caption": "a cat on a mat"}'
    if not path.is_file():
        raise InputError(f"There is no {path}.", hint=f"It has a line for each clip, such as {example}")
    found = list[tuple[str, str]]()
    for number, line in enumerate(read_bytes(path, limit=MAX_CAPTIONS).splitlines(), 1):
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
        found.append((str(name), caption))
    return found


def told(skipped: Sequence[tuple[str, str]]) -> str:
    """How many, and the first of them with their reasons."""
    first = "; ".join(f"{name} {reason}" for name, reason in skipped[:TOLD])
    return f"{len(skipped)} skipped: {first}{'; …' if len(skipped) > TOLD else '.'}" if skipped else ""


def _find(root: Path) -> dict[str, list[Path]]:
    """Clips by name: a video each, or PNG frames in their order."""
    found = dict[str, list[Path]]()
    for path in sorted(root.rglob("*"), key=_numbered):
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue
        if path.suffix.lower() in VIDEOS:
            name = path
        elif not _is_frame(path):
            continue
        else:
            name = path.parent
            if name == root:
                name = path.with_stem(re.sub("[0-9]+$", "*", path.stem))
        found.setdefault(name.relative_to(root).as_posix(), []).append(path)
    return found


def _numbered(path: Path) -> list[Any]:
    """9 before 10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split("([0-9]+)", path.as_posix()))]


def _is_frame(path: Path) -> bool:
    return path.suffix.lower() == ".png"


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """A file and its pictures; whatever the library has against it becomes the reason to skip it."""
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
    """Of a video or an image."""
    with _opened(path) as (container, stream):
        yield from container.decode(stream)


def _fit(frame: Any, shape: tuple[int, int]) -> np.ndarray:
    """Pixels of a frame, scaled to fill the shape, cropped around the middle, and upright."""
    turns = round(frame.rotation / 90)  # as telephones have it
    height, width = shape if turns % 2 == 0 else shape[::-1]
    ratio = max(height / frame.height, width / frame.width)
    tall, wide = max(height, round(frame.height * ratio)), max(width, round(frame.width * ratio))
    scaled = frame.reformat(width=wide, height=tall, format="rgb24", interpolation="AREA").to_ndarray()
    top, left = (tall - height) // 2, (wide - width) // 2
    return np.rot90(scaled[top : top + height, left : left + width], turns)
