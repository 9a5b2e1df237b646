"""One call of an adapter that is compiled for a GPU which is not there, in a process of its own.

python -m tests.cuda.case '{"backend": "fa4", "arch": "sm_90", "head_dim": 128}'
python -m tests.cuda.case '[…]'       many, whose arguments the package checks without compiling
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.cuda.fake_gpu import Launches, pretend

REFUSALS = (AssertionError, NotImplementedError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Case:
    """What is asked of an adapter."""

    backend: str
    arch: str
    head_dim: int
    blocks: tuple[int, int] | None = None
    """None for dense tiles."""
    directions: tuple[str, ...] = ("forward", "backward")
    dtype: str = "bfloat16"
    heads: int = 4
    kv_heads: int = 4
    rows: int = 1000
    tokens_first: bool = False
    """Whether operands lie in memory as [B, S, H, D]."""
    part: str = ""
    """Whether operands are some "heads" or "tokens" of larger tensors."""
    batch: int = 2
    has_empty: bool = True

    def __str__(self) -> str:
        given = [
            f"{field.name}={value}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return " ".join(given)


KEYS = 1000


def tiles_of(case: Case) -> Any:
    """Tiles whose lists are fake tensors of the device: no value of theirs is looked at."""
    import torch

    from weft.run.kernels.tiles import Blocks, Tiles

    if case.blocks is None:
        return Tiles(None, case.rows, KEYS, case.rows, KEYS)
    block_q, block_k = case.blocks
    shape = case.heads, -(-case.rows // block_q), -(-KEYS // block_k)
    active = np.zeros(shape, dtype=bool)
    active[:, 1 if case.has_empty else 0 :, :3] = True
    count = int(active.sum())
    device = torch.device("cuda", 0)
    starts, kv = (
        torch.zeros(size, dtype=torch.int32, device=device) for size in (shape[0] * shape[1] + 1, count)
    )
    tiles = Tiles(active, block_q, block_k, case.rows, KEYS)
    tiles.cached(("lists", device), lambda: Blocks(*shape, starts, kv))
    return tiles


def operand(case: Case, heads: int, tokens: int) -> Any:
    import torch

    spare = {"heads": 2, "tokens": 64}.get(case.part, 0)
    sizes = [heads, tokens]
    sizes[case.part == "tokens"] += spare
    shape = sizes[::-1] if case.tokens_first else sizes
    x = torch.empty(case.batch, *shape, case.head_dim, dtype=getattr(torch, case.dtype), device="cuda:0")
    x = x.transpose(1, 2) if case.tokens_first else x
    return x[:, spare:] if case.part == "heads" else x[:, :, spare:]


def run(case: Case, kernel: Any) -> dict[str, Any]:
    """Call the adapter in the directions of a case; return shapes and dtypes of what it gives."""
    import torch

    tiles = tiles_of(case)
    q = operand(case, case.heads, case.rows)
    k, v = (operand(case, case.kv_heads, KEYS) for _ in range(2))
    results: dict[str, Any] = {}
    if "forward" in case.directions:
        results["forward"] = kernel.attend(q, k, v, tiles, 0.1)
    if "backward" in case.directions:
        out, lse = (torch.empty(shape, device="cuda:0") for shape in (q.shape, q.shape[:-1]))
        grad = operand(case, case.heads, case.rows)
        results["backward"] = kernel.attend_backward(grad, q, k, v, (out, lse), tiles, 0.1)
    return {
        name: [[list(x.shape), str(x.dtype).removeprefix("torch.")] for x in tensors]
        for name, tensors in results.items()
    }


def adapter(backend: str) -> Any:
    from weft.run.kernels import make

    return make(backend)


def compile_case(case: Case) -> dict[str, Any]:
    launches: Launches
    with pretend(case.arch, compiles=True) as launches:
        results = run(case, adapter(case.backend))
    cubins = sorted(Path(os.environ["CUTE_DSL_DUMP_DIR"]).glob("*.cubin"))
    return {"results": results, "launches": launches, "cubins": [describe(path) for path in cubins]}


def describe(cubin: Path) -> list[Any]:
    """[the class of the kernel, the architecture in the flags of its ELF header]."""
    name = cubin.name.partition("_object_at_")[0]
    classes = [word for word in ("FlashAttention", "BlockSparse", "Bucketed") if word in name]
    kind = name[name.rindex(classes[0]) :] if classes else name
    return [kind, cubin.read_bytes()[49]]


def refusal(case: Case) -> str:
    """Why the package itself refuses what the adapter would have passed without its own check."""
    module = import_module(f"weft.run.kernels.{case.backend}")
    with mock.patch.object(module, "check", lambda *_, **__: None):
        try:
            run(case, adapter(case.backend))
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    given = json.loads(sys.argv[1])
    if isinstance(given, dict):
        answer: Any = compile_case(Case(**given))
    else:
        cases = [Case(**each) for each in given]
        with pretend(cases[0].arch, compiles=False):
            answer = [refusal(case) for case in cases]
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
