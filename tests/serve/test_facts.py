"""Facts: what pipelines can make, in numbers that a server can check requests by."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from tests.diffusers.checkpoints import CALLS, TINY
from tests.diffusers.toys import seeded
from weft.core import tables
from weft.serve.facts import facts_of
from weft.serve.model_facts import ModelFacts
from weft.video.captions import LENGTH, WORDS
from weft.video.pipeline import VideoPipeline
from weft.video.transformer import DiTConfig, VideoDiT
from weft.video.vocabulary import Vocabulary


def test_own_model() -> None:
    config = DiTConfig(words=len(WORDS), length=LENGTH, video=(8, 16, 24), patch=(4, 8, 8), width=36, heads=3)
    model: Any = seeded(VideoDiT(config), dtype=torch.float32)
    facts = facts_of(VideoPipeline(model), "tiny")
    assert tables.read(ModelFacts, json.loads(json.dumps(asdict(facts))), "facts") == facts
    expected = {
        "model": "tiny", "pipeline": "VideoPipeline", "kinds": ("video", "image"), "frames": 8, "height": 16,
        "width": 24, "multiple": (4, 8, 8), "first": 0, "patch": (4, 8, 8), "steps": 30, "guidance": 2.0,
        "fps": 16.0, "heads": 3, "head_dim": 12, "depth": 6, "width_model": 36, "text_tokens": LENGTH,
        "dtype": "float32", "params": sum(x.numel() for x in model.parameters()), "alike": ("more",),
        "needs_image": False, "vocabulary": WORDS[1:], "closed_vocabulary": True,
    }  # fmt: skip
    assert {name: getattr(facts, name) for name in expected} == expected
    assert facts.bytes == 4 * facts.params
    assert {"prompt", "generator", "num_frames"} <= set(facts.takes)
    assert "self" not in facts.takes


def test_own_model_with_words_of_its_own_refuses_none() -> None:
    words = Vocabulary.of(["a dog", "a cat"])
    config = DiTConfig(words=4 + 1, length=32, video=(8, 16, 24), patch=(4, 8, 8), width=36, heads=3)
    assert len(words.words) == config.words
    facts = facts_of(VideoPipeline(seeded(VideoDiT(config), dtype=torch.float32), words), "tiny")
    assert (facts.vocabulary, facts.closed_vocabulary) == (("a", "cat", "dog"), False)


@pytest.mark.parametrize(
    ("name", "kinds", "multiple", "first", "frames"),
    [
        ("wan", ["video", "image"], [4, 16, 16], 1, 81),
        ("wan-i2v", ["video"], [4, 16, 16], 1, 81),
        ("ltx", ["video", "image"], [8, 32, 32], 1, 161),
        ("mochi", ["video", "image"], [6, 16, 16], 1, 19),
        ("cogvideox", ["video", "image"], [4, 16, 16], 1, 9),
        ("flux", ["image"], [1, 16, 16], 0, 1),
        ("sd3", ["image"], [1, 16, 16], 0, 1),
    ],
)
def test_pipelines_of_diffusers(
    name: str, kinds: list[str], multiple: list[int], first: int, frames: int
) -> None:
    facts = facts_of(TINY[name](), name)
    assert tables.read(ModelFacts, json.loads(json.dumps(asdict(facts))), "facts") == facts
    assert (facts.kinds, facts.multiple, facts.frames) == (tuple(kinds), tuple(multiple), frames)
    assert facts.frames % facts.multiple[0] == first == facts.first
    # What tests call it with is something that it can make.
    sizes = [CALLS[name].get("num_frames", 1) - first, CALLS[name]["height"], CALLS[name]["width"]]
    assert [size % part for size, part in zip(sizes, multiple, strict=True)] == [0, 0, 0]
    assert facts.heads in (3, 5)
    assert facts.depth == 2
    assert facts.params > 0
