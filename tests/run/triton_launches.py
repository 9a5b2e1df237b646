"""Compile what `Gpu` would launch, by the path of a launch: only the driver is another, and nothing runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from tests.run.triton_resources import _no_interpreter, _usage
from weft.run.kernels import Accumulator
from weft.run.kernels.tiles import Tiles
from weft.run.kernels.triton_attention import TritonAttention

KINDS = ("sparse", "dense", "views", "head dim 72")


class Launched(NamedTuple):
    """One kernel that was compiled instead of launched."""

    kernel: str
    grid: tuple[int, ...]
    spills: int
    bulk: int
    copies: int


def compile_launches(wanted: Iterable[tuple[str, str]]) -> list[list[Launched]]:
    """(target, kind): all kernels of a forward, a forward into sums and a backward, in fresh processes."""
    with ProcessPoolExecutor(2, get_context("spawn"), _no_interpreter) as pool:
        return list(pool.map(_launch, wanted))


def _launch(case: tuple[str, str]) -> list[Launched]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    name, kind = case
    target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[3:]), 32)
    facts = {"target": target, "device": case, "stream": 0}
    driver.set_active(
        SimpleNamespace(**{f"get_current_{key}": lambda *_, fact=fact: fact for key, fact in facts.items()})
    )
    launched: list[Launched] = []
    launch = JITFunction.run

    def compile_only(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        built = launch(self, *given, grid=grid, warmup=True, **options)
        launched.append(_read(self.__name__, grid, built))

    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(TritonAttention, "_check", lambda *_: None),  # it refuses tensors on the CPU
        patch("weft.run.kernels.triton_attention.target_of", lambda _: name),
    ):
        _attend(kind)
    return launched


def _attend(kind: str) -> None:
    """Forward, forward into a sum and backward of 2 heads that read one head of keys."""
    head_dim = 72 if kind == "head dim 72" else 128
    q = torch.zeros(2, 2, 300, head_dim, dtype=torch.bfloat16)
    k, v = (torch.zeros(2, 1, 256, head_dim, dtype=torch.bfloat16) for _ in range(2))
    if kind == "views":  # [B, S, H, D] in memory, and parts of something larger
        q = torch.zeros(2, 300, 2, head_dim, dtype=torch.bfloat16).transpose(1, 2)
        k = torch.zeros(2, 256, 1, 3 * head_dim, dtype=torch.bfloat16)[
            ..., head_dim : 2 * head_dim
        ].transpose(1, 2)
    active = np.ones((2, 3, 2), dtype=bool)
    active[0, 0] = False
    tiles = Tiles(None if kind == "dense" else active, 128, 128, 300, 256)
    sums = torch.zeros(q.shape), torch.zeros(q.shape[:-1])
    kernel = TritonAttention()
    kernel.attend(q, k, v, tiles, 0.1)
    kernel.attend(q, k, v, tiles, 0.1, into=Accumulator(*sums))
    kernel.attend_backward(q, q, k, v, sums, tiles, 0.1)


def _read(kernel: str, grid: tuple[int, ...], built: Any) -> Launched:
    if "amdgcn" in built.asm:
        text = built.asm["amdgcn"]
        found = re.findall(r"\.(?:\w+_spill_count|private_segment_fixed_size):\s+(\d+)", text)
        return Launched(kernel, grid, sum(map(int, found)), 0, 0)
    text, used = built.asm["ptx"], _usage(built.asm["cubin"])
    copies = len(re.findall(r"cp\.async\.c[ag]", text))
    return Launched(kernel, grid, used["STACK"] + used["LOCAL"], text.count("cp.async.bulk.tensor"), copies)
