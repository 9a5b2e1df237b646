"""Whole pipelines on ranks that are processes: the latents of one process, whatever the ranks' seeds."""

from __future__ import annotations

from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import weft  # noqa: E402
from tests.diffusers.checkpoints import NEGATIVE, PROMPT, TINY  # noqa: E402
from tests.distributed.jobs import Worlds  # noqa: E402
from tests.distributed.pipelines import Case, call, changes, error, generate, look, pipeline  # noqa: E402
from weft.core.errors import CommError  # noqa: E402
from weft.diffusers import attention_hook  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:CPU Autocast", "ignore:In CPU autocast", "ignore:__array__ implementation"
)

LIMIT = 2e-5
EVEN = (Case(), Case(cfg="off"), Case(branches=1))
ODD = (Case(), Case(branches=1))
TWO: dict[str, Any] = {"prompt": [PROMPT, "thread"], "negative_prompt": [NEGATIVE, "a torn old net"]}
"""Two texts of different lengths."""
MANY = (Case(more=TWO, seeds=(3, 8)), Case(branches=1, more={"prompt": TWO["prompt"]}, seeds=(3,)))
GENERATORS = (Case(seeds=(3,)), Case(branches=1, seeds=(3,)))
IMAGES, VIDEOS = (
    (Case(more={key: 2}), Case(branches=1, more={key: 2}))
    for key in ("num_images_per_prompt", "num_videos_per_prompt")
)
"""A batch of two is halved, be it guidance or not."""
OTHERS = {
    "wan": (*GENERATORS, *MANY, *VIDEOS),
    "hunyuan": (*GENERATORS, *MANY, *VIDEOS),
    "allegro": (*GENERATORS, *MANY),
    "flux": (*GENERATORS, *MANY, *IMAGES),
    "sd3": (*GENERATORS, *MANY, *IMAGES),
    "qwen": (*GENERATORS, *MANY, *IMAGES),
}
"""Those that guide in two calls or in one, draw noise in each step, leave out padding."""


def prove(worlds: Worlds, size: int, name: str, cases: tuple[Case, ...], **options: Any) -> None:
    wanted = generate(name, cases)
    by_rank = worlds(size).run(generate, name, cases, options)
    for case, want, found in zip(cases, wanted, zip(*by_rank, strict=True), strict=True):
        assert error(found[0], want) < LIMIT, case
        assert all(torch.equal(found[0], other) for other in found[1:]), case


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", TINY)
def test_any_ranks_give_the_latents_of_one_process(worlds: Worlds, name: str, size: int) -> None:
    prove(worlds, size, name, ODD if size % 2 else EVEN)


@pytest.mark.parametrize("name", ["wan", "flux"])
def test_more_ranks_than_heads(worlds: Worlds, name: str) -> None:
    prove(worlds, 5, name, ODD)


@pytest.mark.parametrize("name", OTHERS)
def test_generators_and_batches(worlds: Worlds, name: str) -> None:
    prove(worlds, 2, name, OTHERS[name])


@pytest.mark.soak
@pytest.mark.parametrize("size", [3, 4, 6])
@pytest.mark.parametrize("plan", ["auto", "ring", "ulysses", "gather"])
@pytest.mark.parametrize("name", OTHERS)
def test_generators_batches_and_plans(worlds: Worlds, name: str, plan: str, size: int) -> None:
    prove(worlds, size, name, (*OTHERS[name], *EVEN), plan=plan)


def meshes(name: str) -> list[bool]:
    """For each forward of a guided run, whether it was on half of the ranks."""
    pipe, halves = pipeline(name), list[bool]()
    weft.parallelize(pipe)
    region = pipe._weft.regions["transformer"]
    run = region.run

    def noted(mesh: Any, args: Any, kwargs: Any) -> Any:
        halves.append(mesh is not None)
        return run(mesh, args, kwargs)

    region.run = noted
    try:
        call(pipe, name, Case(), dist.get_rank())
    finally:
        weft.restore(pipe)
    return halves


@pytest.mark.parametrize(
    ("name", "halves"), [("sd3", [True] * 4), ("wan", [False, False, True, True, True])], ids=["one", "two"]
)
def test_branches_of_guidance_are_on_halves_of_the_ranks(
    worlds: Worlds, name: str, halves: list[bool]
) -> None:
    """In one call, or in two from the second step on."""
    assert worlds(2).run(meshes, name) == [halves] * 2


# Masks.

OFTEN = "dense_steps=0,dense_layers=0,recall=0,block=8"
MASKS = (f"sta:tile=1x2x2,{OFTEN}", f"radial:{OFTEN}", f"svg:{OFTEN}", f"topk:0.3,tile=1x2x2,{OFTEN}")
LARGE = {"height": 128, "width": 160}
MASKED = (Case(branches=1, more=LARGE), Case(more=LARGE), Case(more=LARGE, seeds=(3,)))


def masked(name: str, mask: str, cases: tuple[Case, ...]) -> list[tuple[Tensor, str]]:
    """Latents, and what was said. Without ranks too: a mask is something to do for one."""
    pipe, answers = pipeline(name), list[tuple[Tensor, str]]()
    weft.parallelize(pipe, sparse=mask)
    try:
        for case in cases:
            with redirect_stderr(StringIO()) as said:
                out = call(pipe, name, case, dist.get_rank() if dist.is_initialized() else 0)
            answers.append((out, said.getvalue()))
    finally:
        weft.restore(pipe)
    return answers


@cache
def masked_alone(name: str, mask: str) -> list[tuple[Tensor, str]]:
    return masked(name, mask, MASKED)


@cache
def dense_alone(name: str) -> list[Tensor]:
    return generate(name, MASKED)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["wan", "hunyuan", "flux"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.partition(":")[0])
def test_masks_are_those_of_one_process(worlds: Worlds, mask: str, name: str, size: int) -> None:
    """And so is their account, told once."""
    alone, by_rank = masked_alone(name, mask), worlds(size).run(masked, name, mask, MASKED)
    for (want, _), dense, found in zip(alone, dense_alone(name), zip(*by_rank, strict=True), strict=True):
        outs, said = zip(*found, strict=True)
        assert error(outs[0], want) < LIMIT
        assert all(torch.equal(outs[0], other) for other in outs[1:])
        assert said[0].count(f"weft: {mask}: ") == 1
        assert not any(said[1:])
        if (name, mask) != ("flux", MASKS[1]):  # radial is about time, and images have none
            assert error(want, dense) > 1e-3
            assert " sparse and 0 dense attentions\n  density    0." in said[0]


# What is left behind, and what is found out.


def restored(name: str) -> tuple[bool, list[str]]:
    """Whether a restored pipeline gives what it gave; what is not as it was."""
    pipe, case = pipeline(name), Case()
    before, seen = call(pipe, name, case), look(pipe)
    for _ in range(2):
        weft.parallelize(pipe, check="first")
        call(pipe, name, case)
        weft.restore(pipe)
    left = changes(seen, look(pipe))
    return torch.equal(before, call(pipe, name, case)), left


@pytest.mark.parametrize("name", TINY)
def test_restore_leaves_nothing_behind(worlds: Worlds, name: str) -> None:
    assert worlds(2).run(restored, name) == [(True, [])] * 2


def broken(name: str) -> str:
    """What check says of attention over a rank's own tokens only."""
    plain, pipe = attention_hook.attention, pipeline(name)
    attention_hook.attention = lambda q, k, v, **_: F.scaled_dot_product_attention(q, k, v)
    try:
        generate(name, [Case()], {"check": "first"})
    except CommError as error:
        return str(error)
    finally:
        attention_hook.attention = plain
    assert not hasattr(pipe, "_weft")
    return "nothing"


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("wan", "blocks.0.attn1"),
        ("flux", "transformer_blocks.0.attn"),
        ("mochi", "transformer_blocks.0.attn1"),
    ],
)
def test_check_finds_wrong_attention(worlds: Worlds, name: str, module: str) -> None:
    for said in worlds(3).run(broken, name):
        assert said.startswith(f"{module}: rows of rank")
