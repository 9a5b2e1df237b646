"""What docs/models.md and docs/parallelize.md show: a model with its adapter, a producer of masks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weft
from tests.diffusers.toys import normal, on_ranks, seeded
from weft.run.world import World

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def painted(world: World | None, mask: Any = None) -> Tensor:
    names: dict[str, Any] = {}
    model, adapter, _ = blocks("models.md")
    exec(model, names)  # noqa: S102 - it is ours
    exec(adapter, names)  # noqa: S102
    made = seeded(names["Painter"]())
    if world is not None:
        weft.parallelize(made, adapter=names["painter"], mesh=world, sparse=mask)
    return made(normal(2, 7, 11, 4)).detach()


def test_a_model_with_an_adapter_of_the_users_own() -> None:
    alone = painted(None)
    for out in on_ranks(3, painted):
        assert (out - alone).abs().max() <= 1e-12 * alone.abs().max()


def test_a_producer_of_the_users_own() -> None:
    names: dict[str, Any] = {}
    exec(next(block for block in blocks("parallelize.md") if "class Near" in block), names)  # noqa: S102
    alone = on_ranks(1, lambda world: painted(world, names["Near"]()))[0]
    assert not torch.allclose(alone, painted(None))
    for out in on_ranks(3, lambda world: painted(world, names["Near"]())):
        assert (out - alone).abs().max() <= 1e-12 * alone.abs().max()
