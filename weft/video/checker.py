"""The checker: detect count, colors, kinds, motions and order in a clip, and judge its caption by them.

It tolerates soft edges, noise and dim colors, but no wrong shape: an unrecognizable attribute is "", which
matches no caption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

from weft.core.errors import InputError
from weft.video.captions import CAMERA, COLORS, DIRECTIONS, KINDS, STILL, Phrase, parse
from weft.video.pan import camera_motion, track_camera
from weft.video.scenes import STEPS, coverage, dilate, unmix

MIN_AREA = 0.012
"""Share of the frame: a third of the smallest shape."""
MIN_TRAVEL = 0.19
"""Share of the frame per clip: half of the shortest path."""
MIN_FIT = 0.7
MIN_HIDDEN = 0.1
MIN_VISIBLE = 0.9
"""Share of a shape's area from which it counts as unoccluded."""
MATCH_WEIGHTS = {"color": 3, "kind": 2, "motion": 2}


class Judgment(NamedTuple):
    """One attribute of a caption, and the value that the frames show."""

    attribute: str
    expected: str
    detected: str

    @property
    def right(self) -> bool:
        return self.expected == self.detected


@dataclass(frozen=True)
class Accuracy:
    """The number right, its 95 % interval (Wilson), the same by attribute, and the mistakes by count."""

    right: int
    total: int
    parts: dict[str, Accuracy] = field(default_factory=dict)
    mistakes: dict[Judgment, int] = field(default_factory=dict)

    @property
    def low(self) -> float:
        return self._wilson(-1)

    @property
    def high(self) -> float:
        return self._wilson(1)

    def _wilson(self, side: int) -> float:
        if not self.total:
            return (1 + side) / 2
        z, n, p = 1.959964, self.total, self.right / self.total
        reach = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return float(np.clip((p + z * z / (2 * n) + side * reach) / (1 + z * z / n), 0, 1))

    def __str__(self) -> str:
        share = self.right / max(1, self.total)
        text = f"{share:.1%} ({self.low:.1%} to {self.high:.1%}) of {self.total}"
        return text + "".join(f"; {name} {each.right / each.total:.1%}" for name, each in self.parts.items())


def accuracy(clips: Iterable[np.ndarray], captions: Sequence[str]) -> Accuracy:
    """Count the clips that show all of their captions, and each attribute over the captions that have it."""
    judged = [judge(frames, caption) for frames, caption in zip(clips, captions, strict=True)]
    flat = [judgment for clip in judged for judgment in clip]
    right = Counter(j.attribute for j in flat if j.right)
    parts = {name: Accuracy(right[name], n) for name, n in Counter(j.attribute for j in flat).items()}
    mistakes = dict(Counter(j for j in flat if not j.right).most_common())
    return Accuracy(sum(all(j.right for j in clip) for clip in judged), len(judged), parts, mistakes)


def judge(frames: np.ndarray, caption: str) -> list[Judgment]:
    """Judge every attribute in the caption of a clip [T, H, W, 3], uint8 or floats from 0 to 1."""
    if frames.ndim != 4 or frames.shape[-1] != 3 or len(frames) < 2:
        raise InputError(f"A clip must be [frames >= 2, height, width, 3], got {list(frames.shape)}.")
    if frames.dtype != np.uint8:
        frames = 255 * np.clip(np.nan_to_num(frames), 0, 1)
    expected, detected = parse(caption), detect(frames)
    if not expected:
        raise InputError("An empty caption cannot be judged.", hint="Leave its clip out.")
    if expected[0].kind == CAMERA:
        judged = [Judgment("camera", expected[0].motion, camera_motion(track_camera(frames)))]
        expected = expected[1:]  # the caption has the front shape only
    else:
        judged = [Judgment("count", str(len(expected)), str(len(detected)))]
    match = _match(expected, detected)
    for phrase, other in zip(expected, match, strict=True):
        judged += [Judgment(name, getattr(phrase, name), getattr(other, name)) for name in MATCH_WEIGHTS]
    if len(expected) == 2:
        is_behind = match[1].joint == "over"
        joint = "under" if is_behind else match[0].joint or match[1].joint
        judged.append(Judgment("joint", expected[0].joint, joint))
    return [judgment for judgment in judged if judgment.expected]


def _match(expected: Sequence[Phrase], detected: Sequence[Phrase]) -> tuple[Phrase, ...]:
    """Order detected phrases to agree with the caption; an empty phrase stands for a missing one."""

    def agreement(order: tuple[Phrase, ...]) -> int:
        pairs = list(zip(expected, order, strict=True))
        return sum(
            weight
            for name, weight in MATCH_WEIGHTS.items()
            for a, b in pairs
            if getattr(a, name) == getattr(b, name)
        )

    return max(permutations([*detected, *[Phrase()] * len(expected)], len(expected)), key=agreement)


def detect(frames: np.ndarray) -> tuple[Phrase, ...]:
    """Return the shapes of a clip (0 to 255), front first; a color in two pieces counts twice."""
    label, share = unmix(frames)
    blobs = [blob for c in range(len(COLORS)) for blob in _blobs(COLORS[c], np.where(label == c, share, 0))]
    blobs.sort(key=lambda blob: blob.hidden)
    phrases = [blob.phrase for blob in blobs]
    if len(blobs) == 2:
        phrases[0] = replace(phrases[0], joint="over" if blobs[1].hidden > MIN_HIDDEN else "and")
    return tuple(phrases)


class Blob(NamedTuple):
    phrase: Phrase
    hidden: float  # the largest share that is hidden in any frame


def _blobs(color: str, share_THW: np.ndarray) -> Iterator[Blob]:
    frames, height, width = share_THW.shape
    weight_THW = _trimmed(share_THW)
    area_T = weight_THW.sum((1, 2))
    if np.median(area_T) < MIN_AREA * height * width:
        return
    full = np.quantile(area_T, 0.9)
    visible = np.flatnonzero(area_T >= MIN_VISIBLE * full)
    best = visible[np.argsort(-area_T[visible], kind="stable")[:5]]
    x, y = weight_THW.sum(1) @ np.arange(width), weight_THW.sum(2) @ np.arange(height)
    center_T2 = np.stack([x, y], 1) / np.maximum(area_T, 1e-6)[:, None]
    kind = _kind(weight_THW[best], center_T2[best])
    motion = _motion(visible / (frames - 1), center_T2[visible] / (width, height))
    for _ in range(_pieces(share_THW[best] > 0.5)):
        yield Blob(Phrase(color, kind, motion), float(1 - area_T.min() / full))


@cache
def _area(kind: str) -> float:
    """Return the area of a shape of radius 1."""
    reach = np.arange(-100, 101, dtype=np.float32)
    return float(coverage(kind, reach, reach[:, None], 50.0).sum() / 50.0**2)


def _kind(weight_FHW: np.ndarray, center_F2: np.ndarray) -> str:
    """Return the kind whose template, sharp or blurred, fits the pixels best."""
    _, height, width = weight_FHW.shape
    x = np.arange(width) - center_F2[:, None, None, 0]
    y = np.arange(height)[:, None] - center_F2[:, None, None, 1]
    mass = weight_FHW.sum((1, 2))[:, None, None]
    fits = {}
    for kind, grown in product(KINDS, (1.0, 1.15)):  # a blur costs area at the edges
        sharp = coverage(kind, x, y, grown * np.sqrt(mass / _area(kind)))
        for template in (sharp, _trimmed(_blurred(sharp))):
            fit = np.minimum(template, weight_FHW).sum() / np.maximum(template, weight_FHW).sum()
            fits[fit] = kind
    return fits[max(fits)] if max(fits) >= MIN_FIT else ""


def _trimmed(share_FHW: np.ndarray) -> np.ndarray:
    """Keep partly covered pixels at the edges, and clear the background beyond them."""
    return np.where(dilate(share_FHW > 0.5), share_FHW, 0)


def _blurred(x_FHW: np.ndarray) -> np.ndarray:
    """Blur by about a pixel."""
    for axis in (1, 2, 1, 2):
        x_FHW = (np.roll(x_FHW, 1, axis) + 2 * x_FHW + np.roll(x_FHW, -1, axis)) / 4
    return x_FHW


def _motion(time_F: np.ndarray, center_F2: np.ndarray) -> str:
    """Return the direction of a line fitted to the centers, in frame widths and clip lengths."""
    if np.ptp(time_F) < 0.12:
        return ""
    line = np.polyfit(time_F, center_F2, 1)
    travel = line[0]
    if np.sqrt(((np.outer(time_F, travel) + line[1] - center_F2) ** 2).sum(1).mean()) > 0.06:
        return ""  # the path is not straight
    if np.abs(travel).max() < MIN_TRAVEL:
        return STILL
    along = {d: float(travel @ np.array(STEPS[d])) for d in DIRECTIONS}
    best = max(along, key=lambda d: along[d])
    return best if along[best] > 2 * np.abs(travel).min() else ""


def _pieces(mask_FHW: np.ndarray) -> int:
    """Count the connected pieces of similar size of a mask: the median over its frames."""
    labels = np.where(mask_FHW, np.arange(1, mask_FHW[0].size + 1).reshape(mask_FHW[0].shape), 0)
    while True:  # the largest label floods its piece
        flood = dilate(labels) * mask_FHW
        if (flood == labels).all():
            break
        labels = flood
    sizes = [np.bincount(frame[frame > 0]) for frame in labels]
    return max(1, int(np.median([(size > 0.3 * size.max(initial=1)).sum() for size in sizes])))
