"""The checker: an eye that reads count, colours, kinds, motions and order off a clip, to judge its caption.

It forgives soft edges, noise and dim colours, not a wrong shape: what it cannot name it leaves "", which no
caption asks for.
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
from weft.models.words import CAMERA, COLOURS, DIRECTIONS, KINDS, STILL, Phrase, parse
from weft.train.pan import follow, told_motion
from weft.train.scenes import STEPS, coverage, spread, unmix

# Shares of the frame or of a shape: of the smallest shape a third; half of the shortest way; and so on.
LEAST_AREA = 0.012
LEAST_TRAVEL = 0.19
LEAST_FIT = 0.7
LEAST_HIDDEN = 0.1
WHOLE = 0.9
WEIGHTS = {"colour": 3, "kind": 2, "motion": 2}  # what makes a shape seen the shape told


class Judgement(NamedTuple):
    """One thing a caption told, and what the frames show instead."""

    part: str
    told: str
    seen: str

    @property
    def right(self) -> bool:
        return self.told == self.seen


@dataclass(frozen=True)
class Accuracy:
    """How many were right, the 95 % interval (Wilson), the same part by part, and what was taken for what."""

    right: int
    total: int
    parts: dict[str, Accuracy] = field(default_factory=dict)
    mistakes: dict[Judgement, int] = field(default_factory=dict)

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
        return text + "".join(f"; {part} {each.right / each.total:.1%}" for part, each in self.parts.items())


def accuracy(clips: Iterable[np.ndarray], captions: Sequence[str]) -> Accuracy:
    """Which share of the clips shows all that their captions tell; a part is counted wherever it is told."""
    judged = [judge(frames, caption) for frames, caption in zip(clips, captions, strict=True)]
    every = [judgement for clip in judged for judgement in clip]
    told, right = (Counter(j.part for j in some) for some in (every, [j for j in every if j.right]))
    parts = {part: Accuracy(right[part], total) for part, total in told.items()}
    mistakes = dict(Counter(j for j in every if not j.right).most_common())
    return Accuracy(sum(all(j.right for j in clip) for clip in judged), len(judged), parts, mistakes)


def judge(frames: np.ndarray, caption: str) -> list[Judgement]:
    """All that a caption tells of a clip [T, H, W, 3], uint8 or floats from 0 to 1, beside what is seen."""
    if frames.ndim != 4 or frames.shape[-1] != 3 or len(frames) < 2:
        raise InputError(f"A clip of shape {frames.shape}.", hint="It has [frames, height, width, 3].")
    if frames.dtype != np.uint8:
        frames = 255 * np.clip(np.nan_to_num(frames), 0, 1)
    told, seen = parse(caption), see(frames)
    if not told:
        raise InputError("An empty caption tells nothing that could be wrong.", hint="Leave its clip out.")
    if told[0].kind == CAMERA:
        judged = [Judgement("camera", told[0].motion, told_motion(follow(frames)))]
        told = told[1:]  # of the shapes only the one in front is told
    else:
        judged = [Judgement("count", str(len(told)), str(len(seen)))]
    match = _match(told, seen)
    for phrase, found in zip(told, match, strict=True):
        judged += [Judgement(part, getattr(phrase, part), getattr(found, part)) for part in WEIGHTS]
    if len(told) == 2:
        behind = match[1].joint == "over"  # the second is seen in front of the first
        judged.append(
            Judgement("joint", told[0].joint, "under" if behind else match[0].joint or match[1].joint)
        )
    return [judgement for judgement in judged if judgement.told]


def _match(told: Sequence[Phrase], seen: Sequence[Phrase]) -> tuple[Phrase, ...]:
    """What is seen, in the caption's order, as it agrees with it most; an empty phrase where nothing is."""

    def agreement(order: tuple[Phrase, ...]) -> int:
        pairs = list(zip(told, order, strict=True))
        return sum(w for part, w in WEIGHTS.items() for t, s in pairs if getattr(t, part) == getattr(s, part))

    return max(permutations([*seen, *[Phrase()] * len(told)], len(told)), key=agreement)


def see(frames: np.ndarray) -> tuple[Phrase, ...]:
    """The shapes of a clip (0 to 255), the front one first; a colour in two pieces counts twice."""
    label, share = unmix(frames)
    found = [blob for c in range(len(COLOURS)) for blob in _blobs(COLOURS[c], np.where(label == c, share, 0))]
    found.sort(key=lambda blob: blob.hidden)
    phrases = [blob.phrase for blob in found]
    if len(found) == 2:
        phrases[0] = replace(phrases[0], joint="over" if found[1].hidden > LEAST_HIDDEN else "and")
    return tuple(phrases)


class Blob(NamedTuple):
    phrase: Phrase
    hidden: float  # the largest share of it that was out of sight at a time


def _blobs(colour: str, share_THW: np.ndarray) -> Iterator[Blob]:
    frames, height, width = share_THW.shape
    weight_THW = _trimmed(share_THW)
    area_T = weight_THW.sum((1, 2))
    if np.median(area_T) < LEAST_AREA * height * width:
        return
    full = np.quantile(area_T, 0.9)
    whole = np.flatnonzero(area_T >= WHOLE * full)
    best = whole[np.argsort(-area_T[whole], kind="stable")[:5]]
    x, y = weight_THW.sum(1) @ np.arange(width), weight_THW.sum(2) @ np.arange(height)
    centre_T2 = np.stack([x, y], 1) / np.maximum(area_T, 1e-6)[:, None]
    kind = _kind(weight_THW[best], centre_T2[best])
    motion = _motion(whole / (frames - 1), centre_T2[whole] / (width, height))
    for _ in range(_pieces(share_THW[best] > 0.5)):
        yield Blob(Phrase(colour, kind, motion), float(1 - area_T.min() / full))


@cache
def _area(kind: str) -> float:
    """The area of a shape of radius 1."""
    reach = np.arange(-100, 101, dtype=np.float32)
    return float(coverage(kind, reach, reach[:, None], 50.0).sum() / 50.0**2)


def _kind(weight_FHW: np.ndarray, centre_F2: np.ndarray) -> str:
    """The kind that covers the same pixels best, sharp or blurred, at the same place."""
    _, height, width = weight_FHW.shape
    x = np.arange(width) - centre_F2[:, None, None, 0]
    y = np.arange(height)[:, None] - centre_F2[:, None, None, 1]
    mass = weight_FHW.sum((1, 2))[:, None, None]
    fits = {}
    for kind, grown in product(KINDS, (1.0, 1.15)):  # a blur costs area at the edges
        sharp = coverage(kind, x, y, grown * np.sqrt(mass / _area(kind)))
        for template in (sharp, _trimmed(_blurred(sharp))):
            fit = np.minimum(template, weight_FHW).sum() / np.maximum(template, weight_FHW).sum()
            fits[fit] = kind
    return fits[max(fits)] if max(fits) >= LEAST_FIT else ""


def _trimmed(share_FHW: np.ndarray) -> np.ndarray:
    """Edges count by how much they are covered, the background beyond them not at all."""
    return np.where(spread(share_FHW > 0.5), share_FHW, 0)


def _blurred(x_FHW: np.ndarray) -> np.ndarray:
    """By about a pixel."""
    for axis in (1, 2, 1, 2):
        x_FHW = (np.roll(x_FHW, 1, axis) + 2 * x_FHW + np.roll(x_FHW, -1, axis)) / 4
    return x_FHW


def _motion(time_F: np.ndarray, centre_F2: np.ndarray) -> str:
    """The direction of a straight line through the centres, in frame widths and clip lengths."""
    if np.ptp(time_F) < 0.12:
        return ""
    line = np.polyfit(time_F, centre_F2, 1)
    travel = line[0]
    if np.sqrt(((np.outer(time_F, travel) + line[1] - centre_F2) ** 2).sum(1).mean()) > 0.06:
        return ""  # it jumps about
    if np.abs(travel).max() < LEAST_TRAVEL:
        return STILL
    along = {d: float(travel @ np.array(STEPS[d])) for d in DIRECTIONS}
    best = max(along, key=lambda d: along[d])
    return best if along[best] > 2 * np.abs(travel).min() else ""


def _pieces(mask_FHW: np.ndarray) -> int:
    """Into how many parts of like size a mask falls, in the middle one of its frames."""
    names = np.where(mask_FHW, np.arange(1, mask_FHW[0].size + 1).reshape(mask_FHW[0].shape), 0)
    while True:  # the largest name floods its part
        flood = spread(names) * mask_FHW
        if (flood == names).all():
            break
        names = flood
    sizes = [np.bincount(frame[frame > 0]) for frame in names]
    return max(1, int(np.median([(size > 0.3 * size.max(initial=1)).sum() for size in sizes])))
