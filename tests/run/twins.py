"""Twins: a program bound twice to equal memory, by torch's copies and by fused ones."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from weft.core.schedule import Schedule
from weft.program.steps import Cast, Copy, Program, View, accesses
from weft.run import bind
from weft.run.bind import Bound, RunFrame
from weft.run.copies import Copier, Slots
from weft.run.fused import FusedCopier

CPU = torch.device("cpu")


def numbers(size: int, rng: np.random.Generator) -> Tensor:
    """Bytes that are finite numbers in every dtype."""
    data = rng.integers(0, 256, size + size % 2, dtype=np.uint8)
    data[1::2] = 0x3F
    return torch.from_numpy(data)[:size]


def tensor(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator, how: int = 0) -> Tensor:
    """Random numbers: contiguous, tokens before heads, at an odd address, or with columns far apart."""
    spread = {1: (0, 2, 1, 3), 3: (0, 1, 3, 2)}.get(how, tuple(range(len(shape))))
    memory = tuple(shape[dim] for dim in spread)
    count = int(np.prod(memory))
    flat = numbers((count + 1) * dtype.itemsize, rng).view(dtype)
    x = (flat[1:] if how == 2 else flat[:count]).view(memory)
    return x.permute(tuple(np.argsort(spread)))


class Twin:
    """A program bound twice to memory with equal bytes: by torch's copies and by fused ones."""

    def __init__(
        self, program: Program, schedule: Schedule, rng: np.random.Generator, hows: list[int]
    ) -> None:
        self.program = program
        block: Tensor | None = None
        lives: list[tuple[Bound, RunFrame, list[Tensor]]] = []
        seed = int(rng.integers(1 << 30))
        for copier in (Copier, FusedCopier):
            fresh = np.random.default_rng(seed)
            bound = Bound(program, schedule, 0, CPU)
            block, lent = (numbers(size, fresh) for size in (bound.num_bytes, bound.window.num_bytes))
            with patch.object(bind, "copier_of", copier):
                bound.bind(block, lent)
            frame = RunFrame(None, None, 1.0, CPU, None)  # type: ignore[arg-type]
            given = self._given(fresh, hows)
            bound.begin(frame, given)
            for root in program.roots:
                if root.memory == "peer":
                    bound._carve(root, numbers(root.num_bytes, fresh), frame.slots, {})
            for planes in frame.slots.values():
                for x in planes:
                    if x.is_contiguous() and not any(x is y for some in given.values() for y in some):
                        x.copy_(tensor(tuple(x.shape), x.dtype, fresh))
            lives.append((bound, frame, [block, lent]))
        self.lives = lives

    def _given(self, rng: np.random.Generator, hows: list[int]) -> Slots:
        """Tensors of the caller and of kernels, in any strides."""
        given: Slots = {}
        for slot in self.program.roots:
            if slot.memory in ("input", "saved", "kernel") and slot.shape:
                planes, *shape = slot.shape
                how = hows if len(shape) == 4 else [0]
                given[slot] = tuple(
                    tensor(tuple(shape), getattr(torch, slot.dtype), rng, how[plane % len(how)])
                    for plane in range(planes)
                )
        return given

    def check(self) -> int:
        """Run every copy both ways; return how many there were."""
        count = 0
        (one, a, old), (two, b, new) = self.lives
        for step, plain, fast in zip(self.program.steps, one.calls, two.calls, strict=True):
            if isinstance(step, Copy | Cast | View):
                plain(a)
                fast(b)
            if isinstance(step, Copy | Cast):
                count += 1
                for x, y in [*zip(old, new, strict=True), *_written(step, a.slots, b.slots)]:
                    assert torch.equal(_bits(x), _bits(y)), step
        return count


def _written(step: Copy | Cast, a: Slots, b: Slots) -> Iterator[tuple[Tensor, Tensor]]:
    for slot in accesses(step)[1]:
        yield from zip(a[slot], b[slot], strict=True)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.numel() else x
