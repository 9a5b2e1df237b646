"""Every adapter on a GPU that is none: weft adds no wait, no copy and no widening to what the model does."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

diffusers: Any = pytest.importorskip("diffusers")
# torch warns of it once in a process: norms of Flux3 and Kandinsky 5 have weights of another dtype.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")

import weft  # noqa: E402
from bench.dry import Transport  # noqa: E402
from tests.diffusers.zoo import ZOO  # noqa: E402
from tests.run.hot_path import Seen, fake_cuda  # noqa: E402
from weft.diffusers import attention_hook, padding  # noqa: E402
from weft.run.world import World  # noqa: E402

SELECT_BY_VALUE = (
    "mochi", "hunyuan-1.5", "chroma", "glm-image", "krea2", "ideogram4", "framepack", "minimax-h3",
    "minimax-music",
    "stable-audio", "ace-step", "qwen21", "wan-animate2", "stable-audio3", "longcat-audio", "lumina-next",
    "hidream",
)  # fmt: skip
"""Not watched here. Most read values in their own forward, as those of a mask, or call what FakeTensor cannot
do without a GPU; weft reads the layout of minimax-h3 once, and why wan-animate2 fails is not known."""


def on_device(name: str) -> tuple[Any, dict[str, Any]]:
    """A model in bfloat16 and its inputs."""
    entry = ZOO[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # fake parameters cannot be converted
    try:
        with torch.device("cuda"):
            model = getattr(diffusers, entry.model)(**entry.config).eval()
    finally:
        torch.set_default_dtype(before)
    inputs = entry.inputs(batch=1, grid=(3, 4, 5), dtype=torch.bfloat16)
    return model, tree_map_only(torch.Tensor, lambda x: x.to("cuda"), inputs)


def faults(seen: Seen) -> Counter[str]:
    return Counter(each.split("(")[0] for each in (*seen.reads, *seen.copies, *seen.mixed))


def without_padding(site: Any, mask: torch.Tensor, q: torch.Tensor) -> Any:
    """What a mask says, whose values FakeTensor does not have."""
    shards = site.region.shards
    return mask, [[shards.rows(site.streams, rank)] * len(q) for rank in range(shards.ranks)]


@pytest.mark.parametrize("name", [name for name in ZOO if name not in SELECT_BY_VALUE])
def test_parallelize_adds_nothing_that_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, monkeypatch, plan="usp:1x2")


@pytest.mark.parametrize("sparse", ["sta", "radial"])
def test_masks_that_stay_add_nothing_that_waits(sparse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check("wan", monkeypatch, plan="ulysses", sparse=sparse)


def check(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Compare a warm forward under weft with one of the model alone."""
    getattr(diffusers, ZOO[name].model)  # imported before anything is fake
    for module in ("weft.run.devices", "weft.diffusers.parallelize"):
        monkeypatch.setattr(import_module(module), "check_devices", lambda *_: None)
    monkeypatch.setattr(padding, "_unmasked_rows", without_padding)
    # The operation that torch.compile sees runs nothing for fake tensors.
    monkeypatch.setattr(import_module("weft.run.attention"), "is_plain", lambda *_: True)
    inside: list[str] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = len(seen.widened)
        try:
            return weft.attention(*args, **kwargs)
        finally:
            inside.extend(seen.widened[before:])

    monkeypatch.setattr(attention_hook, "attention", watched)
    with fake_cuda() as seen, torch.no_grad():
        model, inputs = on_device(name)
        model(**inputs)
        seen.clear()
        model(**inputs)
        plain = faults(seen)
        weft.parallelize(model, mesh=World(Transport(1, 2, collective=True)), **options)
        for _ in range(3):  # blocks grow with the second attention
            seen.clear()
            inside.clear()
            model(**inputs)
        assert not faults(seen) - plain
        assert any("_scaled_dot_product_" in name for name in seen.names)
    assert not inside
